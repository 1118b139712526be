"""Rollout engines: `sampler.sample`, or another library's, used as it is.

The log π of another engine differs slightly, so the trainer takes log π_old from its own forward pass, keeps the
engine's as `Rollout.engine_logprobs`, and may weight by their ratio (`importance_sampling_cap`).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import ZooError
from ..modeling.sampling.cuda_graphs import Capture, CudaGraphs, FixedDecoder, can_be_fixed, fixed_size
from ..modeling.sampling.sampler import Samples, SamplingRequest, sample
from .config import PPOConfig
from .engine_samples import as_samples, ids_outside

#: Samples completions of a model for a request.
Engine = Callable[[Any, SamplingRequest], Samples]


def make_engine(
    args: PPOConfig, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, accelerator: Any
) -> Engine:
    """Makes the engine that the configuration names.

    Args:
        args: The settings.
        policy: The policy.
        tokenizer: The policy's.
        accelerator: The trainer's.

    Raises:
        ZooError: The engine is not installed or cannot sample from the policy.
    """
    if args.rollout_engine == "native":
        return NativeEngine(CudaGraphs if args.rollout_graphs and args.device.type == "cuda" else None)
    if args.rollout_engine == "vllm":
        from .vllm import VLLMEngine

        return VLLMEngine(args, policy, tokenizer, accelerator)
    if not hasattr(policy, "generate_batch"):
        raise ZooError(
            f"rollout_engine is 'transformers', and a {type(policy).__name__} has no generate_batch: use 'native'."
        )
    return sample_with_transformers


class NativeEngine:
    """Our own sampler, `rlhf_zoo.modeling.sampling.sampler.sample`.

    Args:
        captures: Makes the object that captures decoding steps over a cache of fixed size, which is kept between
            rollouts. None for a growing cache, which is also used if a model or request does not suit a fixed one.
    """

    def __init__(self, captures: Callable[[], Capture] | None = None) -> None:
        self._captures = captures
        self._decoder: FixedDecoder | None = None

    def __call__(self, model: PreTrainedModel, request: SamplingRequest) -> Samples:
        return sample(model, **vars(request), decoder=self._fixed(model, request))

    def _fixed(self, model: PreTrainedModel, request: SamplingRequest) -> FixedDecoder | None:
        if self._captures is None or not can_be_fixed(model):
            return None
        size = fixed_size(request.prompts, request.max_new_tokens, request.max_tokens)
        if size is None:
            return None
        if self._decoder is None or not self._decoder.fits(model, *size):
            self._decoder = None  # frees its memory before the next decoder allocates as much
            self._decoder = FixedDecoder(model, *size, self._captures())
        return self._decoder.begin()


def sample_with_transformers(model: Any, request: SamplingRequest) -> Samples:
    """Samples with transformers' continuous batching, with one random stream for all rows.

    Args:
        model: The policy.
        request: The request, whose max_tokens bounds the paged cache.

    Raises:
        ZooError: Completions are missing.
    """
    from transformers.generation import ContinuousBatchingConfig

    # For each row, one more block of 256 tokens than it can fill.
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
        suppress_tokens=ids_outside(request.vocabulary, model) or None,
    )
    by_request = model.generate_batch(
        inputs=[list(prompt) for prompt in request.prompts],
        generation_config=config,
        continuous_batching_config=batching,
        warmup=False,
    )
    # Requests are numbered in the order of the prompts.
    outputs = [by_request[name] for name in sorted(by_request, key=lambda name: int(name.rpartition("_")[2]))]
    failed = next((output.error for output in outputs if output.error), None)
    if failed or len(outputs) != len(request.prompts):
        raise ZooError(
            f"rollout_engine 'transformers' answered {len(outputs)} of {len(request.prompts)} prompts "
            f"({failed or 'no error'}): raise max_rollout_batch_tokens, or set rollout_engine to 'native'."
        )
    completions, logprobs = zip(*((output.generated_tokens, output.logprobs) for output in outputs), strict=True)
    return as_samples(request, completions, logprobs, device=model.device)
