"""Sampling: which tokens come out depends on the model, the prompt and the row's own random stream, on nothing else."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trainer_fixture import EOS, PAD, make_policy
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from rlhf_zoo.modeling.logprobs import token_logprobs
from rlhf_zoo.modeling.sampling.random import draw_tokens
from rlhf_zoo.modeling.sampling.sampler import Samples, left_pad, sample

VOCABULARY, SEED = 17, 7
PROMPTS = [[5], [3, 9, 4], [2, 2], [16, 8, 7, 6, 5, 4, 3], [9, 1, 9], [12, 13], [4, 0, 4, 0], [11]]
KEYS = [(0, index) for index in range(len(PROMPTS))]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    if request.param == "llama":
        return make_policy(max_position_embeddings=64)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=4, n_positions=64, initializer_range=0.25,
        bos_token_id=None, eos_token_id=EOS,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT2LMHeadModel(config).eval()


def draw(model: PreTrainedModel, prompts: Sequence[list[int]] = PROMPTS, **options: Any) -> Samples:
    fields = {"keys": KEYS, "seed": SEED, "max_new_tokens": 12, "stop_ids": [EOS], "pad_id": PAD}
    return sample(model, prompts, **fields | options)


def close(got: Tensor, wanted: Tensor) -> None:
    """Two float32 passes over the same tokens, with and without cache and padding, differ by rounding: 5e-6 at most."""
    torch.testing.assert_close(got, wanted, rtol=0.0, atol=1e-5)


def alone(model: PreTrainedModel, prompt: list[int], completion: list[int], *, temperature: float = 1.0) -> Tensor:
    """log-softmax before each completion token from one plain pass: no padding, no cache. (T, V)."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0]
    return (logits[len(prompt) - 1 : -1].double() / temperature).log_softmax(-1)


def first_token(model: PreTrainedModel, prompt: list[int], *, temperature: float = 1.0) -> Tensor:
    """Probabilities of the first completion token: (V,)."""
    return alone(model, prompt, [0], temperature=temperature)[0].exp()


def same_rows(got: Samples, wanted: Samples) -> None:
    assert got.completion_id_lists() == wanted.completion_id_lists()
    assert got.ended.tolist() == wanted.ended.tolist()
    for one, other in zip(got.logprobs, wanted.logprobs, strict=True):
        width = min(len(one), len(other))
        close(one[:width], other[:width])


# ---- what decides a row


def test_row_depends_only_on_its_prompt_and_stream(model: PreTrainedModel) -> None:
    """Not on order, neighbours, the width of its padding or what stands in it, the budget, or torch's generator."""
    together = draw(model)
    order = [3, 0, 7, 5, 1, 6, 2, 4]
    shuffled = draw(model, [PROMPTS[i] for i in order], keys=[KEYS[i] for i in order])
    same_rows(shuffled, together.select(torch.tensor(order)))
    for i, (prompt, key) in enumerate(zip(PROMPTS, KEYS, strict=True)):
        same_rows(draw(model, [prompt], keys=[key]), together.select(slice(i, i + 1)))
    wide = draw(model, [*PROMPTS, [3] * 30], keys=[*KEYS, (9, 9)])
    assert wide.prompt_ids.shape[1] == 30
    same_rows(wide.select(slice(0, len(PROMPTS))), together)
    same_rows(draw(model, pad_id=11), together)
    assert draw(model, max_new_tokens=5).completion_id_lists() == [
        tokens[:5] for tokens in together.completion_id_lists()
    ]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        before = torch.get_rng_state()
        same_rows(draw(model), together)
        assert torch.equal(torch.get_rng_state(), before)


def test_stream_depends_only_on_seed_and_key(model: PreTrainedModel) -> None:
    # NumPy's SeedSequence takes [s, 3] and [s, 3, 0] for the same entropy.
    keys = [(0, 4), (1, 4), (4, 0), (0, 5), (2**31, 4), (3,), (3, 0), (3, 0, 0), (0, 3), (0, 4)]
    rows, other_seed = (
        draw(model, [[5, 3]] * 10, keys=keys, stop_ids=[], seed=s).completion_id_lists() for s in (7, 8)
    )
    assert rows[0] == rows[-1] and len({tuple(row) for row in rows}) == 9
    assert all(a != b for a, b in zip(rows, other_seed, strict=True))


# ---- ends


