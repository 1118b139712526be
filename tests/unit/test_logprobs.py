"""Chunked log-probabilities equal plain ones in values and gradients, for every kind of LM head."""

from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from families import tiny_model
from hypothesis import strategies as st
from miniatures import FAMILIES, load
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_fixture import DEVICE, Spy, distance, make_policy, snapshot, trained, updates_of
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from rlhf_zoo.functional import selected_logprobs
from rlhf_zoo.modeling import chunked_logprobs, logprobs
from rlhf_zoo.modeling.batches import count_tokens, split_batches
from rlhf_zoo.modeling.chunked_logprobs import logit_transform
from rlhf_zoo.modeling.logprobs import response_logprobs, text_logprobs
from rlhf_zoo.modeling.sampling.sampler import Samples, Vocabulary, sample
from rlhf_zoo.ppo import key_checks
from rlhf_zoo.ppo.minibatch import Minibatch

HOLES = Vocabulary(15, (4, 9))
# Transforms of a head's output, and heads that are not plain linear layers.
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "scaled": ("cohere", {"logit_scale": 0.25}),
    "divided": ("granite", {"logits_scaling": 3.0}),
    "capped": ("gemma2", {"final_logit_softcapping": 2.0}),
    "with a bias": ("phi", {}),
    "in a mixture": ("mixtral", {}),
}


def some(size: int = 15, *, seed: int = 0, vocabulary: Vocabulary | None = None) -> Samples:
    """Three rows whose prompts and responses end in different places."""
    random = torch.Generator().manual_seed(seed)
    prompts, responses = (torch.tensor(lengths).unsqueeze(1) for lengths in ([2, 4, 1], [3, 1, 6]))
    free = torch.tensor([token for token in range(size) if vocabulary is None or token in vocabulary])
    ids = [free[torch.randint(len(free), (3, width), generator=random)] for width in (4, 6)]
    masks = torch.arange(4) >= 4 - prompts, torch.arange(6) < responses
    return Samples(ids[0], masks[0], ids[1], masks[1], torch.zeros(3, 6), torch.ones(3).bool(), vocabulary).to(DEVICE)


def both_ways(
    monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, samples: Samples, **options: Any
) -> list[tuple[Tensor, ...]]:
    """Plain, then chunked: log π, entropy, and the gradient of every weight by a sum of both."""
    results = []
    for ask in (lambda _: None, logit_transform):
        monkeypatch.setattr(logprobs, "logit_transform", ask)
        output = response_logprobs(model, samples, temperature=0.7, **options)
        weights = torch.linspace(-1, 2, output.logprobs.numel(), device=output.logprobs.device).view_as(output.logprobs)
        loss = (weights * output.logprobs).sum()
        if options.get("entropy_requires_grad"):
            loss = loss + (weights.flip(1) * output.entropy).sum()
        learning = [weight for weight in model.parameters() if weight.requires_grad]
        gradients = torch.autograd.grad(loss, learning, allow_unused=True)
        results.append((output.logprobs, output.entropy, *(x for x in gradients if x is not None)))
    return results


def assert_equal(plain: tuple[Tensor, ...], chunked: tuple[Tensor, ...], within: float = 1e-5) -> None:
    assert len(plain) == len(chunked) > 2
    for expected, actual in zip(plain, chunked, strict=True):
        # Of a gradient's largest entry: they are sums over many tokens.
        assert (expected - actual).abs().max() <= within * max(1.0, float(expected.detach().abs().max()))


