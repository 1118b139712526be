"""The page's API for programs: the same comparisons, as JSON."""

import inspect
from collections.abc import Callable
from typing import Any

import gradio as gr

from ...errors import ZooError
from ..engine import Sampling
from .models import PageModels
from .sampling import MODEL_QUEUE, SamplingDefaults
from .streams import CompletionStreams


def add_endpoints(
    page_models: PageModels, streams: CompletionStreams, *, defaults: SamplingDefaults, max_concurrent: int
) -> None:
    """Adds the endpoints /compare, /checkpoints and /over_training.

    Args:
        page_models: The models and their runs.
        streams: Samples the completions.
        defaults: Default sampling parameters.
        max_concurrent: Largest number of requests that run the models at the same time.
    """
    model_options: dict[str, Any] = {"concurrency_id": MODEL_QUEUE, "concurrency_limit": max_concurrent}
    # By default Gradio shows only the beginning of a docstring, without the arguments.
    functions: list[tuple[Callable[..., object], dict[str, Any]]] = [
        (_compare_endpoint(streams, defaults), model_options),
        (_checkpoints_endpoint(page_models), {}),
        (_over_training_endpoint(page_models, streams, defaults), model_options),
    ]
    for function, options in functions:
        gr.api(function, api_name=function.__name__, api_description=inspect.getdoc(function), **options)


def _compare_endpoint(streams: CompletionStreams, defaults: SamplingDefaults) -> Callable[..., dict]:
    def compare(
        prompt: str,
        seed: int = 1,
        temperature: float = defaults.temperature,
        top_p: float = 1.0,
        max_new_tokens: int = defaults.length,
        n: int = 1,
    ) -> dict:
        """Complete a prompt with the SFT and the PPO policy, using the same random numbers.

        Returns the arguments, and under `sft` and `ppo` a list of n completions each. A completion has completion (its
        text), reward, log_ratio (log π_PPO − log π_SFT of this one completion, in nats: a sample, not a KL), kl (the
        exact KL of PPO to SFT, summed over its positions), length, stop ("eos" or "length"), and lists with one entry
        per token: tokens, token_log_ratio, token_kl, token_logprob_ppo, token_logprob_sft, and token_values (null
        without a critic).

        Args:
            prompt: The prompt.
            seed: An integer. The same arguments give the same completions.
            temperature: Sampling temperature, 0.01 to 100.
            top_p: Sample from the most likely tokens with this total probability; 1 samples from all.
            max_new_tokens: Largest number of tokens in a completion.
            n: Number of completions of each policy, 1 to 8.
        """
        try:
            *_, last_snapshot = streams.stream(
                prompt, seed=seed, temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens, n=n
            )
        except ZooError as error:
            raise _gradio_error(error) from error
        return last_snapshot.to_json()

    return compare


def _checkpoints_endpoint(page_models: PageModels) -> Callable[..., list]:
    def checkpoints() -> list:
        """List the page's runs: name, beta (coefficient of the KL penalty) and points (the published checkpoints).

        A point has step, tag, commit, the reward and kl that training logged, chosen (whether the run chose it as its
        best) and recommended (whether an evaluation recommends it).
        """
        return [run.to_json() for run in page_models.timeline.runs.values()] if page_models.timeline else []

    return checkpoints


def _over_training_endpoint(
    page_models: PageModels, streams: CompletionStreams, defaults: SamplingDefaults
) -> Callable[..., list]:
    def over_training(
        prompt: str,
        steps: list[int] | None = None,
        run: str | None = None,
        seed: int = 1,
        temperature: float = defaults.temperature,
        top_p: float = 1.0,
        max_new_tokens: int = defaults.length,
    ) -> list:
        """Complete a prompt with the policies of several checkpoints of a run, using the same random numbers.

        Returns for each checkpoint: run, beta, point (see /checkpoints), and either snapshot (as /compare returns it)
        or problem (why sampling failed).

        Args:
            prompt: The prompt.
            steps: Training steps, in the order of the results; null chooses steps spread over the run.
            run: Name of the run, as /checkpoints returns it; null for the run of the compared checkpoint.
            seed: An integer. The same arguments give the same completions.
            temperature: Sampling temperature, 0.01 to 100.
            top_p: Sample from the most likely tokens with this total probability; 1 samples from all.
            max_new_tokens: Largest number of tokens in a completion.
        """
        if page_models.timeline is None:
            raise _gradio_error(page_models.problem or "This page has no runs.")
        if steps is not None and not (isinstance(steps, list) and all(type(step) is int for step in steps)):
            raise _gradio_error("steps must be a list of integers: use steps that /checkpoints returns.")
        sampling = Sampling(seed=seed, temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens)
        try:
            return [result.to_json() for result in streams.stream_steps(prompt, steps, run=run, **sampling)]
        except ZooError as error:
            raise _gradio_error(error) from error

    return over_training


def _gradio_error(message: object) -> gr.Error:
    return gr.Error(str(message), print_exception=False)
