"""Adds what the SFT model says of rollouts: log-probabilities, and how much a text depends on its prompt."""

from dataclasses import replace
from pathlib import Path

from ..hub.client.connect import Hub
from ..modeling.chat import tokenize_completion
from ..modeling.loading import load_tokenizer
from ..modeling.models import load_causal
from ..runs.checkpoint_choice import resolve_model
from .probes import Completions
from .text_logprobs import dependence, logprobs_under


def add_logprobs(
    policy: Completions, sft: Completions, *, model: str | Path, hub: Hub, seed: int
) -> tuple[Completions, Completions]:
    """Adds log-probabilities under the SFT model, and how much likelier a text is after its own prompt than another.

    Args:
        policy: The policy's completions.
        sft: SFT's completions.
        model: The SFT model, a folder or a Hub id.
        hub: Where Hub ids are looked up.
        seed: Seed that chooses the other prompts.

    Returns:
        Both sides, with `logprobs` and `dependence`.

    Raises:
        ZooError: The model cannot be loaded, or does not fit into memory.
    """
    path = resolve_model(model, hub).path
    sft_model, tokenizer = load_causal(path).eval(), load_tokenizer(path)
    sides = []
    for rollouts in (policy, sft):
        tokens = [
            tokenize_completion(prompt, text, tokenizer)
            for prompt, text in zip(rollouts.prompts, rollouts.texts, strict=True)
        ]
        logprobs = logprobs_under(sft_model, tokenizer, rollouts.prompts, tokens, desc="under own prompts")
        sums = [sum(row) for row in logprobs]
        prompt_dependence = dependence(sft_model, tokenizer, rollouts.prompts, tokens, sums, seed=seed)
        sides.append(replace(rollouts, logprobs=logprobs, dependence=prompt_dependence))
    return sides[0], sides[1]
