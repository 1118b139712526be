"""Samples with vLLM through TRL's VLLMGeneration, in the trainer's process (colocated) or on a server.

Before each rollout, the policy's weights are sent to vLLM. Then vLLM and the policy score the same row, because vLLM
may confirm an update of its weights without applying all of it.
"""

import math
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from requests import RequestException
from requests import get as http_get
from requests.adapters import HTTPAdapter
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from urllib3.connection import HTTPConnection
from urllib3.util.retry import Retry

from ..errors import ZooError, first_line
from ..functional import selected_logprobs
from ..modeling.models import is_peft
from ..modeling.sampling.sampler import Samples, SamplingRequest
from .config import PPOConfig
from .engine_samples import as_samples, excluded_ids
from .failures import SamplingFailed
from .waiting import raise_on_signals

#: The number of tokens in the row that vLLM and the policy score after each update of weights.
CHECKED_TOKENS = 64
#: The largest mean |Δ log π| per token, in nats, that rounding can explain, by the coarser of the two precisions.
#: Measured: 1e-5 in float32 on a CPU, 1e-3 if a GPU multiplies in TF32, 1e-2 in bfloat16; 0.2 to 0.3 if weights are
#: stale.
ROUNDING = {torch.float32: 1e-2, torch.float16: 2e-2, torch.bfloat16: 0.1}
#: The same limit for float32 on a CPU.
ROUNDING_ON_CPU = 1e-3
#: Seconds to wait for a connection, and for the answer to a health check.
CONNECT_SECONDS, ANSWER_SECONDS = 2.0, 2.0


