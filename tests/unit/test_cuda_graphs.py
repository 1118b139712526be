"""Decoding over a fixed-size cache with CUDA graphs, replaced here by a stand-in that replays steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import miniatures
import pytest
import torch
from families import tiny_model
from torch import Tensor
from trainer_fixture import SAVED, Spy, assert_resumes_exactly, make_trainer, trained, updates_of
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling.logprobs import response_states
from rlhf_zoo.modeling.sampling import cuda_graphs as graphs
from rlhf_zoo.modeling.sampling.cuda_graphs import fixed_cache_shape, round_rows, supports_fixed_cache
from rlhf_zoo.modeling.sampling.decoder import NextLogits
from rlhf_zoo.modeling.sampling.sampler import Samples, SamplingRequest, Vocabulary, sample
from rlhf_zoo.ppo.engines import NativeEngine

# Longer than the sliding windows of the miniatures, and some twice.
LENGTHS = [3, 40, 9, 1, 25, 9, 60, 2, 14, 33, 5, 1]
TOKENS = 24


class Recorded:
    """As CUDA graphs: a step is captured once, its replays compute into one tensor, and all share their memory."""

    def __init__(self) -> None:
        self.captured, self.replayed, self.shared = 0, 0, list[Tensor]()

    def __call__(self, step: Callable[[], NextLogits]) -> Callable[[], NextLogits]:
        step()  # the warm-up
        held = [each.clone() for each in step() if each is not None]
        self.captured += 1
        self.shared += held

        def replay() -> NextLogits:
            self.replayed += 1
            new = step()
            for each in self.shared:
                each.fill_(torch.nan)
            return NextLogits(*(mine.copy_(each) for mine, each in zip(held, new, strict=True) if each is not None))

        return replay


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of few columns, so that a short call has several shapes and moves what it holds."""
    monkeypatch.setattr(graphs, "COLUMN_MULTIPLE", 16)


def critic(states: Tensor) -> Tensor:
    return states.float().mean(-1)


def request(model: PreTrainedModel, *, seed: int = 3, max_tokens: int | None = None, rows: int = 12) -> SamplingRequest:
    generator = torch.Generator().manual_seed(1)
    size = model.config.vocab_size
    prompts = [torch.randint(8, size, (n,), generator=generator).tolist() for n in LENGTHS[:rows]]
    if rows > 5:
        prompts[5] = prompts[2]
    return SamplingRequest(
        prompts, keys=[(0, i) for i in range(rows)], seed=seed, max_new_tokens=TOKENS, temperature=1.0, pad_id=0,
        stop_ids=list(range(0, size, 30)), vocabulary=Vocabulary(size), max_tokens=max_tokens, critic=critic,
    )  # fmt: skip


