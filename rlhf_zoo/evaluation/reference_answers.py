"""Compares SFT and PPO with reference answers in the data, as is usual in papers on summarization."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel

from ..modeling import distributed
from ..modeling.chat import plain_text
from ..modeling.devices import move
from ..rewards.rule import last_message_text
from .head_to_head import HeadToHead, random_keys
from .judges.pairwise import compare_pairs
from .judges.panel import score_completions
from .measure import repeat_prompts
from .stats import TIE_TOLERANCE, WinRate, win_rate


def compare_with_references(
    comparison: HeadToHead,
    rows: Dataset,
    load_policy: Callable[[], PreTrainedModel],
    *,
    column: str,
    temperature: float | None = None,
) -> dict[str, Any]:
    """Computes how often the headline judge prefers SFT, and PPO, to a reference answer, with one sample per prompt.

    Special tokens are removed from the reference answers, as from completions.

    Args:
        comparison: The measured policies.
        rows: The rows that were passed to `head_to_head`, with the reference answers.
        load_policy: Loads the PPO policy; called only if `temperature` is given.
        column: The column of the reference answers.
        temperature: The temperature at which to sample both policies again; None to use the first completion of each
            prompt in `comparison`.

    Returns:
        The win rates as JSON.
    """
    evaluator, judge = comparison.evaluator, comparison.evaluator.judge
    _, prompts, columns = repeat_prompts(rows, 1)
    groups = comparison.groups[:: comparison.samples_per_prompt]
    reference_texts = [
        _remove_special_tokens(last_message_text(value), evaluator.tokenizer.all_special_tokens)
        for value in rows[column]
    ]
    # There is one reference answer per prompt, so only the first sample is compared.
    first_samples = slice(None, None, comparison.samples_per_prompt)
    texts = {side: comparison.measurements[side].completions[first_samples] for side in ("sft", "ppo")}
    if temperature is not None:
        evaluator_at_temperature, keys = replace(evaluator, temperature=temperature), random_keys(len(prompts), 1)
        for side, model in {"sft": evaluator.reference, "ppo": load_policy()}.items():
            move(model, evaluator.reference.device)
            texts[side] = evaluator_at_temperature.sample(
                model, prompts, keys=keys, seed=comparison.seed, desc=f"{side}, {column}"
            ).texts
    pair_judge = next((candidate for candidate in evaluator.panel.pair_judges if candidate.name == judge.name), None)

    def win_rate_over_references(side: str) -> WinRate:
        if pair_judge is None:
            scores, reference_scores = (
                score_completions(judge, prompts, answers, columns) for answers in (texts[side], reference_texts)
            )
            return win_rate(scores, reference_scores, groups, tolerance=TIE_TOLERANCE)
        prompt_texts = [plain_text(prompt) for prompt in prompts]
        # A judge may cost money, so one process asks it and passes the result to the others.
        return distributed.call_on_main_process(
            lambda: (
                compare_pairs(
                    pair_judge, prompt_texts, texts[side], reference_texts, seed=comparison.seed, groups=groups
                ).win_rate
            )
        )

    rates = {side: win_rate_over_references(side).to_json() for side in ("sft", "ppo")}
    return {"column": column, "temperature": temperature, **rates}


def _remove_special_tokens(text: str, special_tokens: list[str]) -> str:
    for token in special_tokens:
        text = text.replace(token, "")
    return text
