"""vLLM through trl's VLLMGeneration, beside the trainer in its process or as a server.

Before each rollout vLLM gets the policy's weights, and then scores one row whose log-probabilities the policy has too.
A weight update that vLLM confirms and does not make, or makes in part, would go unnoticed otherwise.
"""

import math
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from requests import RequestException, Session
from requests import get as http_get
from requests.adapters import HTTPAdapter
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from urllib3.connection import HTTPConnection
from urllib3.util.retry import Retry

from ..errors import ZooError
from ..functional import selected_logprobs
from ..modeling.loading import first_line
from ..modeling.models import is_peft
from ..modeling.sampling.sampler import Samples, SamplingRequest
from .config import PPOConfig
from .engine_samples import as_samples, outside
from .failures import Unsampled
from .waiting import ended_by_signals

#: Tokens of the row that both sides score after the weights were sent.
FORCED_TOKENS = 64
#: Mean |Δ log π| a token that rounding explains, by the coarser of both precisions: it is 1e-5 in float32 on a CPU,
#: 1e-3 where a GPU multiplies in TF32, some 1e-2 in bfloat16. Stale weights were 0.2 to 0.3 off.
ROUNDING = {torch.float32: 1e-2, torch.float16: 2e-2, torch.bfloat16: 0.1}
ROUNDING_ON_CPU = 1e-3  # in float32
#: Seconds for a connection and for the answer of a server that has nothing else to do; it is asked twice.
CONNECT, ANSWER = 2.0, 2.0
SERVE = "start it as docs/engines.md says"