class VLLMEngine:
    """An engine that samples with vLLM. Random numbers are vLLM's own: a request's keys and seed have no effect.

    Args:
        args: The settings.
        policy: The policy.
        tokenizer: The policy's tokenizer.
        accelerator: The trainer's accelerator.

    Raises:
        ZooError: vLLM is not installed.
        SamplingFailed: vLLM does not start, or its server does not answer.
    """

    def __init__(
        self, args: PPOConfig, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, accelerator: Accelerator
    ) -> None:
        try:
            from trl.generation import VLLMGeneration  # importable only if vLLM is installed
        except ImportError as error:
            raise ZooError(
                "rollout_engine is 'vllm', which is not installed: pip install 'trl[vllm]', or use 'native'."
            ) from error
        self._temperature, self._max_new_tokens = args.temperature, args.response_length
        self._accelerator, self._sleep_mode = accelerator, args.vllm_enable_sleep_mode
        self._url = None if args.vllm_server_base_url is None else args.vllm_server_base_url.rstrip("/")
        self._dtype = _computing_dtype(args, policy)
        # With several processes, only the main one talks to a server, but each has its own colocated vLLM.
        self._is_client = self._url is None or accelerator.is_main_process
        llm_options = nullcontext() if self._url else _add_llm_options(
            dtype=str(self._dtype).removeprefix("torch."), enforce_eager=args.vllm_enforce_eager
        )  # fmt: skip
        with raise_on_signals(), _convert_errors("vLLM did not start", "see its output above"):
            if self._url and self._is_client:
                _check_server(self._url)
            if self._url is None and accelerator.device.type == "cpu":
                _disable_weight_packing()
            with llm_options:
                self._generation = VLLMGeneration(
                    policy,
                    accelerator,
                    tokenizer,
                    mode=args.vllm_mode,
                    server_base_url=self._url,
                    server_timeout=0.0,  # `_check_server` has already waited
                    gpu_memory_utilization=args.vllm_gpu_memory_utilization,
                    enable_sleep_mode=args.vllm_enable_sleep_mode,
                    temperature=args.temperature,
                    max_completion_length=args.response_length,
                    logprobs=0,
                )
            if self._url and self._is_client:
                for scheme in ("http://", "https://"):
                    self._generation.vllm_client.session.mount(scheme, BoundedAdapter())
                self._dtype = max(self._dtype, self._served_dtype(), key=lambda dtype: torch.finfo(dtype).eps)

    def __call__(self, model: PreTrainedModel, request: SamplingRequest) -> Samples:
        assert (request.temperature, request.max_new_tokens) == (self._temperature, self._max_new_tokens)
        # The trainer's stop ids include EOS if EOS should end completions, so vLLM must not stop at EOS by itself.
        settings: dict[str, Any] = {"stop_token_ids": list(request.stop_ids), "ignore_eos": True}
        if excluded_ids(request.vocabulary, model):
            settings["allowed_token_ids"] = [
                token_id for token_id in range(request.vocabulary.size) if token_id in request.vocabulary
            ]
        self._send_weights(model, request)
        self._generation.generation_kwargs = settings
        # Signals may interrupt the wait for a server. A colocated vLLM finishes its rollout, as our own sampler does.
        with raise_on_signals() if self._url else nullcontext(), _convert_errors("vLLM sampled nothing", self._fix):
            _, completions, logprobs, _ = self._generation.generate(
                prompts=[list(prompt) for prompt in request.prompts], images=None, num_generations=1
            )
        # With logprobs=0, the only log-probability at each position is that of the sampled token.
        sampled_logprobs = [[position[0] for position in row] for row in logprobs]
        return as_samples(request, completions, sampled_logprobs, device=next(model.parameters()).device)

    @property
    def _fix(self) -> str:
        return f"see the output of the server at {self._url}" if self._url else "see its output above"

    def _send_weights(self, model: PreTrainedModel, request: SamplingRequest) -> None:
        """Sends the policy's weights and checks that vLLM has them. All processes raise SamplingFailed if not."""
        problem: SamplingFailed | None = None
        try:
            if self._url and self._is_client:
                with raise_on_signals():
                    _check_server(self._url)
            with _convert_errors("vLLM did not accept the policy's weights", self._fix), _unmerge_on_error(model):
                self._generation.sync_weights()
            if self._is_client:
                self._check_weights(model, request.prompts)
        except SamplingFailed as error:
            problem = error
        if self._accelerator.num_processes > 1:
            from accelerate.utils import gather_object

            # Otherwise the other processes would wait for a process that has failed.
            messages = [text for text in gather_object([None if problem is None else str(problem)]) if text]
            if messages:
                problem, cause = SamplingFailed(messages[0]), problem
                problem.raised_on_all_processes = True
                raise problem from cause
        if problem is not None:
            raise problem

    def _check_weights(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> None:
        """Raises SamplingFailed if vLLM's log-probabilities of a row differ from the policy's by more than rounding."""
        context_length = getattr(model.config.get_text_config(), "max_position_embeddings", None) or CHECKED_TOKENS + 1
        row = _row_to_check(prompts, min(CHECKED_TOKENS, context_length - 1))
        with raise_on_signals() if self._url else nullcontext(), _convert_errors("vLLM scored nothing", self._fix):
            vllm_logprobs = self._server_logprobs(row) if self._url else self._colocated_logprobs(row)
        policy_logprobs = row_logprobs(model, row)
        difference = float((policy_logprobs - torch.tensor(vllm_logprobs, device=policy_logprobs.device)).abs().mean())
        bound = max_rounding(self._dtype, on_cpu=self._accelerator.device.type == "cpu")
        if not difference <= bound:  # NaN fails too
            name = str(self._dtype).removeprefix("torch.")
            raise SamplingFailed(
                f"vLLM does not have the policy's weights: after they were sent, its log-probabilities of one row "
                f"differ by {difference:.2g} nats per token from the policy's, more than the {bound:g} that rounding "
                f"in {name} explains: use another version of vLLM, or rollout_engine 'native'."
            )

    def _colocated_logprobs(self, row: Sequence[int]) -> list[float]:
        from trl.generation import vllm_generation

        if self._sleep_mode:  # so far, TRL has woken only the weights; its later call for the cache has no effect
            self._generation.llm.wake_up(tags=["kv_cache"])
        params = vllm_generation.SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0)
        prompt = {"prompt_token_ids": list(row)}
        [output] = self._generation.llm.generate([prompt], sampling_params=params, use_tqdm=False)
        return [logprobs[token].logprob for token, logprobs in zip(row[1:], output.prompt_logprobs[1:], strict=True)]

    def _server_logprobs(self, row: Sequence[int]) -> list[float]:
        client = self._generation.vllm_client
        body = {
            "model": client.model, "prompt": [list(row)], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0
        }  # fmt: skip
        response = client.session.post(f"{client.base_url}/v1/completions", json=body)
        response.raise_for_status()
        [choice] = response.json()["choices"]
        positions = zip(row[1:], choice["prompt_logprobs"][1:], strict=True)
        token_logprobs = [logprobs[str(token)]["logprob"] for token, logprobs in positions]
        # JSON has no NaN, so vLLM writes null instead.
        return [math.nan if logprob is None else logprob for logprob in token_logprobs]

    def _served_dtype(self) -> torch.dtype:
        """Returns the dtype in which the server computes."""
        name = str(self._generation.vllm_client.get_server_info()["model_config"]["dtype"])
        return getattr(torch, name.removeprefix("torch."))


