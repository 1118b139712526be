"""External rollout engines: their completions, the trainer's log-probabilities, and the mismatch."""

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
from types import SimpleNamespace
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
from rlhf_zoo.ppo.vllm import _convert_errors
from rlhf_zoo.runs.context import RunContext

TEMPERATURE = 0.7


# ---- transformers


@pytest.mark.parametrize("name", ["Qwen2.5", "Gemma 2", "GPT-2"])
def test_transformers_engine_samples_match_model(name: str) -> None:
    """Tokens are in the vocabulary, log-probabilities match a plain pass, ends and lengths match our sampler's."""
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
    lists = samples.completion_id_lists()
    assert [ids[keep].tolist() for ids, keep in zip(samples.prompt_ids, samples.prompt_mask, strict=True)] == prompts
    assert all(token in vocabulary for tokens in lists for token in tokens) and lists[0] != lists[2]
    for tokens, ended in zip(lists, samples.ended.tolist(), strict=True):
        assert not set(tokens[:-1]) & set(stops)
        assert ended == (tokens[-1] in stops) and (ended or len(tokens) == 6)
    expected = token_logprobs(model, samples, temperature=TEMPERATURE)
    torch.testing.assert_close(samples.logprobs, expected, rtol=0, atol=1e-4)


def test_run_with_transformers_engine_logs_mismatch(tmp_path: Path) -> None:
    trainer = trained(tmp_path, max_steps=2, rollout_engine="transformers", importance_sampling_cap=2.0)
    assert all(0 <= row["policy/engine_mismatch"] < 1e-4 for row in updates_of(trainer))


# ---- vLLM: trl's own client asks stubs


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The configuration's fields of a run with a server; its `stub` beside them."""
    stub = StubVLLM(make_policy())
    with serving(stub, monkeypatch) as url:
        yield {"stub": stub, "rollout_engine": "vllm", "vllm_mode": "server", "vllm_server_base_url": url}


def test_colocated_vllm_samples_with_latest_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = StubVLLM(make_policy())
    colocated(stub, monkeypatch)
    fields = {"rollout_engine": "vllm", "vllm_gpu_memory_utilization": 0.2, "vllm_enable_sleep_mode": True}
    trainer = trained(tmp_path, max_steps=2, save_strategy="no", importance_sampling_cap=2.0, **fields)
    (_, options), *calls = stub.requests
    assert options["gpu_memory_utilization"] == 0.2 and options["logprobs_mode"] == "processed_logprobs"
    wakes = [("wake_up", {"tags": [what]}) for what in ("weights", "kv_cache")]
    asleep = ("sleep", {"level": 2})
    assert calls == [asleep, *[wakes[0], ("reset_prefix_cache", {}), wakes[1], wakes[1], asleep] * 2]
    rounds = len(stub.sent) // 2
    pairs = zip(stub.sent[:rounds], stub.sent[rounds:], strict=True)
    assert any(not torch.equal(one, other) for (_, one), (_, other) in pairs), "the second update's weights"
    assert all(abs(row["policy/engine_mismatch"] - stub.logprob_error) < 1e-4 for row in updates_of(trainer))


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [({}, "float32"), ({"bf16": True}, "bfloat16"), ({"vllm_enforce_eager": True}, "float32")],
)
def test_colocated_vllm_uses_policy_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], dtype: str
) -> None:
    """Left to itself vLLM takes float32 weights for bfloat16."""
    stub = StubVLLM(make_policy())
    colocated(stub, monkeypatch)
    make_trainer(tmp_path, rollout_engine="vllm", **keys)
    [(_, options)] = stub.requests
    assert (options["dtype"], options["enforce_eager"]) == (dtype, "vllm_enforce_eager" in keys)
    assert not isinstance(vllm_generation.LLM, functools.partial), "and others' engines are as they were"


def test_colocated_vllm_samples_bfloat16_policy_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = StubVLLM(make_policy())
    colocated(stub, monkeypatch)
    make_trainer(tmp_path, rollout_engine="vllm", model=make_policy().bfloat16(), critic="policy")
    assert stub.requests[0][1]["dtype"] == "bfloat16"


