"""How well a reward model does on the pairs that are hardest to order, and on ties.

Accuracy over all pairs is mostly accuracy on easy pairs. A pair is hard if its completions share most of their words
(as in Chat Hard of RewardBench, Lambert et al. 2024, arXiv:2403.13787), or if one is hardly better than the other: by
the utility that the labels were drawn from, or by a column `margin` of the data.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..modeling.words import words
from .stats import bootstrap_mean, equal_parts, share
from .text import normalized

PARTS = 4  # quarters
SAME_LENGTH = 0.1  # largest relative difference of two lengths that count as the same
_ZERO_STRENGTH = 1e-9


def overlap(a: str, b: str) -> float:
    """Computes the share of words that two texts have in common, counting repeats (Jaccard index of multisets).

    Args:
        a: A text.
        b: Another text.

    Returns:
        Σ_w min(n_w, m_w) / Σ_w max(n_w, m_w), from 0 to 1; 1 for two empty texts.
    """
    ours, theirs = Counter(words(a)), Counter(words(b))
    # Counters intersect with the minimum and unite with the maximum of each count.
    both, either = (ours & theirs).total(), (ours | theirs).total()
    return both / either if either else 1.0


def are_ties(chosen: Sequence[str], rejected: Sequence[str], strength: ArrayLike | None) -> NDArray[np.bool_]:
    """Finds the pairs that are ties.

    Args:
        chosen: (N,) chosen completions.
        rejected: (N,) rejected completions.
        strength: (N,) how much better the chosen side is; None if the data do not say.

    Returns:
        (N,) True if the strength is 0, or the texts are equal up to case and spacing.
    """
    alike = np.array([normalized(a) == normalized(b) for a, b in zip(chosen, rejected, strict=True)], dtype=bool)
    return alike if strength is None else alike | (np.abs(np.asarray(strength, dtype=float)) < _ZERO_STRENGTH)


def ties(
    margins: ArrayLike, tied: ArrayLike, same: ArrayLike, prompts: Sequence[Hashable], *, seed: int
) -> dict[str, Any] | None:
    """Compares the mean distance between the two scores of a tie with that of pairs that are not ties.

    RewardBench 2 expects equally good completions to score closer together than right and wrong ones.

    Args:
        margins: (N,) score(chosen) − score(rejected).
        tied: (N,) True for ties.
        same: (N,) True for pairs with identical texts, which are left out: every model scores them equally.
        prompts: (N,) the prompt of each pair.
        seed: Seed of the resamples.

    Returns:
        The figures as JSON; None if there are no ties.
    """
    apart, equal = np.abs(np.asarray(margins, dtype=float)), np.asarray(tied, dtype=bool)
    tied_rows, untied_rows = np.flatnonzero(equal & ~np.asarray(same, dtype=bool)), np.flatnonzero(~equal)
    if not len(tied_rows):
        return None
    means = [
        bootstrap_mean(apart[rows], [prompts[row] for row in rows.tolist()], seed=seed) if len(rows) else None
        for rows in (tied_rows, untied_rows)
    ]
    tie, other = means
    assert tie is not None
    return {
        "n": len(tied_rows),
        "apart": tie.to_json(),
        "others": other.to_json() if other else None,
        "ratio": tie.value / other.value if other and other.value > 0 else None,
    }


def hard_pairs(
    margins: ArrayLike,
    chosen: Sequence[str],
    rejected: Sequence[str],
    lengths: tuple[ArrayLike, ArrayLike],
    prompts: Sequence[Hashable],
    *,
    strength: ArrayLike | None = None,
    gold: ArrayLike | None = None,
) -> dict[str, Any]:
    """Computes accuracy by quarters of N pairs, hardest first, and by which side is longer. Ties count one half.

    Args:
        margins: (N,) score(chosen) − score(rejected).
        chosen: (N,) chosen completions.
        rejected: (N,) rejected completions.
        lengths: (N,) tokens of the chosen and of the rejected sides.
        prompts: (N,) the prompt of each pair, by which the intervals resample.
        strength: (N,) how much better the chosen side is, by the data; None if the data do not say.
        gold: (N,) margins of the utility behind the labels. Its accuracy is reported beside the model's, because no
            model can do better on average.

    Returns:
        The figures as JSON.
    """
    # Sign −1, 0, 1 becomes 0, ½, 1.
    right = (np.sign(np.asarray(margins, dtype=float)) + 1) / 2
    gold_right = None if gold is None else (np.sign(np.asarray(gold, dtype=float)) + 1) / 2
    ours, theirs = (np.asarray(side, dtype=float) for side in lengths)
    overlaps = np.array([overlap(a, b) for a, b in zip(chosen, rejected, strict=True)])
    # Relative to the longer side, because ten tokens matter in a short text but not in a long one.
    same_length = np.abs(ours - theirs) <= SAME_LENGTH * np.maximum(ours, theirs)

    def accuracy(rows: NDArray[np.intp]) -> dict[str, Any] | None:
        if not len(rows):
            return None
        best_possible = None if gold_right is None else float(gold_right[rows].mean())
        return {**share(right[rows], [prompts[row] for row in rows.tolist()]).to_json(), "gold": best_possible}

    def quarters(values: NDArray[np.float64], *, highest_first: bool) -> list[dict[str, Any]]:
        return [
            {"low": float(values[rows].min()), "high": float(values[rows].max()), **(accuracy(rows) or {})}
            for rows in equal_parts(-values if highest_first else values, PARTS)
        ]

    # The sign shows which side is better; only the size makes a pair hard.
    apart = None if strength is None else np.abs(np.asarray(strength, dtype=float))
    return {
        "by_overlap": quarters(overlaps, highest_first=True),
        "by_strength": None if apart is None else quarters(apart, highest_first=False),
        "same_length": accuracy(np.flatnonzero(same_length)),
        "chosen_longer": accuracy(np.flatnonzero(~same_length & (ours > theirs))),
        "chosen_shorter": accuracy(np.flatnonzero(~same_length & (ours < theirs))),
    }
