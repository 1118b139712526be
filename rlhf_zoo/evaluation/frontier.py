"""The frontier of a method: what it reaches of reward and judge at which KL to the SFT policy, and at which compute.

Points hold a mean for each prompt and not for the whole set: two methods that were measured on the same prompts are
then compared pair by pair, and whole prompts are resampled, as everywhere (`stats`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .compute import Compute
from .stats import Estimate, bootstrap_mean, group_indices, share

Floats = NDArray[np.float64]

NEAR = 0.5
"""√nats between two measured points, at most, for a reading between them."""


@dataclass(frozen=True)
class Point:
    """One policy, or the mean of several seeds of one. Each of kl (nats), reward, judge: (P,), the mean of a row's
    prompt.

    prompts: (P,) what tells the prompts apart, where rows may have equal ones; intervals resample these together.
    wins: opponent -> (P,) the share of comparisons won. beside: other figures by what they are called, (P,) each;
    nothing of best-of-n, whose completions are not kept. n: completions behind the point. kl_is_bound: `kl` is an upper
    bound. training: once; serving: for each completion that is asked of it. seeds: the points that it is the mean of.
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
    seeds: tuple[Point, ...] = ()
    beside: Mapping[str, Floats] = field(default_factory=dict)
    prompts: Sequence[Hashable] | None = None

    def estimate(self, values: Floats, *, seed: int) -> Estimate:
        """Mean of (P,) means with an interval over resampled prompts."""
        return replace(bootstrap_mean(values, self._groups(values), seed=seed), n=self.n)

    def rate(self, values: Floats, *, n: int | None = None) -> Estimate:
        """Mean of (P,) shares of wins with the interval of `stats.share`; n: the comparisons behind it."""
        return replace(share(values, self._groups(values)), n=self.n if n is None else n)

    def by_prompt(self, values: Floats) -> Floats:
        """(P,) means of rows -> (G,) means of the different prompts."""
        groups = group_indices(self._groups(values))
        return np.asarray(np.bincount(groups, weights=values) / np.bincount(groups), dtype=float)

    def _groups(self, values: Floats) -> Sequence[Hashable]:
        return range(len(values)) if self.prompts is None else self.prompts

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean())

    def flops(self, served: int) -> float:
        """Training, and serving so many completions."""
        return self.training.flops + served * self.serving.flops


def by_prompt(values: ArrayLike, per_prompt: int) -> Floats:
    """(P · per_prompt,) values in the order of the prompts -> (P,) means."""
    return np.asarray(values, dtype=float).reshape(-1, per_prompt).mean(1)


def wins(ours: ArrayLike, theirs: ArrayLike, *, tolerance: float = 1e-9) -> Floats:
    """(P, N) the share of another's samples of the prompt that each of ours beats; a tie counts one half.

    ours: (P, N) scores, theirs: (P, S). |a − b| ≤ tolerance is a tie. Averaged over a pool by the chance of each to be
    chosen, it is the expected win rate of the choice.
    """
    gap = np.asarray(ours, dtype=float)[:, :, None] - np.asarray(theirs, dtype=float)[:, None, :]
    return np.asarray(np.where(np.abs(gap) <= tolerance, 0.5, gap > 0).mean(2), dtype=float)


def mixed(points: Sequence[Point], weights: Sequence[float] | None = None, *, label: str) -> Point:
    """The weighted mean of points on the same prompts; without weights the plain mean over seeds, which it keeps."""
    parts = [1 / len(points)] * len(points) if weights is None else list(weights)

    def mean(arrays: Sequence[Floats]) -> Floats:
        return np.asarray(sum(part * one for part, one in zip(parts, arrays, strict=True)), dtype=float)

    compute = [
        [getattr(one, kind).times(part) for part, one in zip(parts, points, strict=True)]
        for kind in ("training", "serving")
    ]
    return Point(
        label,
        mean([one.kl for one in points]),
        mean([one.reward for one in points]),
        mean([one.judge for one in points]),
        sum(one.n for one in points),
        {name: mean([one.wins[name] for one in points]) for name in points[0].wins},
        any(one.kl_is_bound for one in points),
        sum(compute[0], Compute()),
        sum(compute[1], Compute()),
        tuple(points) if weights is None else (),
        {
            name: mean([one.beside[name] for one in points])
            for name in points[0].beside
            if all(name in one.beside for one in points)
        },
        points[0].prompts,
    )


def at_kl(points: Sequence[Point], kl: float) -> Point | None:
    """The point of a frontier at `kl` nats, linear in √KL between two neighbours at most `NEAR` apart; else None.

    The score of a policy is close to linear in √KL over short stretches (Gao et al. 2022, arXiv:2210.10760), and not
    over long ones: a chord from SFT to a far point misses what lies between. Nothing is extrapolated either: that is
    where over-optimisation shows.
    """
    ordered = sorted(points, key=lambda one: one.mean_kl)
    roots = [math.sqrt(max(one.mean_kl, 0.0)) for one in ordered]
    target = math.sqrt(max(kl, 0.0))
    if not ordered or not roots[0] <= target <= roots[-1]:
        return None
    upper = next(place for place, root in enumerate(roots) if root >= target)
    if roots[upper] == target:
        return ordered[upper]
    gap = roots[upper] - roots[upper - 1]
    if gap > NEAR:
        return None
    low, high = ordered[upper - 1], ordered[upper]
    part = (target - roots[upper - 1]) / gap
    return mixed([low, high], [1 - part, part], label=f"between {low.label} and {high.label}")


def filtered(reward: Floats, judge: Floats, target: float) -> dict[str, float] | None:
    """The cheapest filter of SFT's samples with a mean reward of `target`: what a policy has to be better than.

    reward, judge: (P, N) of one pool. Of each prompt the `share` with the highest reward is kept, which takes
    KL = log(1 / share) nats, as any restriction to a part of the probability does. None where no share is enough.
    """
    order = np.argsort(-reward, axis=1, kind="stable")
    kept = np.arange(1, reward.shape[1] + 1)
    means, judged = (np.cumsum(np.take_along_axis(one, order, axis=1).mean(0)) / kept for one in (reward, judge))
    enough = np.flatnonzero(means >= target)
    if not len(enough):
        return None
    place, share = int(enough[-1]), float(kept[enough[-1]] / len(kept))
    return {"share": share, "kl": math.log(1 / share), "reward": float(means[place]), "judge": float(judged[place])}


def best_within(points: Sequence[Point], flops: float, *, served: int) -> Point | None:
    """The point with the highest judge among those that take at most so many FLOPs; None where each takes more.

    It is chosen by the scores that it is then reported with, which flatters it a little.
    """
    affordable = [one for one in points if one.flops(served) <= flops]
    return max(affordable, key=lambda one: float(one.judge.mean()), default=None)


def difference(one: Point, other: Point, *, seed: int) -> dict[str, Any]:
    """one − other, of judge and of reward, paired by prompt: {judge, reward: {value, ci95, n}}."""
    count = min(one.n, other.n)
    return {
        name: replace(one.estimate(getattr(one, name) - getattr(other, name), seed=seed), n=count).to_json()
        for name in ("judge", "reward")
    }
