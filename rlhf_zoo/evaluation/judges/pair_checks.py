"""Checks judges on labeled pairs and on pairs of the policies' own outputs."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

import numpy as np
from datasets import Dataset

from ...modeling.chat import completion_text, plain_text
from ...rewards import RewardEnsemble, RewardModel
from ..prompt_groups import group_other_prompts
from .check import JudgeCheck, PairCheck, check_pairs, majority_preferences
from .llm import LLMJudge
from .panel import Panel, RewardJudge, score_completions, sort_free_first
from .rule import RuleJudge
from .scalar import ClassifierJudge, Judge

MAX_PAIRS = 500  # pairs on which a judge is checked
MAX_LLM_PAIRS = 50  # the same for a language model, which costs money for each pair


def check_panel(
    panel: Panel, labeled_pairs: Dataset | None, *, own_pairs: Dataset | None = None, seed: int,
    reward: RewardModel | RewardEnsemble | None = None, same_label_judges: Collection[str] = (),
    group: str | None = None,
) -> dict[str, JudgeCheck]:  # fmt: skip
    """Checks each judge of single completions on labeled pairs, of which it reads at most the first `MAX_PAIRS`.

    Args:
        panel: The judges to check.
        labeled_pairs: Pairs: prompt, chosen, rejected, and other columns that rules read; None without pairs.
        own_pairs: Labeled pairs of the policies' own outputs, with the same columns; None without such pairs.
        seed: Seed of the resamples.
        reward: The training reward's model or ensemble, whose errors are compared with the judges'; None without one.
        same_label_judges: Names of the judges that were trained on the same labels as the training reward.
        group: `by` of `group_other_prompts`: which prompts ask the same question; None if only equal prompts do.

    Returns:
        The checks, by the judges' names.
    """
    reward_judge = None if reward is None else RewardJudge("reward", reward)

    def check_judge(judge: Judge, pairs: Dataset | None) -> PairCheck | None:
        if isinstance(judge, RuleJudge) and pairs is not None:
            pairs = judge.select_answered(pairs)
        return None if pairs is None else _check_on_pairs(judge, pairs, reward_judge, seed, group)

    return {
        judge.name: JudgeCheck(
            check_judge(judge, labeled_pairs), check_judge(judge, own_pairs), judge.name in same_label_judges
        )
        for judge in sort_free_first(panel.scoring_judges)
    }


def _check_on_pairs(
    judge: Judge, pairs: Dataset, reward_judge: Judge | None, seed: int, group: str | None
) -> PairCheck:
    limit = MAX_LLM_PAIRS if isinstance(judge, LLMJudge) else MAX_PAIRS
    columns = pairs.select(range(min(limit, len(pairs)))).to_dict()
    prompts = columns.pop("prompt")
    sides = [
        [completion_text(text, prompt) for prompt, text in zip(prompts, columns.pop(side), strict=True)]
        for side in ("chosen", "rejected")
    ]
    chosen, rejected = (score_completions(judge, prompts, texts, columns) for texts in sides)
    reward_margins = None
    if reward_judge is not None:
        chosen_rewards, rejected_rewards = (score_completions(reward_judge, prompts, texts, columns) for texts in sides)
        reward_margins = np.subtract(chosen_rewards, rejected_rewards)
    return check_pairs(
        chosen,
        rejected,
        group_other_prompts(prompts, group),
        are_probabilities=isinstance(judge, ClassifierJudge),
        seed=seed,
        reward_margins=reward_margins,
    )


def relabel_by_majority(
    pairs: Dataset, prefer: Callable[[str, str, random.Random], int], *, seed: int
) -> Dataset | None:
    """Relabels each pair by the majority of several draws of a noisy preference. Drops pairs without a clear majority.

    Args:
        pairs: Rows with prompt, chosen and rejected.
        prefer: Draws the preferred side of two texts (prompts included), 0 or 1.
        seed: Seed of the draws.

    Returns:
        The remaining pairs; None if none remain.
    """
    rows = pairs.to_list()
    sides = [
        [plain_text(row["prompt"]) + completion_text(row[side], row["prompt"]) for row in rows]
        for side in ("chosen", "rejected")
    ]
    preferences = majority_preferences(list(zip(*sides, strict=True)), prefer, seed=seed)
    relabeled_rows = []
    for row, preferred_side in zip(rows, preferences, strict=True):
        if preferred_side is not None:
            # Side 1 is the rejected side. If most draws prefer it, they contradict the label, so the sides are swapped.
            swapped_sides = {"chosen": row["rejected"], "rejected": row["chosen"]} if preferred_side == 1 else {}
            relabeled_rows.append({**row, **swapped_sides})
    return Dataset.from_list(relabeled_rows) if relabeled_rows else None
