"""Rollout engines: our own sampler (`sampler.sample`), transformers' continuous batching, or vLLM.

Another engine's log π differs slightly from ours. Therefore the trainer takes log π_old from a forward pass, keeps the
engine's log π as `Rollout.engine_logprobs`, and may weight tokens by π_old/π_engine (`importance_sampling_cap`).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from accelerate import Accelerator
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import ZooError
from ..modeling.sampling.cuda_graphs import Capture, CudaGraphs, FixedDecoder, fixed_cache_shape, supports_fixed_cache
from ..modeling.sampling.sampler import Samples, SamplingRequest, sample
from .config import PPOConfig
from .engine_samples import as_samples, excluded_ids

_PAGE_SIZE = 256  # tokens in a page of continuous batching's cache
#: Samples from the policy the completions that a request asks for.
Engine = Callable[[PreTrainedModel, SamplingRequest], Samples]


def make_engine(
    args: PPOConfig, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, accelerator: Accelerator
) -> Engine:
    """Makes the engine that the configuration names.

    Args:
        args: The settings.
        policy: The policy.
        tokenizer: The policy's tokenizer.
        accelerator: The trainer's accelerator.

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
            f"rollout_engine is 'transformers', but a {type(policy).__name__} has no generate_batch: use 'native'."
        )
    return sample_with_transformers


class NativeEngine:
    """Our own sampler, `rlhf_zoo.modeling.sampling.sampler.sample`.

    Args:
        make_capture: Makes the `Capture` of a decoder with a cache of fixed size, which later rollouts reuse. With
            None, or if the model or the request does not allow a fixed size, the cache grows.
    """

    def __init__(self, make_capture: Callable[[], Capture] | None = None) -> None:
        self._make_capture = make_capture
        self._decoder: FixedDecoder | None = None

    def __call__(self, model: PreTrainedModel, request: SamplingRequest) -> Samples:
        return sample(model, **vars(request), decoder=self._fixed_decoder(model, request))

    def _fixed_decoder(self, model: PreTrainedModel, request: SamplingRequest) -> FixedDecoder | None:
        if self._make_capture is None or not supports_fixed_cache(model):
            return None
        shape = fixed_cache_shape(request.prompts, request.max_new_tokens, request.max_tokens)
        if shape is None:
            return None
        if self._decoder is None or not self._decoder.fits(model, *shape):
            self._decoder = None  # frees its memory before the next decoder allocates as much
            self._decoder = FixedDecoder(model, *shape, self._make_capture())
        return self._decoder.reset()


def sample_with_transformers(model: Any, request: SamplingRequest) -> Samples:
    """Samples with transformers' continuous batching, which has one random stream for all rows.

    The stream depends on the request's seed and first key.

    Args:
        model: The policy.
        request: The request. Its `max_tokens` limits the paged cache.

    Raises:
        ZooError: Transformers returned an error, or too few completions.
    """
    from transformers.generation import ContinuousBatchingConfig

    # The last page of a row may be almost empty, so a row may need one page more than its tokens fill.
    needed_tokens = sum(len(prompt) + request.max_new_tokens + _PAGE_SIZE for prompt in request.prompts)
    batching = ContinuousBatchingConfig(
        return_logprobs=True,
        seed=int(np.random.SeedSequence([request.seed, *request.keys[0]]).generate_state(1)[0] >> 1),
        num_blocks=-(-min(needed_tokens, request.max_tokens or needed_tokens) // _PAGE_SIZE),
        page_size=_PAGE_SIZE,
    )
    config = GenerationConfig(
        do_sample=True,
        temperature=request.temperature,
        top_k=None,
        top_p=None,
        max_new_tokens=request.max_new_tokens,
        eos_token_id=list(request.stop_ids) or -1,  # no token has the id −1
        pad_token_id=request.pad_id,
        suppress_tokens=excluded_ids(request.vocabulary, model) or None,
    )
    results = model.generate_batch(
        inputs=[list(prompt) for prompt in request.prompts],
        generation_config=config,
        continuous_batching_config=batching,
        warmup=False,
    )
    # Results come in any order, but the name of a request ends with its prompt's number.
    outputs = [results[name] for name in sorted(results, key=lambda name: int(name.rpartition("_")[2]))]
    error = next((output.error for output in outputs if output.error), None)
    if error or len(outputs) != len(request.prompts):
        raise ZooError(
            f"rollout_engine 'transformers' answered {len(outputs)} of {len(request.prompts)} prompts "
            f"({error or 'no error'}): raise max_rollout_batch_tokens, or set rollout_engine to 'native'."
        )
    completions, logprobs = zip(*((output.generated_tokens, output.logprobs) for output in outputs), strict=True)
    return as_samples(request, completions, logprobs, device=model.device)
