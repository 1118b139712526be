"""Rollouts of another engine: its completions, the trainer's log-probabilities, and what stands between the two."""

import contextlib
import functools
import http.server
import importlib.util
import inspect
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import miniatures
import numpy as np
import pytest
import torch
from peft import LoraConfig
from stub_vllm import StubVLLM, colocated, serving
from toy_run import make_context, make_recipe, save_start
from trainer_fixture import DEVICE, EOS, PAD, digests, make_policy, make_trainer, trained, updates_of
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from zoo_process import free_port

from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling.logprobs import token_logprobs
from rlhf_zoo.modeling.sampling.sampler import SamplingRequest, Vocabulary
from rlhf_zoo.pipeline.stages import ppo
from rlhf_zoo.pipeline.stages.interrupt import Stopped
from rlhf_zoo.ppo.engine_samples import as_samples
from rlhf_zoo.ppo.engines import sample_with_transformers
from rlhf_zoo.ppo.failures import SamplingFailed
from rlhf_zoo.runs.context import RunContext

TEMPERATURE = 0.7


# ---- transformers


@pytest.mark.parametrize("name", ["Qwen2.5", "Gemma 2", "GPT-2"])
def test_transformers_samples_what_the_model_says(name: str) -> None:
    """Tokens of the vocabulary alone, their log-probabilities those of a plain pass, ends and lengths as of our own."""
    model, tokenizer = miniatures.load(name)
    model.eval()
    vocabulary = Vocabulary(Vocabulary.of(tokenizer, model).size - 20, (9, 30))
    prompts = [[40, 41, 42], [50], [40, 41, 42], [60, 61, 62, 63, 64]] * 4
    stops = list(range(0, vocabulary.size, 7))
    request = SamplingRequest(
        prompts, keys=[(0, i) for i in range(16)], seed=3, max_new_tokens=6, stop_ids=stops, pad_id=PAD,
        temperature=TEMPERATURE, vocabulary=vocabulary,
    )  # fmt: skip
    samples = sample_with_transformers(model, request)
    lists = samples.token_lists()
    assert [ids[keep].tolist() for ids, keep in zip(samples.prompt_ids, samples.prompt_mask, strict=True)] == prompts
    assert all(token in vocabulary for tokens in lists for token in tokens) and lists[0] != lists[2]
    for tokens, ended in zip(lists, samples.ended.tolist(), strict=True):
        assert not set(tokens[:-1]) & set(stops)
        assert ended == (tokens[-1] in stops) and (ended or len(tokens) == 6)
    own = token_logprobs(model, samples, temperature=TEMPERATURE)
    torch.testing.assert_close(samples.logprobs, own, rtol=0, atol=1e-4)


def test_a_run_with_transformers_learns_and_says_how_far_the_engine_is(tmp_path: Path) -> None:
    trainer = trained(tmp_path, max_steps=2, rollout_engine="transformers", importance_sampling_cap=2.0)
    assert all(0 <= row["policy/engine_mismatch"] < 1e-4 for row in updates_of(trainer))


# ---- vLLM: trl's own client asks stubs


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The configuration's fields of a run with a server; its `stub` beside them."""
    stub = StubVLLM(make_policy())
    with serving(stub, monkeypatch) as url:
        yield {"stub": stub, "rollout_engine": "vllm", "vllm_mode": "server", "vllm_server_base_url": url}


def test_a_colocated_vllm_samples_from_the_weights_of_the_last_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = StubVLLM(make_policy())
    colocated(stub, monkeypatch)
    fields = {"rollout_engine": "vllm", "vllm_gpu_memory_utilization": 0.2, "vllm_enable_sleep_mode": True}
    trainer = trained(tmp_path, max_steps=2, save_strategy="no", importance_sampling_cap=2.0, **fields)
    (_, made), *calls = stub.asked
    assert made["gpu_memory_utilization"] == 0.2 and made["logprobs_mode"] == "processed_logprobs"
    wakes = [("wake_up", {"tags": [what]}) for what in ("weights", "kv_cache")]
    asleep = ("sleep", {"level": 2})
    assert calls == [asleep, *[wakes[0], ("reset_prefix_cache", {}), wakes[1], wakes[1], asleep] * 2]
    rounds = len(stub.sent) // 2
    pairs = zip(stub.sent[:rounds], stub.sent[rounds:], strict=True)
    assert any(not torch.equal(one, other) for (_, one), (_, other) in pairs), "the second update's weights"
    assert all(abs(row["policy/engine_mismatch"] - stub.off) < 1e-4 for row in updates_of(trainer))


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [({}, "float32"), ({"bf16": True}, "bfloat16"), ({"vllm_enforce_eager": True}, "float32")],
)
def test_a_colocated_vllm_computes_in_the_dtype_of_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], dtype: str
) -> None:
    """Left to itself vLLM takes float32 weights for bfloat16."""
    stub = StubVLLM(make_policy())
    colocated(stub, monkeypatch)
    make_trainer(tmp_path, rollout_engine="vllm", **keys)
    [(_, made)] = stub.asked
    assert (made["dtype"], made["enforce_eager"]) == (dtype, "vllm_enforce_eager" in keys)
    assert not isinstance(vllm_generation.LLM, functools.partial), "and others' engines are as they were"


