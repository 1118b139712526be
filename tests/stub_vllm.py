"""A stub of vLLM for trl's client: a server on loopback, or an object in the trainer's process.

It samples from the weights that it has received. A list in this process replaces NCCL, which sends the weights to a
real server.
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
    """A vLLM that holds `model`.

    requests: (route, JSON) of each request. logprob_error: Subtracted from the log-probability of each sampled token.
    stale_from: From this weight update on, counted from 1, it answers 200 but keeps every second old weight.
    fault: Called with the route before each answer, and before a colocated stub loads weights.
    """

    def __init__(self, model: Any, logprob_error: float = 0.1, *, stale_from: float = math.inf) -> None:
        self.model, self.logprob_error, self.stale_from = model, logprob_error, stale_from
        self.updates = 0
        self.fault: Callable[[str], None] = lambda route: None
        self.requests: list[tuple[str, Any]] = []
        self.sent: list[tuple[str, torch.Tensor]] = []
        self.rounds = 0

    def answer(self, route: str, body: Any) -> Any:
        self.requests.append((route, body))
        self.fault(route)
        if route == "/v1/models":
            self.rounds = 0  # a new client has connected
            return {"data": [{"id": "policy"}]}
        if route == "/update_weights":
            info = body["update_info"]
            self.announced = list(zip(info["names"], info["dtype_names"], info["shapes"], strict=True))
        if route == "/finish_weight_update":
            received = [(name, str(x.dtype).removeprefix("torch."), list(x.shape)) for name, x in self.sent]
            assert received == self.announced
            self.load_weights(self.sent)
        if route == "/v1/completions" and "prompt_logprobs" in body:
            scores = [None, *({str(token): {"logprob": logprob}} for token, logprob in self.score_prompt(body))]
            return {"choices": [{"prompt_logprobs": scores}]}
        if route == "/v1/completions":
            return {"choices": self.completions(**body)}
        if route.startswith("/server_info"):
            return {"vllm_config": {"model_config": {"dtype": str(self.model.dtype)}, "weight_transfer_config": {}}}
        return {"world_size": 1}

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Loads weights of an update, which begins with the model's first weight."""
        self.updates += weights[0][0] == next(iter(self.model.state_dict()))
        stale = self.updates >= self.stale_from
        kept = set(list(self.model.state_dict())[::2]) if stale else set()
        self.model.load_state_dict({name: weight for name, weight in weights if name not in kept}, strict=False)

    def score_prompt(self, request: dict[str, Any]) -> list[tuple[int, float]]:
        """Returns (token, log-probability) for each token of a prompt after the first."""
        assert (request["max_tokens"], request["temperature"], request["prompt_logprobs"]) == (1, 1.0, 0)
        [row] = request["prompt"]
        return [*zip(row[1:], row_logprobs(self.model, row).tolist(), strict=True)]

    def completions(
        self, *, prompt: list[list[int]], stop_token_ids: list[int], max_tokens: int, temperature: float, **options: Any
    ) -> list[dict[str, Any]]:
        self.rounds += 1
        assert options == {
            "model": "policy", "return_token_ids": True, "return_tokens_as_token_ids": True, "n": 1, "logprobs": 0,
            "repetition_penalty": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "ignore_eos": True,
        }  # fmt: skip
        samples = sample(
            self.model, prompt, keys=[(self.rounds, i) for i in range(len(prompt))], seed=0, pad_id=0,
            max_new_tokens=max_tokens, temperature=temperature, stop_ids=stop_token_ids,
        )  # fmt: skip
        lists = zip(prompt, samples.completion_id_lists(), samples.logprobs.tolist(), strict=True)
        return [
            {
                "prompt_token_ids": prompt_ids,
                "token_ids": ids,
                "logprobs": {
                    "tokens": [f"token_id:{index}" for index in ids],
                    "token_logprobs": [x - self.logprob_error for x in row[: len(ids)]],
                    "top_logprobs": [None] * len(ids),
                },
            }
            for prompt_ids, ids, row in lists
        ]


def colocated(stub: StubVLLM, patch: pytest.MonkeyPatch) -> None:
    """Makes trl use the stub as a vLLM in its own process; `stub.requests` holds its calls."""

    class LLM(SimpleNamespace):
        def __init__(self, **options: Any) -> None:
            stub.requests.append(("LLM", options))
            runner = SimpleNamespace(model=SimpleNamespace(load_weights=self.load))
            executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
            super().__init__(llm_engine=SimpleNamespace(model_executor=executor))

        def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            stub.fault("load_weights")
            stub.sent += [(name, weight.clone()) for name, weight in weights]
            stub.load_weights(weights)

        def generate(self, prompts: list[dict[str, Any]], sampling_params: Any, use_tqdm: bool) -> list[Any]:
            params = vars(sampling_params)
            prompt_ids = [each["prompt_token_ids"] for each in prompts]
            if "prompt_logprobs" in params:
                scores = stub.score_prompt({"prompt": prompt_ids, **params})
                return [SimpleNamespace(prompt_logprobs=[None, *({x: SimpleNamespace(logprob=y)} for x, y in scores)])]
            fixed = {"model": "policy", "return_token_ids": True, "return_tokens_as_token_ids": True}
            choices = stub.completions(prompt=prompt_ids, **fixed, **params)
            return [SimpleNamespace(prompt_token_ids=c["prompt_token_ids"], outputs=[self.output(c)]) for c in choices]

        def output(self, choice: dict[str, Any]) -> Any:
            pairs = zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
            chosen = [{token: SimpleNamespace(rank=1, logprob=logprob)} for token, logprob in pairs]
            return SimpleNamespace(token_ids=choice["token_ids"], logprobs=chosen)

        def __getattr__(self, name: str) -> Any:
            return lambda **options: stub.requests.append((name, options))

    for module in (vllm_client, vllm_generation):
        patch.setattr(module, "is_vllm_available", lambda **_: True)
    patch.setattr(trl.generation, "VLLMGeneration", vllm_generation.VLLMGeneration, raising=False)
    patch.setattr(vllm_generation, "LLM", LLM, raising=False)
    patch.setattr(vllm_generation, "SamplingParams", SimpleNamespace, raising=False)
    patch.setattr(vllm_generation, "empty_cache", lambda: None)
    patch.setattr(vllm_generation, "ensure_master_addr_port", lambda: None)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # trl sets them for vLLM
        patch.setenv(name, "0")
        patch.delenv(name)  # the end of the patch then removes it


@contextlib.contextmanager
def serving(stub: StubVLLM, patch: pytest.MonkeyPatch, *, nccl: bool = True) -> Iterator[str]:
    """Serves the stub, while trl assumes that vLLM is installed. Yields its URL. nccl: Whether to stub NCCL too."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(None)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.reply(json.loads(body or "null"))

        def reply(self, body: Any) -> None:
            try:
                data = json.dumps(stub.answer(self.path, body)).encode()
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
