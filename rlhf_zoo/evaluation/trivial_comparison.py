"""Trivial policies beside SFT and PPO: chosen on validation prompts by text and reward, scored on test prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset

from .head_to_head import TIE, HeadToHead
from .judges.llm import LLMJudge
from .judges.named import scores
from .measure import Evaluator, Measured, repeated
from .stats import bootstrap_mean, win_rate
from .text_logprobs import rewarded
from .trivial_policies import TrivialPolicy, TrivialScore, TrivialScores, candidates, choose, dealt, with_ending


def choose_trivial(
    tools: Evaluator,
    prompts: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
    sft: Measured,
    ppo: Measured,
    *,
    samples: int,
) -> list[TrivialPolicy]:
    """From what SFT and PPO wrote to validation prompts, `samples` to each in turn; no judge is asked."""
    each = slice(None, None, samples)
    asked, others = prompts[each], {name: values[each] for name, values in columns.items()}
    favorite = None
    if sft.reward and ppo.reward:
        liked = candidates([*sft.completions, *ppo.completions], [*sft.reward, *ppo.reward])
        means = [np.mean(rewarded(tools, asked, [text] * len(asked), others)) for text in liked]
        favorite = liked[int(np.argmax(means))]
    return choose(sft.completions, ppo.completions, favorite=favorite)


def score_trivial(found: HeadToHead, policies: Sequence[TrivialPolicy], rows: Dataset) -> TrivialScores:
    """By the headline's judge, on the prompts and samples of `found`. rows: those that were asked there.

    A language model is paid for each text, and asked for the constants alone.
    """
    _, prompts, columns = repeated(rows, found.samples)
    paid_for = isinstance(found.tools.judge, LLMJudge)
    asked = [one for one in policies if one.kind == "constant" or not paid_for]
    return TrivialScores([_score(found, one, prompts, columns) for one in asked])


def _score(
    found: HeadToHead, policy: TrivialPolicy, prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]]
) -> TrivialScore:
    sft, ppo = (found.measured[side].completions for side in ("sft", "ppo"))
    every = 1
    if policy.kind == "constant":  # every sample of a prompt is the same text: it is scored once
        every, texts = found.samples, [policy.text] * len(prompts)
    elif policy.kind == "ending":
        texts = [with_ending(text, policy.text) for text in sft]
    else:
        texts = dealt(ppo, found.samples)
    asked, written = prompts[::every], texts[::every]
    others = {name: values[::every] for name, values in columns.items()}
    judged = np.repeat(scores(found.tools.judge, asked, written, others), every)
    reward = np.repeat(rewarded(found.tools, asked, written, others), every)
    groups, seed = found.groups, found.seed
    return TrivialScore(
        policy,
        judge=bootstrap_mean(judged, groups, seed=seed),
        win_rate=win_rate(judged, found.measured["sft"].judges[found.judge], groups, tolerance=TIE),
        reward=bootstrap_mean(reward, groups, seed=seed) if len(reward) else None,
    )
