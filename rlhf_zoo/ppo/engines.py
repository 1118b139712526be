"""Where completions are sampled: `rlhf_zoo.sampling.sample`, or another engine that is called as it is.

Another engine computes log π in its own way, so the trainer takes log π_old from a pass of its own, keeps the engine's
as `Rollout.engine_logprobs`, and may weight by both (`importance_sampling_cap`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..errors import ZooError
from ..graphs import Capture, CudaGraphs, FixedDecoder, can_be_fixed, fixed_size
from ..sampling import Samples, SamplingRequest, Vocabulary, left_pad, sample
from .config import PPOConfig

# Completions of a model for a request.
Engine = Callable[[Any, SamplingRequest], Samples]


def make_engine(args: PPOConfig, policy: Any, tokenizer: PreTrainedTokenizerBase, accelerator: Any) -> Engine:
    """The engine that the configuration names. Raises ZooError where it is not installed or cannot take the policy."""
    if args.rollout_engine == "native":
        return NativeEngine(CudaGraphs if args.rollout_graphs and args.device.type == "cuda" else None)
    if args.rollout_engine == "vllm":
        return VLLMEngine(args, policy, tokenizer, accelerator)
    if not hasattr(policy, "generate_batch"):
        raise ZooError(
            f"rollout_engine is 'transformers', and a {type(policy).__name__} has no generate_batch: give 'native'."
        )
    return sample_with_transformers


class NativeEngine:
    """`rlhf_zoo.sampling.sample`.

    captures: makes what captures the steps of decoding over a cache of fixed size, which is held from one rollout to
    the next; None: the cache grows, as it does for models and requests that a fixed one is not for.
    """

    def __init__(self, captures: Callable[[], Capture] | None = None) -> None:
        self._captures = captures
        self._decoder: FixedDecoder | None = None

    def __call__(self, model: Any, request: SamplingRequest) -> Samples:
        return sample(model, **vars(request), decoder=self._fixed(model, request))

    def _fixed(self, model: Any, request: SamplingRequest) -> FixedDecoder | None:
        if self._captures is None or not can_be_fixed(model):
            return None
        size = fixed_size(request.prompts, request.max_new_tokens, request.max_tokens)
        if size is None:
            return None
        if self._decoder is None or not self._decoder.fits(model, *size):
            self._decoder = None  # its memory, before the next takes as much
            self._decoder = FixedDecoder(model, *size, self._captures())
        return self._decoder.begin()


def sample_with_transformers(model: Any, request: SamplingRequest) -> Samples:
    """Continuous batching of transformers, one random stream for all rows; max_tokens bounds its paged cache."""
    from transformers.generation import ContinuousBatchingConfig

    # One more block of 256 tokens a row than fits at most.
    needed = sum(len(prompt) + request.max_new_tokens + 256 for prompt in request.prompts)
    batching = ContinuousBatchingConfig(
        return_logprobs=True,
        seed=int(np.random.SeedSequence([request.seed, *request.keys[0]]).generate_state(1)[0] >> 1),
        num_blocks=-(-min(needed, request.max_tokens or needed) // 256),
        page_size=256,
    )
    config = GenerationConfig(
        do_sample=True,
        temperature=request.temperature,
        top_k=None,
        top_p=None,
        max_new_tokens=request.max_new_tokens,
        eos_token_id=list(request.stop_ids) or -1,
        pad_token_id=request.pad_id,
        suppress_tokens=_outside(request.vocabulary, model) or None,
    )
    found = model.generate_batch(
        inputs=[list(prompt) for prompt in request.prompts],
        generation_config=config,
        continuous_batching_config=batching,
        warmup=False,
    )
    # Requests are numbered in the order of the prompts.
    outputs = [found[name] for name in sorted(found, key=lambda name: int(name.rpartition("_")[2]))]
    failed = next((output.error for output in outputs if output.error), None)
    if failed or len(outputs) != len(request.prompts):
        raise ZooError(
            f"rollout_engine 'transformers' answered {len(outputs)} of {len(request.prompts)} prompts "
            f"({failed or 'no error'}): raise max_rollout_batch_tokens, or give rollout_engine 'native'."
        )
    completions, logprobs = zip(*((output.generated_tokens, output.logprobs) for output in outputs), strict=True)
    return _as_samples(request, completions, logprobs, device=model.device)


class VLLMEngine:
    """vLLM through trl's VLLMGeneration, beside the trainer on its GPU or as a server. Never run: it needs a GPU."""

    def __init__(self, args: PPOConfig, policy: Any, tokenizer: PreTrainedTokenizerBase, accelerator: Any) -> None:
        try:
            from trl.generation import VLLMGeneration  # where vLLM is installed
        except ImportError as error:
            raise ZooError(
                "rollout_engine is 'vllm', which is not installed: pip install 'trl[vllm]', or give 'native'."
            ) from error
        self._temperature, self._length = args.temperature, args.response_length
        self._generation = VLLMGeneration(
            policy,
            accelerator,
            tokenizer,
            mode=args.vllm_mode,
            server_base_url=args.vllm_server_base_url,
            gpu_memory_utilization=args.vllm_gpu_memory_utilization,
            enable_sleep_mode=args.vllm_enable_sleep_mode,
            temperature=args.temperature,
            max_completion_length=args.response_length,
            logprobs=0,
        )

    def __call__(self, model: Any, request: SamplingRequest) -> Samples:
        """vLLM's random streams are its own: keys and seed decide nothing."""
        assert (request.temperature, request.max_new_tokens) == (self._temperature, self._length)
        settings: dict[str, Any] = {"stop_token_ids": list(request.stop_ids), "ignore_eos": True}
        if _outside(request.vocabulary, model):
            settings["allowed_token_ids"] = [
                index for index in range(request.vocabulary.size) if index in request.vocabulary
            ]
        self._generation.generation_kwargs = settings
        self._generation.sync_weights()
        _, completions, logprobs, _ = self._generation.generate(
            prompts=[list(prompt) for prompt in request.prompts], images=None, num_generations=1
        )
        chosen = [[token[0] for token in row] for row in logprobs]
        return _as_samples(request, completions, chosen, device=next(model.parameters()).device)