def test_mask_includes_first_stop_token_and_nothing_after(model: PreTrainedModel) -> None:
    stops = [EOS, 6, 14]
    prompts, keys = PROMPTS * 4, [(1, i) for i in range(4 * len(PROMPTS))]
    samples = draw(model, prompts, keys=keys, stop_ids=stops, max_new_tokens=6)
    assert samples.ended.any()
    assert not samples.ended.all()
    for row, tokens in enumerate(samples.completion_id_lists()):
        assert samples.mask[row].tolist() == [t < len(tokens) for t in range(samples.mask.shape[1])]
        assert not set(tokens[:-1]) & set(stops)
        assert bool(samples.ended[row]) == (tokens[-1] in stops)
        assert samples.ended[row] or len(tokens) == 6
    assert (samples.completion_ids[~samples.mask] == PAD).all()
    assert (samples.logprobs[~samples.mask] == 0).all()
    assert (samples.logprobs[samples.mask] < 0).all()


def test_pad_is_an_ordinary_token_when_stop_ids_are_empty(model: PreTrainedModel) -> None:
    samples = draw(model, [[5]] * 40, keys=[(2, i) for i in range(40)], stop_ids=[], max_new_tokens=9)
    assert samples.mask.shape == (40, 9) and samples.mask.all() and not samples.ended.any()
    assert (samples.completion_ids[:, :-1] == PAD).any() and (samples.logprobs < 0).all()


def test_finished_rows_leave_the_batch(model: PreTrainedModel) -> None:
    sizes: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    try:
        samples = draw(model, PROMPTS * 2, keys=[(3, i) for i in range(2 * len(PROMPTS))], stop_ids=[EOS, 6, 14, 3, 8])
    finally:
        hook.remove()
    # Each prompt is there twice, and is computed once.
    assert sizes == [len(PROMPTS), *samples.mask.sum(0).tolist()[1:]]
    assert sizes[-1] < sizes[1]


# ---- log-probabilities


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_logprobs_equal_those_of_full_forward_pass(model: PreTrainedModel, temperature: float) -> None:
    samples = draw(model, temperature=temperature)
    assert samples.logprobs.dtype == torch.float32
    again = token_logprobs(model, samples, temperature=temperature)
    close(again, samples.logprobs)
    for row, tokens in enumerate(samples.completion_id_lists()):
        logps = alone(model, PROMPTS[row], tokens, temperature=temperature)
        exact = logps.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1).float()
        close(samples.logprobs[row, : len(tokens)], exact)


def test_token_logprobs_do_not_depend_on_batches_or_padding(model: PreTrainedModel) -> None:
    samples = draw(model)
    whole = token_logprobs(model, samples)
    assert (whole[~samples.mask] == 0).all()
    for size in (1, 3, 64):
        close(token_logprobs(model, samples, batch_size=size), whole)
    # Wider on both sides, with a real token's id in the padding.
    pad = torch.full((len(PROMPTS), 5), 9)
    off = torch.zeros_like(pad, dtype=torch.bool)
    wide = Samples(
        prompt_ids=torch.cat([pad, samples.prompt_ids.masked_fill(~samples.prompt_mask, 9)], 1),
        prompt_mask=torch.cat([off, samples.prompt_mask], 1),
        completion_ids=torch.cat([samples.completion_ids.masked_fill(~samples.mask, 9), pad], 1),
        mask=torch.cat([samples.mask, off], 1),
        logprobs=torch.cat([samples.logprobs, off.float()], 1),
        ended=samples.ended,
    )
    got = token_logprobs(model, wide)
    close(got[:, : whole.shape[1]], whole)
    assert (got[:, whole.shape[1] :] == 0).all()


# ---- the distribution


def test_draw_tokens_inverts_cumulative_distribution() -> None:
    # A quarter each but for the first token, which has probability 0 and is not drawn even by a uniform number of 0.
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.5, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, 0.0, 0.0]]).expand(len(uniform), 5)
    assert draw_tokens(logits, uniform).tolist() == [1, 1, 2, 3, 3, 4, 4]


DRAWS = 4000
# Under the right distribution the statistic has at most 16 degrees of freedom: P(χ² > 60) < 1e-6.
CHI_SQUARE = 60.0


def chi_square(tokens: Tensor, probabilities: Tensor) -> float:
    """Pearson's statistic of the counts against the probabilities; tokens expected less than 5 times form one cell."""
    counts = np.bincount(tokens.cpu().numpy(), minlength=len(probabilities))
    expected = probabilities.cpu().numpy() * len(tokens)
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 5:
        counts, expected = counts[:-1], expected[:-1]
    return float(((counts - expected) ** 2 / expected).sum())


def first_tokens(model: PreTrainedModel, prompt: list[int], **options: Any) -> Samples:
    keys = [(4, i) for i in range(DRAWS)]
    return draw(model, [prompt] * DRAWS, keys=keys, max_new_tokens=1, stop_ids=[], **options)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_first_token_follows_softmax_at_temperature(model: PreTrainedModel, temperature: float) -> None:
    tokens = first_tokens(model, [3, 9, 4], temperature=temperature).completion_ids[:, 0]
    assert chi_square(tokens, first_token(model, [3, 9, 4], temperature=temperature)) < CHI_SQUARE
    # The same draws do not pass for another temperature or another prompt: the bound is wide and still sees.
    assert chi_square(tokens, first_token(model, [3, 9, 4], temperature=temperature * 2)) > CHI_SQUARE
    assert chi_square(tokens, first_token(model, [3, 9, 5], temperature=temperature)) > CHI_SQUARE


