"""Prompts that wait for a place in the cache sample what they would have sampled all at once, in every family."""

from pathlib import Path
from typing import Any

import miniatures
import pytest
import torch
from trainer_fixture import SAVED, Spy, assert_resumes_exactly, make_trainer, trained, updates_of
from transformers import PreTrainedModel

from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling.sampling.kv_cache import can_join
from rlhf_zoo.modeling.sampling.sampler import Samples, sample

# Longer than the sliding windows of the miniatures, and some twice.
LENGTHS = [3, 40, 9, 1, 25, 9, 60, 2, 14, 33, 5, 1]
TOKENS = 20


def drawn(model: PreTrainedModel, stops: list[int], **options: Any) -> Samples:
    generator = torch.Generator().manual_seed(1)
    size = model.config.vocab_size
    prompts = [torch.randint(8, size, (n,), generator=generator).tolist() for n in LENGTHS]
    prompts[5] = prompts[2]
    keys = [(0, i) for i in range(len(prompts))]
    return sample(model, prompts, keys=keys, seed=3, max_new_tokens=TOKENS, stop_ids=stops, pad_id=0, **options)


def held(model: PreTrainedModel, run: Any) -> tuple[list[int], Any]:
    """Tokens in the cache after each pass, padding included."""
    seen: list[int] = []
    hook = model.register_forward_hook(
        lambda _, __, kwargs, ___: seen.append(kwargs["attention_mask"].numel()), with_kwargs=True
    )
    try:
        return seen, run()
    finally:
        hook.remove()


@pytest.mark.parametrize("name", miniatures.FAMILIES)
def test_queue_does_not_change_tokens(name: str) -> None:
    model, _ = miniatures.load(name)
    stops = list(range(0, model.config.vocab_size, 9))
    passes, together = held(model, lambda: drawn(model, stops))
    assert len(set(map(len, together.completion_id_lists()))) > 3
    for most in (80, 200, 10**6):
        waiting, queued = held(model, lambda most=most: drawn(model, stops, max_tokens=most))
        assert queued.completion_id_lists() == together.completion_id_lists()
        assert torch.equal(queued.ended, together.ended) and torch.equal(queued.prompt_ids, together.prompt_ids)
        torch.testing.assert_close(queued.logprobs, together.logprobs, rtol=0, atol=1e-5)
        assert max(waiting) <= most
    assert max(passes) < len(LENGTHS) * (max(LENGTHS) + TOKENS)


def test_queued_rows_join_running_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = miniatures.load("Llama 3")
    stops = list(range(0, model.config.vocab_size, 5))
    passes, _ = held(model, lambda: drawn(model, stops, max_tokens=200))
    monkeypatch.setattr("rlhf_zoo.modeling.sampling.decoder.can_join", lambda *_: False)
    waves, _ = held(model, lambda: drawn(model, stops, max_tokens=200))
    assert len(passes) < len(waves)


def test_cache_that_cannot_join_takes_prompts_in_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = miniatures.load("Llama 3")
    together = drawn(model, [])
    monkeypatch.setattr("rlhf_zoo.modeling.sampling.decoder.can_join", lambda *_: False)
    monkeypatch.setattr("rlhf_zoo.modeling.sampling.decoder.join", None)
    monkeypatch.setattr("rlhf_zoo.modeling.sampling.decoder.drop_columns", None)
    passes, queued = held(model, lambda: drawn(model, [], max_tokens=200))
    assert queued.completion_id_lists() == together.completion_id_lists() and max(passes) <= 200


def test_cache_with_recurrent_layers_cannot_join() -> None:
    from families import tiny_model
    from transformers import AutoModelForCausalLM

    from rlhf_zoo.modeling.sampling.kv_cache import new_cache

    model = tiny_model(AutoModelForCausalLM, "qwen3_next")
    assert not can_join(new_cache(model), model)


def test_prompt_over_token_budget_is_rejected() -> None:
    model, _ = miniatures.load("GPT-2")
    with pytest.raises(ZooError, match=r"max_rollout_batch_tokens is 79, .* 60 tokens .* up to 20 needs 80"):
        drawn(model, [], max_tokens=79)


def test_equal_prompts_share_prefill_but_sample_as_if_alone() -> None:
    model, _ = miniatures.load("Qwen3-Base")
    settings: dict[str, Any] = {"seed": 3, "max_new_tokens": 9, "stop_ids": [], "pad_id": 0}
    prompts, keys = [[40, 41], [50, 51, 52], [40, 41], [40, 41]], [(0, i) for i in range(4)]
    together = sample(model, prompts, keys=keys, **settings)
    for row, key in enumerate(keys):
        alone = sample(model, [prompts[row]], keys=[key], **settings)
        assert alone.completion_id_lists()[0] == together.completion_id_lists()[row]
        torch.testing.assert_close(alone.logprobs[0], together.logprobs[row], rtol=0, atol=1e-5)


def test_run_with_queue_equals_run_without_and_resumes_exactly(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", max_steps=1)
    queued = assert_resumes_exactly(
        lambda folder: make_trainer(folder, kind=Spy, max_rollout_batch_tokens=60, **SAVED), tmp_path
    )
    # The critics begin apart, so of the update itself only what was sampled is the same.
    one, other = updates_of(plain)[0], updates_of(queued)[0]
    names = [name for name in one if name.startswith(("completions/", "objective/"))]
    assert len(names) > 4 and [one[n] for n in names] == pytest.approx([other[n] for n in names], rel=1e-4, abs=1e-5)


def test_trainer_rejects_token_budget_below_longest_prompt(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match=r"max_rollout_batch_tokens is 11, .* set it to at least that\.$"):
        make_trainer(tmp_path, max_rollout_batch_tokens=11)