@pytest.mark.parametrize("name", [*HEADS, *FAMILIES])
@pytest.mark.parametrize("learns", [False, True], ids=["logged", "bonus"])
def test_chunked_logprobs_match_plain_path(monkeypatch: pytest.MonkeyPatch, name: str, learns: bool) -> None:
    monkeypatch.setattr(chunked_logprobs, "tokens_per_chunk", lambda _, size: max(1, 40 // size))
    if name in HEADS:
        family, more = HEADS[name]
        model = tiny_model(AutoModelForCausalLM, family, **more)
    else:
        model = load(name)[0]
    assert logit_transform(model.to(DEVICE)) is not None
    for vocabulary in (None, HOLES):
        assert_equal(*both_ways(monkeypatch, model, some(vocabulary=vocabulary), entropy_requires_grad=learns))


class Widest(TorchDispatchMode):
    """Records the most rows of any vocabulary-wide float32 tensor made while it is open, except a head's weight."""

    def __init__(self, head: Tensor) -> None:
        super().__init__()
        self.head, self.rows = head.t().shape, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if (
            isinstance(out, Tensor)
            and out.dtype == torch.float32
            and out.shape[-1:] == self.head[-1:]
            and out.shape != self.head
        ):
            self.rows = max(self.rows, out.numel() // self.head[-1])
        return out


def test_chunked_text_logprobs_match_plain_and_hold_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_logprobs, "tokens_per_chunk", lambda *_: 3)
    model, ids = make_policy(), some().completion_ids
    attention = torch.arange(6, device=ids.device) < torch.tensor([[6], [4], [5]], device=ids.device)
    logits = model(input_ids=ids, attention_mask=attention.long()).logits[:, :-1]
    plain = selected_logprobs(logits, ids[:, 1:]).masked_fill(~attention[:, 1:], 0)
    with Widest(model.lm_head.weight) as widest:
        result = text_logprobs(model, ids, attention)
        result.sum().backward()
        response_logprobs(model, some(), loss=lambda logprobs, _: (logprobs.sum(), {})).loss.backward()
    assert widest.rows == 3
    assert_equal(
        (plain, *torch.autograd.grad(plain.sum(), list(model.parameters()))),
        (result, *torch.autograd.grad(text_logprobs(model, ids, attention).sum(), list(model.parameters()))),
    )


def test_chunked_logprobs_support_frozen_and_bfloat16_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head without a gradient gets none; bfloat16 rounds its products, and sums stay in float32."""
    model = make_policy()
    model.lm_head.requires_grad_(False)
    plain, chunked = both_ways(monkeypatch, model, some(), entropy_requires_grad=True)
    assert_equal(plain, chunked)
    with torch.autocast(DEVICE, torch.bfloat16):
        plain, chunked = both_ways(monkeypatch, make_policy(), some())
    assert chunked[0].dtype == chunked[1].dtype == torch.float32
    assert_equal(plain, chunked, within=0.03)
    half = both_ways(monkeypatch, make_policy().to(torch.bfloat16), some())
    assert_equal(*half, within=0.03)


class Own(LlamaForCausalLM):
    """A custom class that changes logits in a way that its configuration does not show."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits + torch.arange(out.logits.shape[-1]).to(out.logits)
        return out


def test_models_with_custom_logits_use_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import LoraConfig, get_peft_model

    plain = make_policy()
    custom = Own(plain.config).to(DEVICE)
    adapted: Any = get_peft_model(make_policy(), LoraConfig(target_modules=["lm_head", "q_proj"]))
    beside: Any = get_peft_model(make_policy(), LoraConfig(target_modules=["q_proj"]))
    assert [logit_transform(model) for model in (custom, adapted)] == [None, None]
    assert logit_transform(beside) == logit_transform(plain) == (1.0, None)
    assert not set(vars(plain.lm_head)) & {"forward"}
    hooked = make_policy()
    assert logit_transform(hooked) == (1.0, None)
    hooked.lm_head.register_forward_hook(lambda head, _, logits: logits * 1.5 if head.training else logits)
    assert logit_transform(hooked) is None
    for model in (custom, adapted, beside):
        assert_equal(*both_ways(monkeypatch, model, some()))


def test_pad_embedding_does_not_affect_real_tokens() -> None:
    """Not even when its embedding is NaN, or through the cache."""
    base, pad_id, vocabulary = some(15), 16, Vocabulary(16)
    prompts = base.prompt_ids.masked_fill(~base.prompt_mask, pad_id)
    completions = base.completion_ids.masked_fill(~base.mask, pad_id)
    samples = replace(base, prompt_ids=prompts, completion_ids=completions, vocabulary=vocabulary)
    how: Any = {"seed": 0, "max_new_tokens": 4, "stop_ids": [], "pad_id": pad_id, "vocabulary": vocabulary}
    results = []
    for embedding in (0.0, float("nan")):
        model = make_policy(tie_word_embeddings=False)
        model.get_input_embeddings().weight.data[pad_id] = embedding
        drawn = sample(model, [[3], [5, 4, 3]], keys=[(0,), (1,)], **how)
        of_texts = text_logprobs(model, completions, base.mask)
        results.append((response_logprobs(model, samples).logprobs, of_texts, drawn.logprobs))
    assert all(map(torch.equal, *results))


def test_split_batches_group_lengths_within_token_budget() -> None:
    samples = Samples(*(torch.cat([x] * 4) for x in list(vars(some()).values())[:6]))
    for size, tokens in ((64, 20), (2, 1000), (3, None), (64, 1)):
        batches = split_batches(samples, max_rows=size, max_tokens=tokens)
        assert sorted(torch.cat(batches).tolist()) == list(range(12))
        for rows in batches:
            assert 1 <= len(rows) <= size
            assert tokens is None or len(rows) == 1 or count_tokens(samples, rows) <= tokens
    assert len(split_batches(samples, max_rows=64, max_tokens=36)) < 12
    assert split_batches(samples, torch.tensor([5, 1]), max_rows=1)[0].tolist() == [1]


@hypothesis.given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 4), st.integers(1, 24))
def test_split_batches_minimize_count_then_padding(lengths: list[int], size: int, tokens: int) -> None:
    """Compared with all ways to cut the rows sorted by length."""

    def cost(batches: list[list[int]]) -> tuple[int, int]:
        return len(batches), sum(len(batch_lengths) * max(batch_lengths) for batch_lengths in batches)

    mask = torch.arange(9) < torch.tensor(lengths).unsqueeze(1)
    samples = Samples(mask.long()[:, :1], mask[:, :1], mask.long()[:, 1:], mask[:, 1:], mask[:, 1:].float(), mask[:, 0])
    batches = split_batches(samples, max_rows=size, max_tokens=tokens, minimize_padding=True)
    assert sorted(torch.cat(batches).tolist()) == list(range(len(lengths)))
    result = [[lengths[row] for row in batch.tolist()] for batch in batches]
    ordered, ways = sorted(lengths), []
    for cuts in product([False, True], repeat=len(lengths) - 1):
        bounds = [0, *(place for place, cut in enumerate(cuts, start=1) if cut), len(lengths)]
        way = [ordered[begin:end] for begin, end in pairwise(bounds)]
        if all(
            len(batch_lengths) == 1
            or (len(batch_lengths) <= size and len(batch_lengths) * max(batch_lengths) <= tokens)
            for batch_lengths in way
        ):
            ways.append(cost(way))
    assert cost(result) == min(ways)