def test_second_token_is_independent_draw(model: PreTrainedModel) -> None:
    keys = [(5, i) for i in range(DRAWS)]
    pairs = draw(model, [[3, 9, 4]] * DRAWS, keys=keys, max_new_tokens=2, stop_ids=[]).completion_ids
    common = int(pairs[:, 0].mode().values)
    following = pairs[pairs[:, 0] == common, 1]
    assert chi_square(following, first_token(model, [3, 9, 4, common])) < CHI_SQUARE


def _nucleus(probabilities: Tensor, top_p: float) -> list[int]:
    kept, mass = [], 0.0
    for token in sorted(range(len(probabilities)), key=lambda v: -float(probabilities[v])):
        kept.append(token)
        mass += float(probabilities[token])
        if mass >= top_p:
            break
    return kept


def test_top_p_draws_from_nucleus_in_proportion(model: PreTrainedModel) -> None:
    prompt = [3, 9, 4]
    probabilities = first_token(model, prompt)
    nucleus = _nucleus(probabilities, 0.5)
    assert 1 < len(nucleus) < VOCABULARY
    samples = first_tokens(model, prompt, top_p=0.5)
    tokens = samples.completion_ids[:, 0]
    assert set(tokens.tolist()) == set(nucleus)
    inside = torch.zeros_like(probabilities)
    inside[nucleus] = probabilities[nucleus] / probabilities[nucleus].sum()
    assert chi_square(tokens, inside) < CHI_SQUARE
    # The log-probabilities stay those of the whole distribution.
    close(samples.logprobs[:, 0], probabilities.log()[tokens].float())


def test_top_p_applies_at_every_position_and_row(model: PreTrainedModel) -> None:
    samples = draw(model, top_p=0.6, temperature=0.9, stop_ids=[])
    for row, tokens in enumerate(samples.completion_id_lists()):
        for logps, token in zip(alone(model, PROMPTS[row], tokens, temperature=0.9), tokens, strict=True):
            assert token in _nucleus(logps.exp(), 0.6)
    close(token_logprobs(model, samples, temperature=0.9), samples.logprobs)


@pytest.mark.parametrize(("top_p", "temperature"), [(1e-6, 1.0), (1.0, 1e-4)])
def test_tiny_top_p_or_temperature_is_greedy(model: PreTrainedModel, top_p: float, temperature: float) -> None:
    for row, tokens in enumerate(draw(model, top_p=top_p, temperature=temperature).completion_id_lists()):
        assert tokens == alone(model, PROMPTS[row], tokens).argmax(-1).tolist()


# ---- Samples


def test_left_pad_pads_ids_and_mask() -> None:
    ids, mask = left_pad([[4, 5, 6], [7]], pad_id=2, device="cpu")
    assert ids.dtype == torch.int64
    assert ids.tolist() == [[4, 5, 6], [2, 2, 7]]
    assert mask.tolist() == [[True, True, True], [False, False, True]]


def test_select_drops_columns_that_are_padding_in_all_rows() -> None:
    three = Samples(
        prompt_ids=torch.tensor([[0, 0, 5], [0, 6, 7], [8, 9, 4]]),
        prompt_mask=torch.tensor([[False, False, True], [False, True, True], [True, True, True]]),
        completion_ids=torch.tensor([[3, 1, 0, 0], [1, 0, 0, 0], [2, 2, 2, 2]]),
        mask=torch.tensor([[True, True, False, False], [True, False, False, False], [True] * 4]),
        logprobs=torch.tensor([[-1.0, -2.0, 0.0, 0.0], [-3.0, 0.0, 0.0, 0.0], [-4.0, -5.0, -6.0, -7.0]]),
        ended=torch.tensor([True, True, False]),
    )
    assert three.completion_id_lists() == [[3, 1], [1], [2, 2, 2, 2]], "with the end token"
    part = three.select(torch.tensor([1, 0]))
    assert part.prompt_ids.tolist() == [[6, 7], [0, 5]]
    assert part.prompt_mask.tolist() == [[True, True], [False, True]]
    assert part.completion_ids.tolist() == [[1, 0], [3, 1]]
    assert part.mask.tolist() == [[True, False], [True, True]]
    assert part.logprobs.tolist() == [[-3.0, 0.0], [-1.0, -2.0]]
    assert part.ended.tolist() == [True, True]