class VLLMEngine:
    """An engine of `make_engine`. Its random streams are vLLM's: keys and seed decide nothing."""

    def __init__(self, args: PPOConfig, policy: Any, tokenizer: PreTrainedTokenizerBase, accelerator: Any) -> None:
        try:
            from trl.generation import VLLMGeneration  # where vLLM is installed
        except ImportError as error:
            raise ZooError(
                "rollout_engine is 'vllm', which is not installed: pip install 'trl[vllm]', or give 'native'."
            ) from error
        self._temperature, self._length = args.temperature, args.response_length
        self._accelerator, self._sleeps = accelerator, args.vllm_enable_sleep_mode
        self._url = None if args.vllm_server_base_url is None else args.vllm_server_base_url.rstrip("/")
        self._dtype = computing_dtype(args, policy)
        # Of several processes the first one talks to a server, and each has a colocated vLLM of its own.
        self._asks = self._url is None or accelerator.is_main_process
        colocated = nullcontext() if self._url else _llm_with(
            dtype=str(self._dtype).removeprefix("torch."), enforce_eager=args.vllm_enforce_eager
        )  # fmt: skip
        with ended_by_signals(), _as_unsampled("vLLM did not start", "see what it printed above"):
            if self._url and self._asks:
                check_server(self._url)
            if self._url is None and accelerator.device.type == "cpu":
                _leave_weights_plain()
            with colocated:
                self._generation = VLLMGeneration(
                    policy,
                    accelerator,
                    tokenizer,
                    mode=args.vllm_mode,
                    server_base_url=self._url,
                    server_timeout=0.0,  # `check_server` has waited
                    gpu_memory_utilization=args.vllm_gpu_memory_utilization,
                    enable_sleep_mode=args.vllm_enable_sleep_mode,
                    temperature=args.temperature,
                    max_completion_length=args.response_length,
                    logprobs=0,
                )
            if self._url and self._asks:
                self._bound_waits(self._generation.vllm_client.session)
                self._dtype = max(self._dtype, self._served_dtype(), key=lambda dtype: torch.finfo(dtype).eps)

    def __call__(self, model: Any, request: SamplingRequest) -> Samples:
        assert (request.temperature, request.max_new_tokens) == (self._temperature, self._length)
        settings: dict[str, Any] = {"stop_token_ids": list(request.stop_ids), "ignore_eos": True}
        if outside(request.vocabulary, model):
            settings["allowed_token_ids"] = [
                index for index in range(request.vocabulary.size) if index in request.vocabulary
            ]
        self._send_weights(model, request)
        self._generation.generation_kwargs = settings
        # A colocated vLLM computes here: a signal lets it finish, as it does the rest of an update.
        with ended_by_signals() if self._url else nullcontext(), _as_unsampled("vLLM sampled nothing", self._mend):
            _, completions, logprobs, _ = self._generation.generate(
                prompts=[list(prompt) for prompt in request.prompts], images=None, num_generations=1
            )
        chosen = [[token[0] for token in row] for row in logprobs]
        return as_samples(request, completions, chosen, device=next(model.parameters()).device)

    @property
    def _mend(self) -> str:
        return f"see what the server at {self._url} printed" if self._url else "see what it printed above"

    def _send_weights(self, model: Any, request: SamplingRequest) -> None:
        """Sends the policy's weights and checks that vLLM holds them. Raises Unsampled, in all processes, if not."""
        problem: Unsampled | None = None
        try:
            if self._url and self._asks:
                with ended_by_signals():
                    check_server(self._url)
            with _as_unsampled("vLLM did not take the policy's weights", self._mend), _unmerged(model):
                self._generation.sync_weights()
            if self._asks:
                self._check_weights(model, request.prompts)
        except Unsampled as error:
            problem = error
        if self._accelerator.num_processes > 1:
            from accelerate.utils import gather_object

            sentences = [each for each in gather_object([None if problem is None else str(problem)]) if each]
            if sentences:
                problem, cause = Unsampled(sentences[0]), problem
                problem.agreed = True
                raise problem from cause
        if problem is not None:
            raise problem

    def _check_weights(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        """Raises Unsampled where vLLM's log-probabilities of one row are further from the policy's than rounding is."""
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or FORCED_TOKENS + 1
        row = forced_row(prompts, min(FORCED_TOKENS, context - 1))
        with ended_by_signals() if self._url else nullcontext(), _as_unsampled("vLLM scored nothing", self._mend):
            theirs = self._scored_by_server(row) if self._url else self._scored_here(row)
        own = row_logprobs(model, row)
        apart = float((own - torch.tensor(theirs, device=own.device)).abs().mean())
        bound = rounding(self._dtype, on_cpu=self._accelerator.device.type == "cpu")
        if not apart <= bound:
            name = str(self._dtype).removeprefix("torch.")
            raise Unsampled(
                f"vLLM holds other weights than the policy: after they were sent, its log-probabilities of one row lie "
                f"{apart:.2g} nats a token from the policy's, and {name} explains {bound:g}. Use another version of "
                "vLLM, or give rollout_engine 'native'."
            )

    def _scored_here(self, row: Sequence[int]) -> list[float]:
        from trl.generation import vllm_generation

        if self._sleeps:  # trl has woken the weights alone; its own call to wake the cache then does nothing
            self._generation.llm.wake_up(tags=["kv_cache"])
        params = vllm_generation.SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0)
        prompt = {"prompt_token_ids": list(row)}
        [output] = self._generation.llm.generate([prompt], sampling_params=params, use_tqdm=False)
        return [of[token].logprob for token, of in zip(row[1:], output.prompt_logprobs[1:], strict=True)]

    def _scored_by_server(self, row: Sequence[int]) -> list[float]:
        client = self._generation.vllm_client
        asked = {
            "model": client.model, "prompt": [list(row)], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0
        }  # fmt: skip
        response = client.session.post(f"{client.base_url}/v1/completions", json=asked)
        response.raise_for_status()
        [choice] = response.json()["choices"]
        scored = zip(row[1:], choice["prompt_logprobs"][1:], strict=True)
        # JSON has no NaN: vLLM writes null.
        return [math.nan if (x := of[str(token)]["logprob"]) is None else x for token, of in scored]

    def _served_dtype(self) -> torch.dtype:
        """What the server computes in."""
        name = str(self._generation.vllm_client.get_server_info()["model_config"]["dtype"])
        return getattr(torch, name.removeprefix("torch."))

    @staticmethod
    def _bound_waits(session: Session) -> None:
        for scheme in ("http://", "https://"):
            session.mount(scheme, BoundedAdapter())