def test_policy_is_unchanged_when_weight_transfer_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """trl merges adapters into the weights to send them, and forgets them there when sending fails."""
    stub = StubVLLM(make_policy())
    colocated(stub, monkeypatch)
    trainer = make_trainer(tmp_path, rollout_engine="vllm", peft_config=LoraConfig(r=2, target_modules="all-linear"))
    before = digests(trainer.policy)

    def fault(route: str) -> None:
        if len(stub.sent) == 3:
            raise AttributeError("'Parameter' object has no attribute 'weight_loader'")

    stub.fault = fault
    with pytest.raises(
        SamplingFailed, match=r"did not accept the policy.s weights \(AttributeError: .Parameter. object"
    ):
        trainer.train()
    assert digests(trainer.policy) == before and not any(getattr(x, "merged", False) for x in trainer.policy.modules())


# Stages with a failing engine


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    make_recipe(tmp_path)
    save_start(tmp_path)
    return tmp_path


@contextlib.contextmanager
def stage_keys_with_stub(mode: str, stub: StubVLLM, patch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Yields the keys of a stage whose rollouts the stub samples."""
    keys = {"rollout_engine": "vllm", "vllm_mode": mode, "save_steps": "4", "max_steps": "4"}
    if mode == "colocate":
        colocated(stub, patch)
        yield keys
    else:
        with serving(stub, patch) as url:
            yield keys | {"vllm_server_base_url": url}


def checkpoints_and_status(context: RunContext) -> tuple[list[str], str]:
    """Checkpoints and status of a run."""
    record = context.record("ppo")
    return [path.name for path in record.checkpoints()], record.read()["status"]


@pytest.mark.attack
@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_stale_engine_weights_stop_run_and_keep_finished_updates(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    stub = StubVLLM(make_policy(), logprob_error=0.0, stale_from=3)
    with stage_keys_with_stub(mode, stub, monkeypatch) as keys:
        context = make_context(folder, **keys)
        message = r"does not have the policy.s weights.* more than the 0\.001 that .*Step 2 is saved: run the same"
        with pytest.raises(SamplingFailed, match=message):
            ppo.run(context)
        assert checkpoints_and_status(context) == (["checkpoint-2"], "interrupted")
        stub.stale_from = math.inf
        assert ppo.run(context) and checkpoints_and_status(context)[1] == "finished"


@pytest.mark.attack
def test_lost_server_stops_run_and_keeps_finished_updates(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = StubVLLM(make_policy(), logprob_error=0.0)

    def fault(route: str) -> None:
        if stub.rounds == 2:
            raise ConnectionResetError

    stub.fault = fault
    with stage_keys_with_stub("server", stub, monkeypatch) as keys:
        context = make_context(folder, **keys)
        start = time.monotonic()
        with pytest.raises(SamplingFailed, match=r"No vLLM server answers at http://127\..*Step 2 is saved"):
            ppo.run(context)
    assert time.monotonic() - start < 20 and checkpoints_and_status(context) == (["checkpoint-2"], "interrupted")


@pytest.mark.attack
def test_signal_ends_wait_for_server_and_keeps_finished_updates(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server takes the third request for completions and never answers."""
    stub, over = StubVLLM(make_policy(), logprob_error=0.0), threading.Event()

    def fault(route: str) -> None:
        if route == "/v1/completions" and stub.rounds == 2 and "prompt_logprobs" not in stub.requests[-1][1]:
            os.kill(os.getpid(), signal.SIGTERM)
            over.wait(60)

    stub.fault = fault
    with stage_keys_with_stub("server", stub, monkeypatch) as keys:
        context = make_context(folder, **keys)
        with pytest.raises(Stopped):
            ppo.run(context)
        assert not over.is_set() and checkpoints_and_status(context) == (["checkpoint-2"], "interrupted")
        over.set()


def test_unreachable_server_is_reported_quickly(
    tmp_path: Path, server: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that refuses, one that connects and never answers, and one that returns an error."""
    monkeypatch.setattr("rlhf_zoo.ppo.vllm.ANSWER_SECONDS", 0.2)
    monkeypatch.setattr("rlhf_zoo.ppo.vllm.time", SimpleNamespace(sleep=lambda seconds: None))
    stub = server.pop("stub")
    answers = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)  # 501
    silent = socket.create_server(("127.0.0.1", 0))
    addresses = {
        "ConnectionError": free_port(), "ReadTimeout": silent.getsockname()[1], "HTTP 501": answers.server_port
    }  # fmt: skip
    threading.Thread(target=answers.serve_forever, kwargs={"poll_interval": 0.01}).start()
    try:
        for kind, port in addresses.items():
            start = time.monotonic()
            with pytest.raises(ZooError, match=rf"No vLLM server answers at http://127.0.0.1:{port} \({kind}\)"):
                make_trainer(tmp_path, **server | {"vllm_server_base_url": f"http://127.0.0.1:{port}/"})
            assert time.monotonic() - start < 10
    finally:
        answers.shutdown()
        answers.server_close()
        silent.close()
    assert stub.requests == []


def test_server_mode_without_gpu_raises_readable_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE != "cpu":
        pytest.skip("there is a GPU")
    with serving(StubVLLM(make_policy()), monkeypatch, nccl=False) as url:
        keys = {"rollout_engine": "vllm", "vllm_mode": "server", "vllm_server_base_url": url}
        with pytest.raises(ZooError, match=r"needs a CUDA device, got .cpu.\..* Use vllm_mode .colocate."):
            make_trainer(tmp_path, **keys)


def test_trl_vllm_client_has_expected_interface() -> None:
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


def test_vllm_server_samples_with_latest_weights(server: dict[str, Any], tmp_path: Path) -> None:
    stub = server.pop("stub")
    trainer = trained(tmp_path, max_steps=2, save_strategy="no", **server)
    routes = [route for route, _ in stub.requests]
    rollout = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]
    startup = ["/health", "/health", "/v1/models", "/server_info?config_format=json"]
    assert routes == [*startup, *["/health", *rollout, "/v1/completions", "/v1/completions"] * 2]
    seen = {name: weight.clone() for name, weight in stub.sent}
    prompts = [[5, 6], [7, 8, 9]]
    request = SamplingRequest(
        prompts, keys=[(0, 0), (0, 1)], seed=0, max_new_tokens=trainer.args.response_length, stop_ids=[EOS],
        pad_id=PAD, temperature=trainer.args.temperature, vocabulary=trainer.vocabulary,
    )  # fmt: skip
    samples = trainer.engine(trainer.policy, request)
    assert any(not torch.equal(seen[name], weight) for name, weight in stub.sent), "the second update's weights"
    expected = (
        token_logprobs(trainer.policy, samples, temperature=trainer.args.temperature)
        - samples.mask * stub.logprob_error
    )
    torch.testing.assert_close(samples.logprobs, expected, rtol=0, atol=1e-4)


def test_importance_weights_follow_engine_mismatch(server: dict[str, Any], tmp_path: Path) -> None:
    """The engine's log π lies 0.1 below ours: log π_old is ours all the same, and each token may weigh e^0.1."""
    server.pop("stub")
    once = {"max_steps": 1, "num_ppo_epochs": 1, "num_mini_batches": 1, "save_strategy": "no", **server}
    runs = [trained(tmp_path / str(cap), **once, importance_sampling_cap=cap) for cap in (None, 2.0, 1.05)]
    plain, weighted, capped = (updates_of(run)[0] for run in runs)
    for row in (plain, weighted, capped):
        assert abs(row["policy/engine_mismatch"] - 0.1) < 1e-4 and row["policy/logprob_mismatch"] < 1e-4
    norms = [row["grad_norm/policy"] / plain["grad_norm/policy"] for row in (weighted, capped)]
    np.testing.assert_allclose(norms, [math.exp(0.1), 1.05], rtol=1e-3)


def test_missing_vllm_raises_readable_error(tmp_path: Path) -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    with pytest.raises(ZooError, match="'vllm', which is not installed"):
        make_trainer(tmp_path, rollout_engine="vllm")


def test_as_samples_rejects_invalid_engine_output() -> None:
    request = SamplingRequest(
        [[5]], keys=[(0,)], seed=0, max_new_tokens=1, stop_ids=[EOS], pad_id=PAD, temperature=1.0,
        vocabulary=Vocabulary(10, (4,)),
    )  # fmt: skip
    with pytest.raises(ZooError, match="sampled the id 4, which the tokenizer does not have"):
        as_samples(request, [[4]], [[-1.0]], device="cpu")
    with pytest.raises(ZooError, match="gave completion 0 0 tokens and 0 log-probabilities"):
        as_samples(request, [[]], [[]], device="cpu")


@pytest.mark.parametrize("text", ["NCCL is missing", "NCCL is missing."])
def test_error_of_missing_nccl_is_two_sentences(text: str) -> None:
    failed = pytest.raises(SamplingFailed, match=r"^No weights: NCCL is missing\. Use vllm_mode 'colocate'")
    with failed, _convert_errors("No weights", "start it"):
        raise NotImplementedError(text)
