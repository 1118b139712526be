"""The frontier of a method: mean reward and judge's score at each KL to the SFT policy and each amount of compute.

A point keeps a mean for each prompt rather than one overall mean. Two methods measured on the same prompts can then be
compared prompt by prompt, and intervals treat each prompt as a group, as in `stats`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .compute import Compute
from .stats import TIE_TOLERANCE, Estimate, bootstrap_mean, group_indices, mean_share

Floats = NDArray[np.float64]

#: Largest distance between two measured points, in √nats, at which `interpolate_at_kl` interpolates between them.
MAX_GAP = 0.5


@dataclass(frozen=True)
class Point:
    """The measurements of one policy, or their mean over policies trained with several seeds.

    Attributes:
        label: The name in tables.
        kl: (P,) mean KL to the SFT policy on each of P prompts, nats; equal prompts may recur.
        reward: (P,) mean reward.
        judge: (P,) mean score by the judge.
        n: Number of completions.
        wins: Opponent -> (P,) the share of comparisons won.
        kl_is_bound: Whether `kl` is only an upper bound.
        training: Compute spent once.
        serving: Compute per served completion.
        seed_points: The point of each seed, if this is a mean over seeds; else ().
        extra_metrics: Name -> (P,) values; empty for best-of-n, whose completions are not kept.
        prompts: (P,) a key for each prompt; intervals treat equal keys as one group. None if all differ.
    """

    label: str
    kl: Floats
    reward: Floats
    judge: Floats
    n: int
    wins: Mapping[str, Floats] = field(default_factory=dict)
    kl_is_bound: bool = False
    training: Compute = field(default_factory=Compute)
    serving: Compute = field(default_factory=Compute)
    seed_points: tuple[Point, ...] = ()
    extra_metrics: Mapping[str, Floats] = field(default_factory=dict)
    prompts: Sequence[Hashable] | None = None

    def estimate(self, values: Floats, *, seed: int) -> Estimate:
        """Averages over prompts, with an interval that resamples prompts.

        Args:
            values: (P,) a mean for each prompt.
            seed: Seed of the resamples.

        Returns:
            The mean; its `n` is the point's number of completions.
        """
        return replace(bootstrap_mean(values, self._groups(values), seed=seed), n=self.n)

    def rate(self, values: Floats, *, n: int | None = None) -> Estimate:
        """Averages shares over prompts, with the interval of `stats.mean_share`.

        Args:
            values: (P,) a share from 0 to 1 for each prompt.
            n: Number of observations behind the shares; None for the point's number of completions.
        """
        return replace(mean_share(values, self._groups(values)), n=self.n if n is None else n)

    def by_prompt(self, values: Floats) -> Floats:
        """Averages the rows of each distinct prompt.

        Args:
            values: (P,) a mean for each prompt.

        Returns:
            (G,) means of the G distinct prompts.
        """
        groups = group_indices(self._groups(values))
        return np.asarray(np.bincount(groups, weights=values) / np.bincount(groups), dtype=float)

    def _groups(self, values: Floats) -> Sequence[Hashable]:
        return range(len(values)) if self.prompts is None else self.prompts

    @property
    def mean_kl(self) -> float:
        """The mean KL to the SFT policy, nats."""
        return float(self.kl.mean())

    def flops(self, served: int) -> float:
        """Counts the FLOPs of training and of serving completions.

        Args:
            served: Number of completions to serve.
        """
        return self.training.flops + served * self.serving.flops


def average_by_prompt(values: ArrayLike, per_prompt: int) -> Floats:
    """Averages the values of each prompt.

    Args:
        values: (P · per_prompt,) values, those of one prompt adjacent.
        per_prompt: Number of values per prompt.

    Returns:
        (P,) means.
    """
    return np.asarray(values, dtype=float).reshape(-1, per_prompt).mean(1)


def win_shares(ours: ArrayLike, theirs: ArrayLike) -> Floats:
    """Computes how often each of our samples beats another method's samples of the same prompt.

    Averaged over a pool of samples, each weighted by the probability that best-of-n or a filter chooses it, this is the
    expected win rate of the chosen sample.

    Args:
        ours: (P, N) scores of our samples.
        theirs: (P, S) scores of the other method's samples.

    Returns:
        (P, N) the share of the other method's samples that each of our samples beats; a tie counts one half.
    """
    # (P, N, S): every sample of ours against every sample of theirs.
    gap = np.asarray(ours, dtype=float)[:, :, None] - np.asarray(theirs, dtype=float)[:, None, :]
    return np.asarray(np.where(np.abs(gap) <= TIE_TOLERANCE, 0.5, gap > 0).mean(2), dtype=float)


def average_points(points: Sequence[Point], weights: Sequence[float] | None = None, *, label: str) -> Point:
    """Averages points of a frontier.

    Args:
        points: Points measured on the same prompts.
        weights: A weight for each point; they sum to 1. None for the plain mean over seeds, which keeps `points` as
            `seed_points`.
        label: The label of the result.

    Returns:
        A point with the weighted means of KL, scores, wins and compute. `n` is the sum, and `kl_is_bound` holds if it
        does for any point. `extra_metrics` has the metrics that all points have.
    """
    shares = [1 / len(points)] * len(points) if weights is None else list(weights)

    def mean(arrays: Sequence[Floats]) -> Floats:
        return np.asarray(sum(share * array for share, array in zip(shares, arrays, strict=True)), dtype=float)

    # Compute is averaged too, so a mean over seeds has the compute of one run.
    training, serving = (
        sum((getattr(point, kind).times(share) for share, point in zip(shares, points, strict=True)), Compute())
        for kind in ("training", "serving")
    )
    return Point(
        label,
        kl=mean([point.kl for point in points]),
        reward=mean([point.reward for point in points]),
        judge=mean([point.judge for point in points]),
        n=sum(point.n for point in points),
        wins={name: mean([point.wins[name] for point in points]) for name in points[0].wins},
        kl_is_bound=any(point.kl_is_bound for point in points),
        training=training,
        serving=serving,
        seed_points=tuple(points) if weights is None else (),
        extra_metrics={
            name: mean([point.extra_metrics[name] for point in points])
            for name in points[0].extra_metrics
            if all(name in point.extra_metrics for point in points)
        },
        prompts=points[0].prompts,
    )


def interpolate_at_kl(points: Sequence[Point], kl: float) -> Point | None:
    """Interpolates a frontier at one KL, linearly in √KL between the two neighboring points.

    A policy's score is close to linear in √KL over short distances (Gao et al. 2022, arXiv:2210.10760) but not over
    long ones: a straight line from SFT to a distant point misses the curve between them. Nothing is extrapolated,
    because the score may fall outside the measured range (over-optimization).

    Args:
        points: The frontier, in any order.
        kl: The KL at which to interpolate, nats.

    Returns:
        The point at this KL; None outside the measured range, or if the two neighbors are more than `MAX_GAP` apart.
    """
    points = sorted(points, key=lambda point: point.mean_kl)
    root_kls = [math.sqrt(max(point.mean_kl, 0.0)) for point in points]
    target = math.sqrt(max(kl, 0.0))
    if not points or not root_kls[0] <= target <= root_kls[-1]:
        return None
    upper = next(index for index, root_kl in enumerate(root_kls) if root_kl >= target)
    # A measured point needs no interpolation, and the first point has no neighbor below it.
    if root_kls[upper] == target:
        return points[upper]
    gap = root_kls[upper] - root_kls[upper - 1]
    if gap > MAX_GAP:
        return None
    low, high = points[upper - 1], points[upper]
    fraction = (target - root_kls[upper - 1]) / gap
    return average_points([low, high], [1 - fraction, fraction], label=f"between {low.label} and {high.label}")


def lowest_kl_filter(reward: Floats, judge: Floats, target: float) -> dict[str, float] | None:
    """Finds the filter of SFT's samples with the lowest KL that reaches a mean reward: a baseline for policies.

    The filter keeps, for each prompt, the share of samples with the highest reward. Restricting a distribution to a
    part with probability `share` costs a KL of log(1 / share) nats.

    Args:
        reward: (P, N) rewards of a pool of N samples per prompt.
        judge: (P, N) the judge's scores of the same pool.
        target: The mean reward to reach.

    Returns:
        The largest share that reaches the target, with its KL, mean reward and judge's mean; None if no share does.
    """
    # Means over the best 1, 2, … N samples of each prompt, for all filters at once.
    order = np.argsort(-reward, axis=1, kind="stable")
    kept_counts = np.arange(1, reward.shape[1] + 1)
    means, judge_means = (
        np.cumsum(np.take_along_axis(scores, order, axis=1).mean(0)) / kept_counts for scores in (reward, judge)
    )
    if means[0] < target:
        return None
    # The mean reward falls as more samples are kept, so the last mean that reaches the target has the largest share.
    last = int(np.flatnonzero(means >= target)[-1])
    share = float(kept_counts[last] / len(kept_counts))
    return {"share": share, "kl": math.log(1 / share), "reward": float(means[last]), "judge": float(judge_means[last])}


def best_within_budget(points: Sequence[Point], flops: float, *, served: int) -> Point | None:
    """Returns the point that the judge scores highest among those within a compute budget.

    The scores that select the point are also reported for it, so they are slightly too high.

    Args:
        points: The candidates.
        flops: The budget in FLOPs.
        served: Completions to serve within the budget.

    Returns:
        The best point; None if every point exceeds the budget.
    """
    # Serving counts too: best-of-n trains nothing and pays for every completion.
    affordable = [point for point in points if point.flops(served) <= flops]
    return max(affordable, key=lambda point: float(point.judge.mean()), default=None)


def compare_points(first: Point, other: Point, *, seed: int) -> dict[str, Any]:
    """Computes first − other for judge and reward, paired by prompt.

    Args:
        first: The first point.
        other: The point to subtract, on the same prompts.
        seed: Seed of the resamples.

    Returns:
        {"judge", "reward"}: {value, ci95, n} each, where n is the smaller number of completions.
    """
    count = min(first.n, other.n)
    return {
        name: replace(first.estimate(getattr(first, name) - getattr(other, name), seed=seed), n=count).to_json()
        for name in ("judge", "reward")
    }