class BoundedAdapter(HTTPAdapter):
    """Notices within seconds that a server is gone, however long an answer of a living one takes."""

    def __init__(self) -> None:
        # What was sent may have been done: only refused connections and answers are tried again.
        super().__init__(
            max_retries=Retry(
                total=2, connect=1, read=0, status=2, backoff_factor=1, status_forcelist=[502, 503],
                allowed_methods=["GET", "POST"], raise_on_status=False,
            )
        )  # fmt: skip

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
        for name, value in {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}.items():
            if hasattr(socket, name):
                options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
        kwargs["socket_options"] = [*HTTPConnection.default_socket_options, *options]
        super().init_poolmanager(*args, **kwargs)

    def send(self, request: Any, stream: bool = False, timeout: Any = None, *args: Any, **kwargs: Any) -> Any:
        return super().send(request, stream, timeout or (CONNECT, None), *args, **kwargs)


def check_server(url: str) -> None:
    """Asks a server whether it is well.

    Args:
        url: its address, without a slash at the end.

    Raises:
        Unsampled: it did not answer, or not well, in twice CONNECT + ANSWER seconds at most.
    """
    failure = ""
    for attempt in range(2):
        time.sleep(attempt)
        try:
            response = http_get(f"{url}/health", timeout=(CONNECT, ANSWER))
        except RequestException as error:
            failure = type(error).__name__
        else:
            if response.ok:
                return
            failure = f"HTTP {response.status_code}"
    raise Unsampled(f"No vLLM server answers at {url} ({failure}): {SERVE}, or mend vllm_server_base_url.")


def computing_dtype(args: PPOConfig, policy: Any) -> torch.dtype:
    """What the policy computes in: bfloat16 under autocast, else what its weights are held in."""
    return torch.bfloat16 if args.bf16 else policy.get_input_embeddings().weight.dtype


def rounding(dtype: torch.dtype, *, on_cpu: bool) -> float:
    """Mean |Δ log π| a token that rounding explains between two programs of this precision."""
    return ROUNDING_ON_CPU if on_cpu and dtype == torch.float32 else ROUNDING.get(dtype, max(ROUNDING.values()))


def forced_row(prompts: Sequence[Sequence[int]], length: int) -> list[int]:
    """Prompts one behind the other, `length` tokens at most; where there is one token alone, that token twice."""
    row = [token for prompt in prompts for token in prompt][:length]
    return row * 2 if len(row) == 1 else row


@torch.no_grad()
def row_logprobs(model: Any, row: Sequence[int]) -> Tensor:
    """log π of each token of a row but the first, at temperature 1, (T-1,) in nats."""
    ids = torch.tensor([row], device=next(model.parameters()).device)
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    return selected_logprobs(logits[:, :-1].float(), ids[:, 1:])[0]


@contextmanager
def _as_unsampled(what: str, mend: str) -> Iterator[None]:
    """Inside, what trl and vLLM raise is Unsampled, a sentence that begins with `what`; their kinds have no end."""
    try:
        yield
    except ZooError:
        raise
    except NotImplementedError as error:
        raise Unsampled(
            f"{what}: {first_line(error)} Give vllm_mode 'colocate', which needs no NCCL, or rollout_engine 'native'."
        ) from error
    except Exception as error:
        reason = first_line(error).rstrip(".:")
        raise Unsampled(
            f"{what} ({type(error).__name__}: {reason}): {mend}, or give rollout_engine 'native'."
        ) from error


@contextmanager
def _unmerged(model: Any) -> Iterator[None]:
    """Takes adapters out of the weights again where sending them failed half-way: trl merges them to send them."""
    try:
        yield
    except Exception:
        if is_peft(model) and any(getattr(module, "merged", False) for module in model.modules()):
            model.unmerge_adapter()
        raise


@contextmanager
def _llm_with(**given: Any) -> Iterator[None]:
    """While open, trl makes its vLLM with these arguments too: its own call has no place for them."""
    from trl.generation import vllm_generation

    made = vllm_generation.LLM
    vllm_generation.LLM = partial(made, **given)
    try:
        yield
    finally:
        vllm_generation.LLM = made


def _leave_weights_plain() -> None:
    """Keeps vLLM on a CPU from packing linear weights for oneDNN, after which it takes no others."""
    try:
        from vllm import _custom_ops
    except ImportError:  # another version: the check after each sync finds weights that were not taken
        return
    _custom_ops._supports_onednn = False
