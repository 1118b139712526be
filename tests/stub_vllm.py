"""vLLM as trl's client calls it, a server on loopback or an object beside the trainer: it samples from what it has.

NCCL, which carries the weights to a server, is replaced by a list in this process; every route is HTTP.
"""

import contextlib
import json
import math
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl.generation
from trl.generation import vllm_client, vllm_generation

from rlhf_zoo.modeling.sampling.sampler import sample
from rlhf_zoo.ppo.vllm import row_logprobs


class StubVLLM:
    """asked: what came, (route, JSON); off: what its samples' log-probabilities are below those of its model.

    stale_from: the weight update, counted from 1, from which on it answers 200 and keeps every second weight.
    fault(route) is called before a route is answered, and before the weights of a colocated one are loaded.
    """

    def __init__(self, model: Any, off: float = 0.1, *, stale_from: float = math.inf) -> None:
        self.model, self.off, self.stale_from = model, off, stale_from
        self.updates = 0
        self.fault: Callable[[str], None] = lambda route: None
        self.asked: list[tuple[str, Any]] = []
        self.sent: list[tuple[str, torch.Tensor]] = []
        self.rounds = 0

    def answer(self, route: str, given: Any) -> Any:
        self.asked.append((route, given))
        self.fault(route)
        if route == "/v1/models":
            self.rounds = 0  # of this client
            return {"data": [{"id": "policy"}]}
        if route == "/update_weights":
            info = given["update_info"]
            self.announced = list(zip(info["names"], info["dtype_names"], info["shapes"], strict=True))
        if route == "/finish_weight_update":
            found = [(name, str(x.dtype).removeprefix("torch."), list(x.shape)) for name, x in self.sent]
            assert found == self.announced
            self.take(self.sent)
        if route == "/v1/completions" and "prompt_logprobs" in given:
            scored = [None, *({str(x): {"logprob": y}} for x, y in self.scored(given))]
            return {"choices": [{"prompt_logprobs": scored}]}
        if route == "/v1/completions":
            return {"choices": self.completions(**given)}
        if route.startswith("/server_info"):
            return {"vllm_config": {"model_config": {"dtype": str(self.model.dtype)}, "weight_transfer_config": {}}}
        return {"world_size": 1}

    def take(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """What a weight update brings. The first weight of each update begins it."""
        self.updates += weights[0][0] == next(iter(self.model.state_dict()))
        stale = self.updates >= self.stale_from
        kept = set(list(self.model.state_dict())[::2]) if stale else set()
        self.model.load_state_dict({name: weight for name, weight in weights if name not in kept}, strict=False)

    def scored(self, given: dict[str, Any]) -> list[tuple[int, float]]:
        """The tokens of a prompt but the first, and their log-probabilities."""
        assert (given["max_tokens"], given["temperature"], given["prompt_logprobs"]) == (1, 1.0, 0)
        [row] = given["prompt"]
        return [*zip(row[1:], row_logprobs(self.model, row).tolist(), strict=True)]

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
            stub.fault("load_weights")
            stub.sent += [(name, weight.clone()) for name, weight in weights]
            stub.take(weights)

        def generate(self, prompts: list[dict[str, Any]], sampling_params: Any, use_tqdm: bool) -> list[Any]:
            given = vars(sampling_params)
            if "prompt_logprobs" in given:
                scored = stub.scored({"prompt": [each["prompt_token_ids"] for each in prompts], **given})
                return [SimpleNamespace(prompt_logprobs=[None, *({x: SimpleNamespace(logprob=y)} for x, y in scored)])]
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
def serving(stub: StubVLLM, patch: pytest.MonkeyPatch, *, nccl: bool = True) -> Iterator[str]:
    """The stub's address, while trl takes vLLM for installed. nccl False: trl meets the device as it is."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(None)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.reply(json.loads(body or "null"))

        def reply(self, given: Any) -> None:
            try:
                data = json.dumps(stub.answer(self.path, given)).encode()
            except ConnectionError:  # a fault: the connection ends without an answer
                self.close_connection = True
                return
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
    patch.setattr(vllm_client, "get_ip", lambda: "127.0.0.1", raising=False)
    if nccl:
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
