"""Trivial policies beside SFT and PPO: chosen on validation prompts by text and reward alone, measured on test prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset

from ..evaluation.llm_judge import LLMJudge
from ..evaluation.stats import bootstrap_mean, win_rate
from ..evaluation.trivial import Chosen, Measured, Trivial, candidates, choose, dealt, with_ending
from .head_to_head import TIE, HeadToHead
from .judges import scores
from .measure import Evaluator, repeated
from .measure import Measured as Completions
from .written import rewarded

__all__ = ["chosen", "measured"]


def chosen(
    tools: Evaluator,
    prompts: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
    sft: Completions,
    ppo: Completions,
    *,
    samples: int,
) -> list[Chosen]:
    """From what SFT and PPO wrote to validation prompts, `samples` to each in turn; no judge is asked."""
    each = slice(None, None, samples)
    asked, others = prompts[each], {name: values[each] for name, values in columns.items()}
    favorite = None
    if sft.reward and ppo.reward:
        liked = candidates([*sft.completions, *ppo.completions], [*sft.reward, *ppo.reward])
        means = [np.mean(rewarded(tools, asked, [text] * len(asked), others)) for text in liked]
        favorite = liked[int(np.argmax(means))]
    return choose(sft.completions, ppo.completions, favorite=favorite)


def measured(found: HeadToHead, policies: Sequence[Chosen], rows: Dataset) -> Trivial:
    """By the headline's judge, on the prompts and samples of `found`. rows: those that were asked there.

    A language model is paid for each text, and asked for the constants alone.
    """
    _, prompts, columns = repeated(rows, found.samples)
    paid_for = isinstance(found.tools.judge, LLMJudge)
    kept = [one for one in policies if one.kind == "constant" or not paid_for]
    return Trivial([_measured(found, one, prompts, columns) for one in kept])


def _measured(
    found: HeadToHead, one: Chosen, prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]]
) -> Measured:
    sft, ppo = (found.measured[side].completions for side in ("sft", "ppo"))
    every = 1
    if one.kind == "constant":  # every sample of a prompt is the same text: it is scored once
        every, texts = found.samples, [one.text] * len(prompts)
    elif one.kind == "ending":
        texts = [with_ending(text, one.text) for text in sft]
    else:
        texts = dealt(ppo, found.samples)
    asked, written = prompts[::every], texts[::every]
    others = {name: values[::every] for name, values in columns.items()}
    judged = np.repeat(scores(found.tools.judge, asked, written, others), every)
    reward = np.repeat(rewarded(found.tools, asked, written, others), every)
    groups, seed = found.groups, found.seed
    return Measured(
        one,
        judge=bootstrap_mean(judged, groups, seed=seed),
        win_rate=win_rate(judged, found.measured["sft"].judges[found.judge], groups, seed=seed, tolerance=TIE),
        reward=bootstrap_mean(reward, groups, seed=seed) if len(reward) else None,
    )
