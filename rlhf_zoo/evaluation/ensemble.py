"""How much reward models disagree if they differ only in the random seed of their training.

On texts that differ from its training pairs, a reward model extrapolates, and models with different seeds extrapolate
differently. So their disagreement on a policy's completions shows how far the policy has moved from the training pairs
(Coste et al. 2023, arXiv:2310.02743). Arrays of scores are (M, N): M models, N texts.
"""

import math
from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .stats import Estimate, bootstrap_mean, group_indices, proportion, split_into_parts


def standardize(scores: ArrayLike, reference: ArrayLike) -> NDArray[np.float64]:
    """Standardizes each model's scores by its own mean and standard deviation over reference texts.

    Args:
        scores: (M, N) scores to standardize.
        reference: (M, K) scores of the reference texts.

    Returns:
        (M, N) scores in standard deviations of the reference texts.
    """
    array, reference = np.asarray(scores, dtype=float), np.asarray(reference, dtype=float)
    return (array - reference.mean(axis=1, keepdims=True)) / reference.std(axis=1, keepdims=True)


def disagreement(scores: ArrayLike) -> NDArray[np.float64]:
    """Computes each text's sample standard deviation over models.

    It is 0 if all models agree. Over the reference texts themselves, its mean square is 1 minus the mean correlation
    between two models.

    Args:
        scores: (M, N) standardized scores, M ≥ 2.

    Returns:
        (N,) disagreement on each text. The denominator of the variance is M − 1.
    """
    # With M as the denominator, a small number of models would seem to agree more.
    return np.asarray(scores, dtype=float).std(axis=0, ddof=1)


def unrelated_disagreement(model_count: int) -> float:
    """Computes the mean disagreement of M models with independent standard normal scores.

    Args:
        model_count: M ≥ 2.

    Returns:
        c4(M) = √(2/(M−1)) Γ(M/2) / Γ((M−1)/2).
    """
    # Log-gamma, since Γ itself overflows for large M.
    return math.sqrt(2 / (model_count - 1)) * math.exp(
        math.lgamma(model_count / 2) - math.lgamma((model_count - 1) / 2)
    )


def pairwise_agreement(margins: ArrayLike) -> dict[tuple[int, int], Estimate]:
    """Computes how often every two models prefer the same side of a pair.

    Args:
        margins: (M, N) margins of M models on N pairs.

    Returns:
        (a, b), the indices of two models -> the share of pairs on which their margins have the same sign, with Wilson's
        interval. A tie agrees only with a tie.
    """
    signs = np.sign(np.asarray(margins, dtype=float))
    return {
        (a, b): proportion(int((signs[a] == signs[b]).sum()), signs.shape[1])
        for a, b in combinations(range(len(signs)), 2)
    }


def average_by_kl(
    values: ArrayLike, kl: ArrayLike, groups: Sequence[Hashable], *, seed: int, max_parts: int = 5
) -> list[dict[str, Any]]:
    """Sorts texts by KL into parts of about equal size, and averages values in each part. Equal KLs share a part.

    Args:
        values: (N,) values to average.
        kl: (N,) KL of each text, nats.
        groups: (N,) the prompt of each text, which the intervals resample.
        seed: Seed of the resamples.
        max_parts: Maximum number of parts.

    Returns:
        For each part, by increasing KL: low, high and kl (its mean), nats; value, ci95 and n.
    """
    array, nats, group_ids = np.asarray(values, dtype=float), np.asarray(kl, dtype=float), group_indices(groups)
    return [
        {
            "low": float(nats[rows].min()),
            "high": float(nats[rows].max()),
            "kl": float(nats[rows].mean()),
            **bootstrap_mean(array[rows], group_ids[rows].tolist(), seed=seed).to_json(),
        }
        for rows in split_into_parts(nats, max_parts)
    ]
