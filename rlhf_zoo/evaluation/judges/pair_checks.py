"""Checks judges on labeled pairs and on pairs of the policies' own outputs."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

import numpy as np
from datasets import Dataset

from ...modeling.chat import completion_text, plain_text
from ...modeling.prompt_keys import prompt_key
from ...rewards import RewardEnsemble, RewardModel
from .check import JudgeCheck, PairCheck, check_pairs, settled
from .llm import LLMJudge
from .panel import Panel, RewardJudge, cheapest_first, scores
from .rule import RuleJudge
from .scalar import ClassifierJudge, Judge

#: Maximum number of labeled pairs that a judge is checked on; with a language model each one costs money.
CHECKED, CHECKED_BY_LLM = 500, 50


def checked(
    panel: Panel, labeled: Dataset | None, *, own: Dataset | None = None, seed: int,
    reward: RewardModel | RewardEnsemble | None = None, same_labels: Collection[str] = (),
) -> dict[str, JudgeCheck]:  # fmt: skip
    """Checks each scoring judge on pairs with known order.

    Args:
        panel: The judges.
        labeled: Pairs with the columns prompt, chosen and rejected, and others for rules; None if there are none.
        own: Pairs of the policies' own outputs, likewise.
        seed: Seed of the resamples.
        reward: The training reward's model or ensemble, whose errors are compared with the judges'.
        same_labels: Names of the judges that were trained on the labels of that model.

    Returns:
        The checks, by the judges' names.
    """
    reward_judge = None if reward is None else RewardJudge("reward", reward)

    def check_judge(judge: Judge, pairs: Dataset | None) -> PairCheck | None:
        if isinstance(judge, RuleJudge) and pairs is not None:
            pairs = judge.with_answers(pairs)
        return None if pairs is None else _on_pairs(judge, pairs, reward_judge, seed)

    return {
        judge.name: JudgeCheck(check_judge(judge, labeled), check_judge(judge, own), judge.name in same_labels)
        for judge in cheapest_first(panel.scoring)
    }


def _on_pairs(judge: Judge, pairs: Dataset, reward_judge: Judge | None, seed: int) -> PairCheck:
    most = CHECKED_BY_LLM if isinstance(judge, LLMJudge) else CHECKED
    columns = pairs.select(range(min(most, len(pairs)))).to_dict()
    prompts = columns.pop("prompt")
    sides = [
        [completion_text(text, prompt) for prompt, text in zip(prompts, columns.pop(side), strict=True)]
        for side in ("chosen", "rejected")
    ]
    good, bad = (scores(judge, prompts, side, columns) for side in sides)
    margins = None
    if reward_judge is not None:
        above, below = (scores(reward_judge, prompts, side, columns) for side in sides)
        margins = np.subtract(above, below)
    return check_pairs(
        good,
        bad,
        [prompt_key(prompt) for prompt in prompts],
        probabilities=isinstance(judge, ClassifierJudge),
        seed=seed,
        reward_margins=margins,
    )


def settled_pairs(pairs: Dataset, prefer: Callable[[str, str, random.Random], int], *, seed: int) -> Dataset | None:
    """Orders pairs by the expectation of a noisy preference, and drops those near a toss-up.

    Args:
        pairs: Rows with prompt, chosen and rejected.
        prefer: Draws the preferred side of two whole texts, 0 or 1.
        seed: Seed of the draws.

    Returns:
        The pairs; None if none remains.
    """
    rows = pairs.to_list()
    sides = [
        [plain_text(row["prompt"]) + completion_text(row[side], row["prompt"]) for row in rows]
        for side in ("chosen", "rejected")
    ]
    kept = []
    for row, better in zip(rows, settled(list(zip(*sides, strict=True)), prefer, seed=seed), strict=True):
        if better is not None:
            # The preference contradicts the label, so the sides are swapped.
            turned = {"chosen": row["rejected"], "rejected": row["chosen"]} if better else {}
            kept.append({**row, **turned})
    return Dataset.from_list(kept) if kept else None
