"""What a reward model makes of the pairs that are hardest to order, and of those that are ties.

Accuracy over all pairs is mostly that of the easy ones. A pair is hard where its completions share most of their words
(as those of Chat Hard in RewardBench, Lambert et al. 2024, arXiv:2403.13787), or where one is hardly better than the
other: by the utility that the labels were drawn from, or by the data's own column `margin`.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..modeling.words import words
from .stats import bootstrap_mean, equal_parts, share
from .text import plain

#: Quarters of the pairs, and lengths that count as one: a tenth of the longer apart.
PARTS, ONE_LENGTH = 4, 0.1
_SAME = 1e-9


def overlap(a: str, b: str) -> float:
    """The share of their words that two texts share, each as often as both have it, from 0 to 1; 1 of two empty ones.

    Σ_w min(n_w, m_w) / Σ_w max(n_w, m_w): Jaccard's index of multisets.
    """
    ours, theirs = Counter(words(a)), Counter(words(b))
    both, either = (ours & theirs).total(), (ours | theirs).total()
    return both / either if either else 1.0


def are_ties(chosen: Sequence[str], rejected: Sequence[str], strength: ArrayLike | None) -> NDArray[np.bool_]:
    """(N,) whether neither side of a pair is better: of no strength (N,), or texts equal up to case and spaces."""
    alike = np.array([plain(a) == plain(b) for a, b in zip(chosen, rejected, strict=True)], dtype=bool)
    return alike if strength is None else alike | (np.abs(np.asarray(strength, dtype=float)) < _SAME)


def ties(
    margins: ArrayLike, tied: ArrayLike, same: ArrayLike, prompts: Sequence[Hashable], *, seed: int
) -> dict[str, Any] | None:
    """How far apart the two scores of a tie are, beside those of pairs that are none; None where there are no ties.

    RewardBench 2 wants what is equally good to be closer together than right and wrong are. margins: (N,); tied, same:
    (N,) bool: ties, and pairs whose texts are equal to the letter, of which no model could say anything else.
    """
    apart, equal = np.abs(np.asarray(margins, dtype=float)), np.asarray(tied, dtype=bool)
    these, others = np.flatnonzero(equal & ~np.asarray(same, dtype=bool)), np.flatnonzero(~equal)
    if not len(these):
        return None
    means = [
        bootstrap_mean(apart[here], [prompts[place] for place in here.tolist()], seed=seed) if len(here) else None
        for here in (these, others)
    ]
    tie, other = means
    assert tie is not None
    return {
        "n": len(these),
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
    """Accuracy by quarters of N pairs, the hardest first, and by which side is longer; ties one half, as JSON.

    margins: (N,) score of the chosen side less that of the rejected; lengths: (N,) tokens of each side; strength: (N,)
    how much better the chosen side is, by the data; gold: (N,) the utility's own margins, whose accuracy stands beside
    the model's, as no model can do better on average. Intervals are by prompts.
    """
    right = (np.sign(np.asarray(margins, dtype=float)) + 1) / 2
    ceiling = None if gold is None else (np.sign(np.asarray(gold, dtype=float)) + 1) / 2
    ours, theirs = (np.asarray(side, dtype=float) for side in lengths)
    alike = np.array([overlap(a, b) for a, b in zip(chosen, rejected, strict=True)])
    matched = np.abs(ours - theirs) <= ONE_LENGTH * np.maximum(ours, theirs)

    def accuracy(here: NDArray[np.intp]) -> dict[str, Any] | None:
        if not len(here):
            return None
        known = None if ceiling is None else float(ceiling[here].mean())
        return {**share(right[here], [prompts[place] for place in here.tolist()]).to_json(), "gold": known}

    def quarters(values: NDArray[np.float64], *, highest_first: bool) -> list[dict[str, Any]]:
        return [
            {"low": float(values[here].min()), "high": float(values[here].max()), **(accuracy(here) or {})}
            for here in equal_parts(-values if highest_first else values, PARTS)
        ]

    apart = None if strength is None else np.abs(np.asarray(strength, dtype=float))
    return {
        "by_overlap": quarters(alike, highest_first=True),
        "by_strength": None if apart is None else quarters(apart, highest_first=False),
        "same_length": accuracy(np.flatnonzero(matched)),
        "chosen_longer": accuracy(np.flatnonzero(~matched & (ours > theirs))),
        "chosen_shorter": accuracy(np.flatnonzero(~matched & (ours < theirs))),
    }
