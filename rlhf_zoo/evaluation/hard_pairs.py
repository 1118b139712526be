"""How well a reward model does on the pairs that are hardest to order, and on ties.

Accuracy over all pairs is mostly accuracy on easy pairs. A pair is hard if its completions share most of their words
(as in Chat Hard of RewardBench, Lambert et al. 2024, arXiv:2403.13787), or if one is hardly better than the other. How
much better is known if the labels were drawn from a utility, or if the data have a column `margin`.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..modeling.words import words
from .stats import Estimate, bootstrap_mean, mean_share, split_into_parts
from .text import normalize_text

QUARTERS = 4
SAME_LENGTH = 0.1  # two lengths count as the same if they differ by at most this share of the longer one
_ZERO_STRENGTH = 1e-9  # strengths below this count as 0


def word_overlap(a: str, b: str) -> float:
    """Computes the word overlap of two texts: the Jaccard index of their multisets of words and punctuation marks.

    Args:
        a: A text.
        b: Another text.

    Returns:
        Σ_w min(n_w, m_w) / Σ_w max(n_w, m_w), from 0 to 1; 1 for two empty texts.
    """
    a_counts, b_counts = Counter(words(a)), Counter(words(b))
    # & takes the minimum of each count, | the maximum.
    shared_count, total_count = (a_counts & b_counts).total(), (a_counts | b_counts).total()
    return shared_count / total_count if total_count else 1.0


def are_ties(chosen: Sequence[str], rejected: Sequence[str], strength: ArrayLike | None) -> NDArray[np.bool_]:
    """Finds the pairs that are ties.

    Args:
        chosen: (N,) chosen completions.
        rejected: (N,) rejected completions.
        strength: (N,) how much better the chosen side is; None if the data do not say.

    Returns:
        (N,) True if the strength is 0, or the texts are equal up to case and spacing.
    """
    has_equal_texts = np.array(
        [normalize_text(a) == normalize_text(b) for a, b in zip(chosen, rejected, strict=True)], dtype=bool
    )
    if strength is None:
        return has_equal_texts
    return has_equal_texts | (np.abs(np.asarray(strength, dtype=float)) < _ZERO_STRENGTH)


def compare_ties(
    margins: ArrayLike, is_tie: ArrayLike, has_equal_texts: ArrayLike, prompts: Sequence[Hashable], *, seed: int
) -> dict[str, Any] | None:
    """Compares ties with other pairs by the mean distance between the two scores of a pair.

    RewardBench 2 expects equally good completions to score closer together than right and wrong ones.

    Args:
        margins: (N,) score(chosen) − score(rejected).
        is_tie: (N,) True for ties.
        has_equal_texts: (N,) True for pairs with identical texts, which are left out: every model scores them equally.
        prompts: (N,) the prompt of each pair.
        seed: Seed of the resamples.

    Returns:
        The figures as JSON; None if there are no ties between different texts.
    """
    distances, ties = np.abs(np.asarray(margins, dtype=float)), np.asarray(is_tie, dtype=bool)
    tie_rows, other_rows = np.flatnonzero(ties & ~np.asarray(has_equal_texts, dtype=bool)), np.flatnonzero(~ties)
    if not len(tie_rows):
        return None

    def mean_distance(rows: NDArray[np.intp]) -> Estimate:
        return bootstrap_mean(distances[rows], [prompts[row] for row in rows.tolist()], seed=seed)

    distance = mean_distance(tie_rows)
    other_distance = mean_distance(other_rows) if len(other_rows) else None
    return {
        "n": len(tie_rows),
        "apart": distance.to_json(),
        "others": other_distance.to_json() if other_distance else None,
        "ratio": distance.value / other_distance.value if other_distance and other_distance.value > 0 else None,
    }


def measure_hard_pairs(
    margins: ArrayLike,
    chosen: Sequence[str],
    rejected: Sequence[str],
    lengths: tuple[ArrayLike, ArrayLike],
    prompts: Sequence[Hashable],
    *,
    strength: ArrayLike | None = None,
    gold: ArrayLike | None = None,
) -> dict[str, Any]:
    """Computes accuracy on each quarter of N pairs, hardest first, and by which side is longer. Ties count one half.

    Args:
        margins: (N,) score(chosen) − score(rejected).
        chosen: (N,) chosen completions.
        rejected: (N,) rejected completions.
        lengths: (N,) tokens of the chosen and of the rejected sides.
        prompts: (N,) the prompt of each pair, for the intervals of `stats.mean_share`.
        strength: (N,) how much better the chosen side is, by the data; None if the data do not say.
        gold: (N,) margins by the utility that the labels were drawn from, if it is known. Its accuracy is reported
            beside the model's, because no model can do better on average.

    Returns:
        The figures as JSON.
    """
    # The signs −1, 0, 1 become 0, ½, 1.
    credits = (np.sign(np.asarray(margins, dtype=float)) + 1) / 2
    gold_credits = None if gold is None else (np.sign(np.asarray(gold, dtype=float)) + 1) / 2
    chosen_lengths, rejected_lengths = (np.asarray(side, dtype=float) for side in lengths)
    overlaps = np.array([word_overlap(a, b) for a, b in zip(chosen, rejected, strict=True)])
    # Relative to the longer side, because ten tokens matter in a short text but not in a long one.
    longer_lengths = np.maximum(chosen_lengths, rejected_lengths)
    same_length = np.abs(chosen_lengths - rejected_lengths) <= SAME_LENGTH * longer_lengths

    def accuracy(rows: NDArray[np.intp]) -> dict[str, Any] | None:
        if not len(rows):
            return None
        best_possible = None if gold_credits is None else float(gold_credits[rows].mean())
        return {**mean_share(credits[rows], [prompts[row] for row in rows.tolist()]).to_json(), "gold": best_possible}

    def quarters(values: NDArray[np.float64], *, highest_first: bool) -> list[dict[str, Any]]:
        return [
            {"low": float(values[rows].min()), "high": float(values[rows].max()), **(accuracy(rows) or {})}
            for rows in split_into_parts(-values if highest_first else values, QUARTERS)
        ]

    # The sign shows which side is better; only the absolute value says how hard the pair is.
    abs_strength = None if strength is None else np.abs(np.asarray(strength, dtype=float))
    return {
        "by_overlap": quarters(overlaps, highest_first=True),
        "by_strength": None if abs_strength is None else quarters(abs_strength, highest_first=False),
        "same_length": accuracy(np.flatnonzero(same_length)),
        "chosen_longer": accuracy(np.flatnonzero(~same_length & (chosen_lengths > rejected_lengths))),
        "chosen_shorter": accuracy(np.flatnonzero(~same_length & (chosen_lengths < rejected_lengths))),
    }