def assert_equal_samples(first: Samples, other: Samples) -> None:
    assert first.completion_id_lists() == other.completion_id_lists()
    assert torch.equal(first.ended, other.ended) and torch.equal(first.prompt_ids, other.prompt_ids)
    torch.testing.assert_close(first.logprobs, other.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(first.values, other.values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", miniatures.FAMILIES)
def test_fixed_cache_samples_same_tokens(name: str, narrow: None) -> None:
    """With sliding windows, shared heads, softcaps, rows that end early, and queued prompts."""
    model, _ = miniatures.load(name)
    model.eval()
    recorded = Recorded()
    engine = NativeEngine(lambda: recorded)
    for most in (None, 4 * 96):
        query = request(model, max_tokens=most)
        got, plain = engine(model, query), sample(model, **vars(query))
        assert_equal_samples(got, plain)
        passed = critic(response_states(model, plain)).masked_fill(~plain.mask, 0)
        torch.testing.assert_close(plain.values, passed, rtol=0, atol=1e-5)
        assert len(set(map(len, plain.completion_id_lists()))) >= 3
    assert recorded.replayed > 2 * recorded.captured > 8


@pytest.fixture
def llama() -> PreTrainedModel:
    return miniatures.load("Llama 3")[0].eval()


def test_graphs_are_reused_until_weights_move(llama: PreTrainedModel, narrow: None) -> None:
    """Where the weights lie as they lay: a step in place is seen by the graphs, and moved weights are captured anew."""
    recorded = Recorded()
    engine = NativeEngine(lambda: recorded)
    query = request(llama)
    first, captured = engine(llama, query), recorded.captured
    again = engine(llama, query)
    assert recorded.captured == captured and torch.equal(first.logprobs, again.logprobs)
    with torch.no_grad():
        for weight in llama.parameters():
            weight.mul_(1.1)
    other = engine(llama, request(llama, seed=4))
    assert_equal_samples(other, sample(llama, **vars(request(llama, seed=4))))
    for weight in llama.parameters():
        weight.data = weight.data * 0.9
    before = recorded.captured
    assert_equal_samples(engine(llama, query), sample(llama, **vars(query)))
    assert recorded.captured - before >= 5


def test_autocast_cache_holds_keys_in_attention_dtype(
    llama: PreTrainedModel, narrow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rotation leaves them in float32, and each step would cast them all anew, to the same bits."""
    allocate, seen, samples = graphs.FixedLayer.allocate, set[torch.dtype](), []

    def as_they_come(layer: graphs.FixedLayer, keys: Tensor, values: Tensor) -> None:
        allocate(layer, keys, values)
        layer.keys, layer.values = layer.keys.to(keys.dtype), layer.values.to(values.dtype)

    def as_they_are(layer: graphs.FixedLayer, keys: Tensor, values: Tensor) -> None:
        allocate(layer, keys, values)
        seen.update((keys.dtype, layer.keys.dtype))

    for way in (as_they_come, as_they_are):
        monkeypatch.setattr(graphs.FixedLayer, "allocate", way)
        with torch.autocast("cpu", torch.bfloat16):
            samples.append(NativeEngine(Recorded)(llama, request(llama)))
    assert seen == {torch.float32, torch.bfloat16}
    assert torch.equal(samples[0].logprobs, samples[1].logprobs)


def test_graph_count_is_bounded(llama: PreTrainedModel, narrow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    engine = NativeEngine(Recorded)
    query = request(llama)
    assert_equal_samples(engine(llama, query), sample(llama, **vars(query)))
    assert engine._decoder is not None and len(engine._decoder._graphs) == 2


def test_rollout_works_after_failed_one(llama: PreTrainedModel, narrow: None) -> None:
    engine, calls = NativeEngine(Recorded), 0

    def fails(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise KeyboardInterrupt

    with llama.register_forward_hook(fails), pytest.raises(KeyboardInterrupt):
        engine(llama, request(llama))
    assert_equal_samples(engine(llama, request(llama, seed=5)), sample(llama, **vars(request(llama, seed=5))))


def test_unsupported_models_sample_without_graphs(llama: PreTrainedModel) -> None:
    def never() -> Any:
        raise AssertionError("nothing is captured")

    recurrent = tiny_model(AutoModelForCausalLM, "qwen3_next")
    few = request(recurrent, rows=2)
    assert not supports_fixed_cache(recurrent)
    assert len(NativeEngine(never)(recurrent, few)) == 2
    bounded = request(llama, rows=2, max_tokens=max(LENGTHS[:2]) + TOKENS)  # less than 128 columns
    assert_equal_samples(NativeEngine(never)(llama, bounded), sample(llama, **vars(bounded)))


def test_round_rows_and_fixed_cache_shape_sizes() -> None:
    rounded = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 7: 8, 13: 16, 16: 16, 17: 24, 25: 32, 256: 256}
    assert {rows: round_rows(rows) for rows in rounded} == rounded
    prompts = [[1] * 100] * 200
    assert fixed_cache_shape(prompts, 512, None) == (256, 640)
    assert fixed_cache_shape(prompts, 512, 100 * 640) == (96, 640)
    assert fixed_cache_shape(prompts, 512, 639) is None


def test_failed_capture_warns_once_and_samples_without_graphs(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:

    def refuses() -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", refuses)
    query = request(llama, rows=3)
    with pytest.warns(UserWarning, match=r"not permitted when stream is capturing\), .* rollout_graphs: false") as seen:
        got = NativeEngine(graphs.CudaGraphs)(llama, query)
    assert len(seen) == 1 and torch.is_autocast_cache_enabled()
    assert_equal_samples(got, sample(llama, **vars(query)))


def test_run_with_graphs_matches_run_without_and_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = trained(tmp_path / "plain", max_steps=1)
    recorders = list[Recorded]()

    def recorded() -> Recorded:
        recorders.append(Recorded())
        return recorders[-1]

    monkeypatch.setattr("rlhf_zoo.ppo.base.make_engine", lambda *_: NativeEngine(recorded))
    graphed = assert_resumes_exactly(lambda folder: make_trainer(folder, kind=Spy, **SAVED), tmp_path)
    assert all(each.replayed for each in recorders)
    one, other = updates_of(plain)[0], updates_of(graphed)[0]
    names = [name for name in one if name.startswith(("completions/", "objective/"))]
    assert len(names) > 4 and [one[n] for n in names] == pytest.approx([other[n] for n in names], rel=1e-4, abs=1e-5)


def test_rollout_graphs_requires_native_engine(tmp_path: Path) -> None:
    with pytest.raises(ZooError, match="rollout_graphs is for the native engine, but rollout_engine is 'transformers'"):
        make_trainer(tmp_path, rollout_engine="transformers", rollout_graphs=False)
