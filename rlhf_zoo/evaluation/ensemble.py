"""Where reward models that differ by their training's random numbers alone disagree.

A reward model knows its pairs and guesses beyond them, and models of other seeds guess otherwise. So their disagreement
on a policy's completions tells how far it has left what they know: Coste et al. 2023 (arXiv:2310.02743). Arrays of
scores are (M, N): M models, N texts.
"""

import math
from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .stats import Estimate, bootstrap_mean, equal_parts, group_indices, proportion


def standardised(scores: ArrayLike, over: ArrayLike) -> NDArray[np.float64]:
    """Scores (M, N) less the mean of each model's scores `over` (M, K), in units of their standard deviation."""
    known = np.asarray(over, dtype=float)
    return (np.asarray(scores, dtype=float) - known.mean(axis=1, keepdims=True)) / known.std(axis=1, keepdims=True)


def disagreement(scores: ArrayLike) -> NDArray[np.float64]:
    """Standard deviation (N,) over models of scores (M, N) that are `standardised`, with M − 1 below the sum.

    It is 0 where all say the same. Over the very texts of the standardisation its mean square is 1 less the mean
    correlation of two models. M is at least 2.
    """
    return np.asarray(scores, dtype=float).std(axis=0, ddof=1)


def unrelated(models: int) -> float:
    """Mean disagreement of M models with independent standard normal scores, c4(M) = √(2/(M−1)) Γ(M/2) / Γ((M−1)/2)."""
    return math.sqrt(2 / (models - 1)) * math.exp(math.lgamma(models / 2) - math.lgamma((models - 1) / 2))


def agreements(margins: ArrayLike) -> dict[tuple[int, int], Estimate]:
    """Of each two models the share of pairs whose margins, (M, N), have the same sign, with Wilson's interval."""
    signs = np.sign(np.asarray(margins, dtype=float))
    return {
        (a, b): proportion(int((signs[a] == signs[b]).sum()), signs.shape[1])
        for a, b in combinations(range(len(signs)), 2)
    }


def by_kl(
    values: ArrayLike, kl: ArrayLike, groups: Sequence[Hashable], *, seed: int, parts: int = 5
) -> list[dict[str, Any]]:
    """Means of `values` (N,) in up to `parts` parts of about equally many texts, by their `kl` (N,); equal ones share.

    groups: (N,) prompts, which the intervals resample. Each part: low, high and mean kl (nats), value, ci95, n.
    """
    sample, nats, prompts = np.asarray(values, dtype=float), np.asarray(kl, dtype=float), group_indices(groups)
    return [
        {
            "low": float(nats[here].min()),
            "high": float(nats[here].max()),
            "kl": float(nats[here].mean()),
            **bootstrap_mean(sample[here], prompts[here].tolist(), seed=seed).to_json(),
        }
        for here in equal_parts(nats, parts)
    ]