class BoundedAdapter(HTTPAdapter):
    """Fails within seconds if a server is down, but waits for a running server as long as it needs."""

    def __init__(self) -> None:
        # Retry only if the connection was refused, or a proxy refused. After other failures, the server may have
        # processed the request although its answer was lost.
        super().__init__(
            max_retries=Retry(
                total=2, connect=1, read=0, status=2, backoff_factor=1, status_forcelist=[502, 503],
                allowed_methods=["GET", "POST"], raise_on_status=False,
            )
        )  # fmt: skip

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        # Keep-alive probes detect after about 9 s that a server is gone, and let a server compute as long as it needs.
        options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
        for name, value in {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}.items():
            if hasattr(socket, name):
                options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
        kwargs["socket_options"] = [*HTTPConnection.default_socket_options, *options]
        super().init_poolmanager(*args, **kwargs)

    def send(self, request: Any, stream: bool = False, timeout: Any = None, *args: Any, **kwargs: Any) -> Any:
        return super().send(request, stream, timeout or (CONNECT_SECONDS, None), *args, **kwargs)


def _check_server(url: str) -> None:
    """Checks the health of a server. Raises SamplingFailed if two attempts fail."""
    failure = ""
    for attempt in range(2):
        time.sleep(attempt)
        try:
            response = http_get(f"{url}/health", timeout=(CONNECT_SECONDS, ANSWER_SECONDS))
        except RequestException as error:
            failure = type(error).__name__
        else:
            if response.ok:
                return
            failure = f"HTTP {response.status_code}"
    raise SamplingFailed(
        f"No vLLM server answers at {url} ({failure}): start it as docs/engines.md says, or correct "
        "vllm_server_base_url."
    )


def _computing_dtype(args: PPOConfig, policy: PreTrainedModel) -> torch.dtype:
    """Returns the dtype in which the policy computes: bfloat16 under autocast, otherwise the dtype of the weights."""
    embeddings: Any = policy.get_input_embeddings()
    return torch.bfloat16 if args.bf16 else embeddings.weight.dtype


def max_rounding(dtype: torch.dtype, *, on_cpu: bool) -> float:
    """Returns the largest mean |Δ log π| per token, in nats, that rounding can explain between two programs.

    Args:
        dtype: The coarser of the two precisions.
        on_cpu: Whether both programs run on a CPU.
    """
    return ROUNDING_ON_CPU if on_cpu and dtype == torch.float32 else ROUNDING.get(dtype, max(ROUNDING.values()))


def _row_to_check(prompts: Sequence[Sequence[int]], length: int) -> list[int]:
    """Concatenates prompts into the row that vLLM and the policy score, with at most `length` tokens.

    The row has at least two tokens, because the first token has no log-probability.
    """
    row = [token for prompt in prompts for token in prompt][:length]
    return row * 2 if len(row) == 1 else row


@torch.no_grad()
def row_logprobs(model: PreTrainedModel, row: Sequence[int]) -> Tensor:
    """Computes log π of each token of a row except the first, at temperature 1.

    Args:
        model: The policy.
        row: T token ids.

    Returns:
        (T−1,) in nats.
    """
    ids = torch.tensor([row], device=next(model.parameters()).device)
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    return selected_logprobs(logits[:, :-1].float(), ids[:, 1:])[0]


@contextmanager
def _convert_errors(failure: str, fix: str) -> Iterator[None]:
    """Converts any exception of TRL or vLLM into SamplingFailed. They raise too many types to list."""
    try:
        yield
    except ZooError:
        raise
    except NotImplementedError as error:
        raise SamplingFailed(
            f"{failure}: {first_line(error)}. Use vllm_mode 'colocate', which needs no NCCL, or rollout_engine "
            "'native'."
        ) from error
    except Exception as error:
        reason = first_line(error).rstrip(".:")
        raise SamplingFailed(
            f"{failure} ({type(error).__name__}: {reason}): {fix}, or use rollout_engine 'native'."
        ) from error


@contextmanager
def _unmerge_on_error(model: Any) -> Iterator[None]:
    """Unmerges adapters if sending weights failed, because TRL merges them before it sends the weights."""
    try:
        yield
    except Exception:
        if is_peft(model) and any(getattr(module, "merged", False) for module in model.modules()):
            model.unmerge_adapter()
        raise


@contextmanager
def _add_llm_options(**options: Any) -> Iterator[None]:
    """Adds arguments to the vLLM that TRL makes in this context, because TRL has no option for them."""
    from trl.generation import vllm_generation

    original_class = vllm_generation.LLM
    vllm_generation.LLM = partial(original_class, **options)
    try:
        yield
    finally:
        vllm_generation.LLM = original_class


def _disable_weight_packing() -> None:
    """Keeps vLLM on a CPU from packing linear weights for oneDNN, because packed weights cannot be updated."""
    try:
        from vllm import _custom_ops
    except ImportError:  # another version of vLLM, for which the check after each update has to suffice
        return
    _custom_ops._supports_onednn = False