OPTIONS: dict[str, dict[str, Any]] = {
    "chunks": {},
    "a budget of tokens": {"max_tokens_per_micro_batch": 30},
    "from a forward pass": {"recompute_logprobs": True, "max_tokens_per_micro_batch": 30},
    "activations made again": {"gradient_checkpointing": True},
    "rows end to end": {"padding_free": True, "max_tokens_per_micro_batch": 30},
    "rows end to end, activations made again": {"padding_free": True, "gradient_checkpointing": True},
}


class Sized(Spy):
    """Keeps how many rows and tokens each micro-batch has."""

    def tokens(self, samples: Samples) -> int:
        return count_tokens(samples, torch.arange(len(samples)), packed=self.args.padding_free)

    def loss(self, model: Any, batch: Minibatch, progress: Any) -> Tensor:
        samples = batch.rollout.samples
        self.sizes = [*getattr(self, "sizes", []), (len(samples), self.tokens(samples))]
        return super().loss(model, batch, progress)


@pytest.mark.parametrize("critic", ["policy", "shared"])
def test_run_with_any_memory_option_matches_plain_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, critic: str
) -> None:
    """Uses SGD: Adam divides by gradient size and would amplify the rounding of gradients near 0."""
    keys: dict[str, Any] = {
        "kind": Sized, "critic": critic, "optim": "sgd", "entropy_coef": 0.1, "stop_token_id": 3, "learning_rate": 0.1,
    }  # fmt: skip
    with monkeypatch.context() as patched:
        patched.setattr(logprobs, "logit_transform", lambda _: None)
        plain = trained(tmp_path, **keys)
    assert distance(plain.before, snapshot(plain)) > 1e-3
    assert {rows for rows, _ in plain.sizes} == {4}
    for name, options in OPTIONS.items():
        run = trained(tmp_path, **keys | options)
        assert distance(snapshot(plain), snapshot(run)) < 1e-5, name
        for expected, actual in zip(updates_of(plain), updates_of(run), strict=True):
            # In a quarter that no score reaches, returns are rounding alone.
            here = {key: value for key, value in actual.items() if "mismatch" not in key and "quarter" not in key}
            assert here == pytest.approx({key: expected[key] for key in here}, rel=1e-4, abs=1e-5, nan_ok=True), name
        if "max_tokens_per_micro_batch" in options:
            assert all(rows == 1 or tokens <= 30 for rows, tokens in run.sizes)
            assert len({rows for rows, _ in run.sizes}) > 1


@pytest.mark.skipif(DEVICE != "cpu", reason="a CPU's bound")
def test_cpu_bounds_tokens_per_pass_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """max_tokens_per_micro_batch replaces both bounds."""
    monkeypatch.setattr(key_checks, "CPU_TOKENS_PER_PASS", 20)
    keys: dict[str, Any] = {
        "kind": Sized, "max_steps": 1, "num_ppo_epochs": 1, "stop_token_id": 3, "num_mini_batches": 1,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4,
    }  # fmt: skip
    bounded, custom = trained(tmp_path, **keys).sizes, trained(tmp_path, **keys, max_tokens_per_micro_batch=1000).sizes
    assert all(rows == 1 or tokens <= 20 for rows, tokens in bounded) and {rows for rows, _ in bounded} == {1, 2}
    assert [rows for rows, _ in custom] == [8]
