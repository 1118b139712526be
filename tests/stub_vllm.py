"""vLLM as trl's client calls it, a server on loopback or an object beside the trainer: it samples from what it has.

NCCL, which carries the weights to a server, is replaced by a list in this process; every route is HTTP.
"""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl.generation
from trl.generation import vllm_client, vllm_generation

from rlhf_zoo.sampling import sample


class StubVLLM:
    """asked: what came, (route, JSON); off: what its log-probabilities are below those of the model that it holds."""

    def __init__(self, model: Any, off: float = 0.1) -> None:
        self.model, self.off = model, off
        self.asked: list[tuple[str, Any]] = []
        self.sent: list[tuple[str, torch.Tensor]] = []
        self.rounds = 0

    def answer(self, route: str, given: Any) -> Any:
        self.asked.append((route, given))
        if route == "/v1/models":
            self.rounds = 0  # of this client
            return {"data": [{"id": "policy"}]}
        if route == "/update_weights":
            info = given["update_info"]
            self.announced = list(zip(info["names"], info["dtype_names"], info["shapes"], strict=True))
        if route == "/finish_weight_update":
            found = [(name, str(x.dtype).removeprefix("torch."), list(x.shape)) for name, x in self.sent]
            assert found == self.announced
            self.model.load_state_dict(dict(self.sent), strict=False)
        if route == "/v1/completions":
            return {"choices": self.completions(**given)}
        return {}

    def completions(
        self, *, prompt: list[list[int]], stop_token_ids: list[int], max_tokens: int, temperature: float, **rest: Any
    ) -> list[dict[str, Any]]:
        self.rounds += 1
        assert rest == {
            "model": "policy", "return_token_ids": True, "return_tokens_as_token_ids": True, "n": 1, "logprobs": 0,
            "repetition_penalty": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "ignore_eos": True,
        }  # fmt: skip
        samples = sample(
            self.model, prompt, keys=[(self.rounds, i) for i in range(len(prompt))], seed=0, pad_id=0,
            max_new_tokens=max_tokens, temperature=temperature, stop_ids=stop_token_ids,
        )  # fmt: skip
        lists = zip(prompt, samples.token_lists(), samples.logprobs.tolist(), strict=True)
        return [
            {
                "prompt_token_ids": asked,
                "token_ids": ids,
                "logprobs": {
                    "tokens": [f"token_id:{index}" for index in ids],
                    "token_logprobs": [x - self.off for x in row[: len(ids)]],
                    "top_logprobs": [None] * len(ids),
                },
            }
            for asked, ids, row in lists
        ]


def colocated(stub: StubVLLM, patch: pytest.MonkeyPatch) -> None:
    """trl's client finds the stub where it looks for a vLLM of its own process; `stub.asked` is what it called."""

    class LLM(SimpleNamespace):
        def __init__(self, **given: Any) -> None:
            stub.asked.append(("LLM", given))
            runner = SimpleNamespace(model=SimpleNamespace(load_weights=self.load))
            executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
            super().__init__(llm_engine=SimpleNamespace(model_executor=executor))

        def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            stub.sent += [(name, weight.clone()) for name, weight in weights]
            stub.model.load_state_dict(dict(weights), strict=False)

        def generate(self, prompts: list[dict[str, Any]], sampling_params: Any, use_tqdm: bool) -> list[Any]:
            given = vars(sampling_params)
            fixed = {"model": "policy", "return_token_ids": True, "return_tokens_as_token_ids": True}
            choices = stub.completions(prompt=[each["prompt_token_ids"] for each in prompts], **fixed, **given)
            return [SimpleNamespace(prompt_token_ids=c["prompt_token_ids"], outputs=[self.output(c)]) for c in choices]

        def output(self, choice: dict[str, Any]) -> Any:
            pairs = zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
            chosen = [{token: SimpleNamespace(rank=1, logprob=logprob)} for token, logprob in pairs]
            return SimpleNamespace(token_ids=choice["token_ids"], logprobs=chosen)

        def __getattr__(self, name: str) -> Any:
            return lambda **given: stub.asked.append((name, given))

    for module in (vllm_client, vllm_generation):
        patch.setattr(module, "is_vllm_available", lambda **_: True)
    patch.setattr(trl.generation, "VLLMGeneration", vllm_generation.VLLMGeneration, raising=False)
    patch.setattr(vllm_generation, "LLM", LLM, raising=False)
    patch.setattr(vllm_generation, "SamplingParams", SimpleNamespace, raising=False)
    patch.setattr(vllm_generation, "empty_cache", lambda: None)
    patch.setattr(vllm_generation, "ensure_master_addr_port", lambda: None)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # which trl sets for vLLM
        patch.setenv(name, "0")
        patch.delenv(name)  # so that it is gone afterwards


@contextlib.contextmanager
def serving(stub: StubVLLM, patch: pytest.MonkeyPatch) -> Iterator[str]:
    """The stub's address, while trl takes vLLM for installed."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(None)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.reply(json.loads(body or "null"))

        def reply(self, given: Any) -> None:
            data = json.dumps(stub.answer(self.path, given)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    class Transfer:
        @staticmethod
        def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
            stub.sent = [(name, weight.clone()) for name, weight in iterator]

    for module in (vllm_client, vllm_generation):
        patch.setattr(module, "is_vllm_available", lambda **_: True)
    patch.setattr(trl.generation, "VLLMGeneration", vllm_generation.VLLMGeneration, raising=False)
    patch.setattr(vllm_client.VLLMClient, "init_communicator", lambda self, device: None)
    patch.setattr(vllm_client, "NCCLWeightTransferEngine", Transfer, raising=False)
    patch.setattr(vllm_client, "NCCLTrainerSendWeightsArgs", dict, raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