def test_a_policy_in_half_precision_is_sampled_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = StubVLLM(make_policy())
    colocated(stub, monkeypatch)
    make_trainer(tmp_path, rollout_engine="vllm", model=make_policy().bfloat16(), critic="policy")
    assert stub.asked[0][1]["dtype"] == "bfloat16"


def test_weights_are_as_they_were_where_an_engine_takes_only_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """trl merges adapters into the weights to send them, and forgets them there when sending fails."""
    stub = StubVLLM(make_policy())
    colocated(stub, monkeypatch)
    trainer = make_trainer(tmp_path, rollout_engine="vllm", peft_config=LoraConfig(r=2, target_modules="all-linear"))
    before = digests(trainer.policy)

    def fault(route: str) -> None:
        if len(stub.sent) == 3:
            raise AttributeError("'Parameter' object has no attribute 'weight_loader'")

    stub.fault = fault
    with pytest.raises(SamplingFailed, match=r"did not take the policy.s weights \(AttributeError: .Parameter. object"):
        trainer.train()
    assert digests(trainer.policy) == before and not any(getattr(x, "merged", False) for x in trainer.policy.modules())


# What a stage does of an engine that fails


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    make_recipe(tmp_path)
    save_start(tmp_path)
    return tmp_path


@contextlib.contextmanager
def engine(mode: str, stub: StubVLLM, patch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The keys of a stage of which the stub samples."""
    keys = {"rollout_engine": "vllm", "vllm_mode": mode, "save_steps": "4", "max_steps": "4"}
    if mode == "colocate":
        colocated(stub, patch)
        yield keys
    else:
        with serving(stub, patch) as url:
            yield keys | {"vllm_server_base_url": url}


def kept(context: RunContext) -> tuple[list[str], str]:
    """Checkpoints and status of a run."""
    record = context.record("ppo")
    return [path.name for path in record.checkpoints()], record.read()["status"]


@pytest.mark.attack
@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_an_engine_that_keeps_stale_weights_stops_the_run_and_finished_updates_are_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    stub = StubVLLM(make_policy(), off=0.0, stale_from=3)
    with engine(mode, stub, monkeypatch) as keys:
        context = make_context(folder, **keys)
        said = r"has other weights .* more than the 0\.001 that .*Step 2 is saved: run the same command again"
        with pytest.raises(SamplingFailed, match=said):
            ppo.run(context)
        assert kept(context) == (["checkpoint-2"], "interrupted")
        stub.stale_from = math.inf
        assert ppo.run(context) and kept(context)[1] == "finished"


@pytest.mark.attack
def test_a_server_that_goes_down_stops_the_run_in_seconds_and_finished_updates_are_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = StubVLLM(make_policy(), off=0.0)

    def fault(route: str) -> None:
        if stub.rounds == 2:
            raise ConnectionResetError

    stub.fault = fault
    with engine("server", stub, monkeypatch) as keys:
        context = make_context(folder, **keys)
        began = time.monotonic()
        with pytest.raises(SamplingFailed, match=r"No vLLM server answers at http://127\..*Step 2 is saved"):
            ppo.run(context)
    assert time.monotonic() - began < 20 and kept(context) == (["checkpoint-2"], "interrupted")


@pytest.mark.attack
def test_a_signal_ends_the_wait_for_a_server_and_finished_updates_are_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server takes the third request for completions and never answers."""
    stub, over = StubVLLM(make_policy(), off=0.0), threading.Event()

    def fault(route: str) -> None:
        if route == "/v1/completions" and stub.rounds == 2 and "prompt_logprobs" not in stub.asked[-1][1]:
            os.kill(os.getpid(), signal.SIGTERM)
            over.wait(60)

    stub.fault = fault
    with engine("server", stub, monkeypatch) as keys:
        context = make_context(folder, **keys)
        with pytest.raises(Stopped):
            ppo.run(context)
        assert not over.is_set() and kept(context) == (["checkpoint-2"], "interrupted")
        over.set()


def test_a_server_that_is_not_there_is_named_in_seconds(tmp_path: Path, server: dict[str, Any]) -> None:
    """One that refuses, one that takes the connection and never answers, one that is not well."""
    stub = server.pop("stub")
    answers = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)  # 501
    silent = socket.create_server(("127.0.0.1", 0))
    addresses = {
        "ConnectionError": free_port(), "ReadTimeout": silent.getsockname()[1], "HTTP 501": answers.server_port
    }  # fmt: skip
    threading.Thread(target=answers.serve_forever, kwargs={"poll_interval": 0.01}).start()
    try:
        for kind, port in addresses.items():
            began = time.monotonic()
            with pytest.raises(ZooError, match=rf"No vLLM server answers at http://127.0.0.1:{port} \({kind}\)"):
                make_trainer(tmp_path, **server | {"vllm_server_base_url": f"http://127.0.0.1:{port}/"})
            assert time.monotonic() - began < 10
    finally:
        answers.shutdown()
        answers.server_close()
        silent.close()
    assert stub.asked == []