def _outside(vocabulary: Vocabulary, model: Any) -> list[int]:
    """Rows of the model's head that stand for no token."""
    rows = model.get_output_embeddings().weight.shape[0]
    return [*vocabulary.holes, *range(vocabulary.size, rows)]


def _as_samples(
    request: SamplingRequest,
    completions: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    *,
    device: torch.device | str,
) -> Samples:
    """Token lists as `Samples`. Raises ZooError for a completion without tokens or with others than can be sampled."""
    for row, tokens in enumerate(completions):
        if not tokens or len(tokens) != len(logprobs[row]):
            raise ZooError(
                f"The rollout engine gave completion {row} {len(tokens)} tokens and {len(logprobs[row])} "
                "log-probabilities: choose rollout_engine 'native'."
            )
        if strange := [index for index in tokens if index not in request.vocabulary]:
            raise ZooError(
                f"The rollout engine sampled the id {strange[0]}, which the tokenizer does not name: choose "
                "rollout_engine 'native'."
            )
    prompt_ids, prompt_mask = left_pad(request.prompts, request.pad_id, device)
    width = max(map(len, completions))

    def beside(rows: Sequence[Sequence[Any]], fill: Any) -> Tensor:
        return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], device=device)

    lengths = torch.tensor([len(tokens) for tokens in completions], device=device)
    return Samples(
        prompt_ids,
        prompt_mask,
        beside(completions, request.pad_id),
        torch.arange(width, device=device) < lengths.unsqueeze(1),
        beside(logprobs, 0.0).float(),
        torch.tensor([tokens[-1] in set(request.stop_ids) for tokens in completions], device=device),
        request.vocabulary,
    )