def test_a_server_for_a_trainer_without_a_gpu_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE != "cpu":
        pytest.skip("there is a GPU")
    with serving(StubVLLM(make_policy()), monkeypatch, nccl=False) as url:
        given = {"rollout_engine": "vllm", "vllm_mode": "server", "vllm_server_base_url": url}
        with pytest.raises(ZooError, match=r"needs a CUDA device, got .cpu.\..* Use vllm_mode .colocate."):
            make_trainer(tmp_path, **given)


def test_what_is_called_of_the_client_is_there() -> None:
    """Names of arguments, their order, and what a call returns."""
    names = {
        name: list(inspect.signature(getattr(VLLMGeneration, name)).parameters)
        for name in ("__init__", "sync_weights", "generate")
    }
    assert names["sync_weights"] == ["self"]
    assert names["generate"][:4] == ["self", "prompts", "images", "num_generations"]
    assert names["__init__"][:4] == ["self", "model", "accelerator", "processing_class"]
    assert "return prompt_ids, completion_ids, logprobs, logprob_token_ids" in inspect.getsource(VLLMGeneration)
    making = inspect.getsource(VLLMGeneration._init_vllm)  # whose LLM `_llm_with` completes
    assert "self.llm = LLM(" in making and "dtype=" not in making and "enforce_eager=" not in making


def test_a_server_samples_from_the_weights_of_the_last_update(server: dict[str, Any], tmp_path: Path) -> None:
    stub = server.pop("stub")
    trainer = trained(tmp_path, max_steps=2, save_strategy="no", **server)
    routes = [route for route, _ in stub.asked]
    rollout = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]
    made = ["/health", "/health", "/v1/models", "/server_info?config_format=json"]
    assert routes == [*made, *["/health", *rollout, "/v1/completions", "/v1/completions"] * 2]
    seen = {name: weight.clone() for name, weight in stub.sent}
    prompts = [[5, 6], [7, 8, 9]]
    request = SamplingRequest(
        prompts, keys=[(0, 0), (0, 1)], seed=0, max_new_tokens=trainer.args.response_length, stop_ids=[EOS],
        pad_id=PAD, temperature=trainer.args.temperature, vocabulary=trainer.vocabulary,
    )  # fmt: skip
    samples = trainer.engine(trainer.policy, request)
    assert any(not torch.equal(seen[name], weight) for name, weight in stub.sent), "the second update's weights"
    own = token_logprobs(trainer.policy, samples, temperature=trainer.args.temperature) - samples.mask * stub.off
    torch.testing.assert_close(samples.logprobs, own, rtol=0, atol=1e-4)


def test_a_run_with_vllm_weights_by_the_mismatch(server: dict[str, Any], tmp_path: Path) -> None:
    """The engine's log π lies 0.1 below ours: log π_old is ours all the same, and each token may weigh e^0.1."""
    server.pop("stub")
    once = {"max_steps": 1, "num_ppo_epochs": 1, "num_mini_batches": 1, "save_strategy": "no", **server}
    runs = [trained(tmp_path / str(cap), **once, importance_sampling_cap=cap) for cap in (None, 2.0, 1.05)]
    plain, weighted, capped = (updates_of(run)[0] for run in runs)
    for row in (plain, weighted, capped):
        assert abs(row["policy/engine_mismatch"] - 0.1) < 1e-4 and row["policy/logprob_mismatch"] < 1e-4
    norms = [row["grad_norm/policy"] / plain["grad_norm/policy"] for row in (weighted, capped)]
    np.testing.assert_allclose(norms, [math.exp(0.1), 1.05], rtol=1e-3)


def test_without_vllm_a_sentence_before_training(tmp_path: Path) -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    with pytest.raises(ZooError, match="'vllm', which is not installed"):
        make_trainer(tmp_path, rollout_engine="vllm")


def test_an_engine_that_answers_nonsense_is_named() -> None:
    request = SamplingRequest(
        [[5]], keys=[(0,)], seed=0, max_new_tokens=1, stop_ids=[EOS], pad_id=PAD, temperature=1.0,
        vocabulary=Vocabulary(10, (4,)),
    )  # fmt: skip
    with pytest.raises(ZooError, match="sampled the id 4, which the tokenizer does not have"):
        as_samples(request, [[4]], [[-1.0]], device="cpu")
    with pytest.raises(ZooError, match="gave completion 0 0 tokens and 0 log-probabilities"):
        as_samples(request, [[]], [[]], device="cpu")
