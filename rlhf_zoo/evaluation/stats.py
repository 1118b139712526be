"""Means, win rates and proportions, each with a 95% interval.

Completions of one prompt are not independent, nor are completions of prompts that ask the same question. Intervals
therefore treat the completions of a group of prompts as one unit; `prompt_groups` finds the groups. Intervals of means
resample whole groups (the cluster bootstrap). Those of shares are Wilson's with an effective sample size
(`mean_share`). Two policies are compared by their difference on each prompt, so the comparison is paired.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_Z = NormalDist().inv_cdf(0.975)
#: Smallest number of seeds for which an interval of their mean is computed.
MIN_SEEDS = 5
RESAMPLES = 2000  # bootstrap resamples per interval
TIE_TOLERANCE = 1e-9  # scores at most this far apart tie; a tie counts one half
_MAX_CELLS = 4_000_000  # resamples × groups held in memory at once


@dataclass(frozen=True)
class Estimate:
    """A point estimate with its interval.

    Attributes:
        value: The point estimate.
        ci95: The 95% interval, (low, high).
        n: Number of observations.
    """

    value: float
    ci95: tuple[float, float]
    n: int

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value, "ci95": list(self.ci95), "n": self.n}


@dataclass(frozen=True)
class WinRate(Estimate):
    """The share of comparisons that the first side wins. A tie counts one half.

    Attributes:
        ties: The share of ties.
    """

    ties: float

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "ties": self.ties}


@dataclass(frozen=True)
class Spread:
    """One metric over runs with different seeds.

    Attributes:
        mean: The mean over seeds.
        range: The lowest and the highest value.
        n: Number of seeds.
        ci95: 95% interval of the mean; None for fewer than `MIN_SEEDS` seeds, where the range says more.
    """

    mean: float
    range: tuple[float, float]
    n: int
    ci95: tuple[float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        interval = {} if self.ci95 is None else {"ci95": list(self.ci95)}
        return {"mean": self.mean, "range": list(self.range), **interval}


def summarize_seeds(values: Sequence[float]) -> Spread:
    """Computes mean and range over seeds and, for five seeds or more, the interval mean ± t · s/√N.

    Args:
        values: (N,) one value per seed.

    Returns:
        The spread; t is the quantile of Student's t with N − 1 degrees of freedom.
    """
    count, interval = len(values), None
    mean = math.fsum(values) / count
    if count >= MIN_SEEDS:
        half_width = _t_quantile(count - 1) * float(np.std(values, ddof=1)) / math.sqrt(count)
        interval = (mean - half_width, mean + half_width)
    return Spread(mean, (min(values), max(values)), count, interval)


def group_indices(groups: Sequence[Hashable]) -> NDArray[np.intp]:
    """Replaces labels by integers, in order of first appearance.

    Args:
        groups: (N,) hashable labels.

    Returns:
        (N,) integers 0 … G−1, equal for equal labels.
    """
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(group, len(numbers)) for group in groups], dtype=np.intp)


def split_into_parts(values: ArrayLike, max_parts: int) -> list[NDArray[np.intp]]:
    """Splits values into parts of about equal size, lowest first. Equal values share a part.

    Args:
        values: (N,) numbers.
        max_parts: Maximum number of parts.

    Returns:
        The indices of the values in each part.
    """
    sample = np.asarray(values)
    # "inverted_cdf" takes edges from the data. Equal edges merge, so equal values stay together.
    edges = np.unique(np.quantile(sample, np.linspace(0, 1, max_parts + 1)[1:], method="inverted_cdf"))
    part_indices = np.searchsorted(edges, sample)
    return [np.flatnonzero(part_indices == part) for part in range(len(edges))]


def bootstrap_mean(values: ArrayLike, groups: Sequence[Hashable], *, seed: int, resamples: int = RESAMPLES) -> Estimate:
    """Computes a mean with an interval over resampled groups.

    Each resample draws G of the G groups with replacement and takes the mean of all their values, so larger groups
    weigh more. `quantile_levels` chooses the percentiles.

    Args:
        values: (N,) numbers.
        groups: (N,) the group of each value, such as its prompt.
        seed: Seed of the resamples.
        resamples: Number of resamples.

    Raises:
        ValueError: There are no values, lengths differ, or a value is not finite.

    Source: Efron & Tibshirani 1993, section 13.3; Davison & Hinkley 1997, section 3.8.
    """
    interval = mean_interval(values, groups, seed=seed, resamples=resamples, level=0.95)
    return Estimate(float(np.mean(np.asarray(values, dtype=float))), interval, len(groups))


def mean_interval(
    values: ArrayLike, groups: Sequence[Hashable], *, seed: int, level: float, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Computes the interval of `bootstrap_mean` at any level.

    Args:
        values: (N,) numbers.
        groups: (N,) the prompt of each value.
        seed: Seed of the resamples.
        level: Coverage of the interval, such as 0.95.
        resamples: Number of resamples.

    Raises:
        ValueError: As in `bootstrap_mean`.
    """
    sample, group_ids = _check_values(values, groups)
    sums, counts = np.bincount(group_ids, weights=sample), np.bincount(group_ids)
    return _bootstrap_interval(sums, counts, seed, resamples, level)


def bootstrap_perplexity(logprobs: ArrayLike, lengths: ArrayLike, groups: Sequence[Hashable], *, seed: int) -> Estimate:
    """Computes the perplexity exp(−Σ logprobs / Σ lengths) of texts, with the interval of `bootstrap_mean`.

    Args:
        logprobs: (N,) Σ log p of each text, nats.
        lengths: (N,) tokens of each text.
        groups: (N,) the prompt of each text.
        seed: Seed of the resamples.

    Raises:
        ValueError: As in `bootstrap_mean`, or a group has no tokens.
    """
    sums, counts = _nats_and_tokens(logprobs, lengths, groups)
    # exp is monotonic, so the interval of the mean loss maps to that of the perplexity.
    low, high = (math.exp(bound) for bound in _bootstrap_interval(sums, counts, seed, RESAMPLES, 0.95))
    return Estimate(math.exp(float(sums.sum() / counts.sum())), (low, high), len(groups))


def perplexity_difference(
    ours: tuple[ArrayLike, ArrayLike], theirs: tuple[ArrayLike, ArrayLike], groups: Sequence[Hashable], *, seed: int
) -> Estimate:
    """Computes perplexity(ours) − perplexity(theirs), with the same resampled prompts for both.

    Args:
        ours: (logprobs, lengths) as in `bootstrap_perplexity`, (N,) each.
        theirs: (logprobs, lengths) of the second side.
        groups: (N,) the prompt of each text.
        seed: Seed of the resamples.

    Raises:
        ValueError: As in `bootstrap_perplexity`.
    """
    values, resampled_values = [], []
    for logprobs, lengths in (ours, theirs):
        sums, counts = _nats_and_tokens(logprobs, lengths, groups)
        values.append(math.exp(float(sums.sum() / counts.sum())))
        resampled_values.append(np.exp(_resampled_ratios(sums, counts, seed, RESAMPLES)))
    low, high = np.quantile(resampled_values[0] - resampled_values[1], quantile_levels(len(sums)))
    return Estimate(values[0] - values[1], (float(low), float(high)), len(groups))


def _nats_and_tokens(
    logprobs: ArrayLike, lengths: ArrayLike, groups: Sequence[Hashable]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns −Σ logprobs and Σ lengths of each group, (G,) each."""
    sample, group_ids = _check_values(logprobs, groups)
    tokens, _ = _check_values(lengths, groups)
    sums, counts = np.bincount(group_ids, weights=-sample), np.bincount(group_ids, weights=tokens)
    if not (counts > 0).all():
        raise ValueError("A perplexity is a mean over tokens, but the texts of some prompt have none.")
    return sums, counts


def _bootstrap_interval(
    sums: NDArray[Any], counts: NDArray[Any], seed: int, resamples: int, level: float
) -> tuple[float, float]:
    """Returns the bootstrap interval of Σ sums / Σ counts, given (G,) the sum and the count of each group."""
    low, high = np.quantile(_resampled_ratios(sums, counts, seed, resamples), quantile_levels(len(sums), level))
    return float(low), float(high)


def quantile_levels(n_groups: int, level: float = 0.95) -> tuple[float, float]:
    """Computes which quantiles of the resamples bound an interval.

    With few groups, the 2.5% and 97.5% quantiles are too narrow. The levels are widened to match Student's t and a
    variance with denominator G − 1.

    Args:
        n_groups: Number of groups, G.
        level: Coverage of the interval.

    Returns:
        The levels of the lower and the upper quantile, from 0 to 1.

    Source: Hesterberg 2015, The American Statistician 69:371.
    """
    if n_groups == 1:
        return (1 - level) / 2, (1 + level) / 2
    low = NormalDist().cdf(-_t_quantile(n_groups - 1, level) * math.sqrt(n_groups / (n_groups - 1)))
    return low, 1 - low


def _resampled_ratios(sums: NDArray[Any], counts: NDArray[Any], seed: int, resamples: int) -> NDArray[np.float64]:
    """Returns (resamples,) Σ sums / Σ counts over resampled groups. Equal G and seed draw the same groups."""
    chunks = resample_counts(len(counts), seed, resamples)
    return np.concatenate([(draws @ sums) / (draws @ counts) for draws in chunks])


def resample_counts(n_groups: int, seed: int, resamples: int) -> Iterable[NDArray[np.float64]]:
    """Draws as many groups as there are, with replacement, and counts how often each group is drawn.

    Args:
        n_groups: Number of groups, G.
        seed: Seed of the resamples.
        resamples: Number of resamples.

    Returns:
        Arrays (n, G) of counts, one row per resample; a single array if all resamples fit in memory.
    """
    # All metrics of an evaluation use the same groups and seed, so the last draws are cached.
    if n_groups * resamples <= _MAX_CELLS:
        return [_cached_counts(n_groups, seed, resamples)]
    rng, step = np.random.default_rng(seed), max(1, _MAX_CELLS // n_groups)
    return (_draw_counts(rng, n_groups, min(step, resamples - start)) for start in range(0, resamples, step))


@lru_cache(maxsize=2)
def _cached_counts(n_groups: int, seed: int, resamples: int) -> NDArray[np.float64]:
    counts = _draw_counts(np.random.default_rng(seed), n_groups, resamples)
    counts.flags.writeable = False  # callers share the cached array
    return counts


def _draw_counts(rng: np.random.Generator, n_groups: int, resamples: int) -> NDArray[np.float64]:
    return rng.multinomial(n_groups, np.full(n_groups, 1 / n_groups), size=resamples).astype(float)


def win_rate(a: ArrayLike, b: ArrayLike, groups: Sequence[Hashable], *, tolerance: float = 0.0) -> WinRate:
    """Computes how often `a` beats `b` on the same prompt and sample, with the interval of `mean_share`.

    Args:
        a: (N,) scores of the first side.
        b: (N,) scores of the second side.
        groups: (N,) the prompt of each pair of scores.
        tolerance: Scores at most this far apart tie; a tie counts one half.

    Raises:
        ValueError: As in `bootstrap_mean`.
    """
    # The interval comes from the outcomes of the pairs, so the two sides stay paired.
    difference = _check_values(a, groups)[0] - _check_values(b, groups)[0]
    is_tie = np.abs(difference) <= tolerance
    estimate = mean_share(np.where(is_tie, 0.5, difference > 0), groups)
    return WinRate(estimate.value, estimate.ci95, estimate.n, float(is_tie.mean()))


def mean_share(values: ArrayLike, groups: Sequence[Hashable]) -> Estimate:
    """Computes a mean of values from 0 to 1, with an interval that is valid near 0 and 1 and with few groups.

    The interval is Wilson's with three changes: the number of trials is the effective sample size, given the groups
    (Korn & Graubard 1998, Survey Methodology 24:193); the quantile is that of t with G − 1 degrees of freedom; and a
    tenth of a trial corrects for continuity. If all values are 0, or all are 1, it is Wilson's own with one trial per
    group. If all are equal otherwise, as when every comparison ties, it has no width. With one group, it is 0 to 1. The
    coverage is 0.93 or more for shares of 0.5 to 0.98, 20 to 180 prompts, and 1 to 3 samples per prompt, whether or not
    samples of a prompt are alike (test_stats.py). A percentile bootstrap over 20 prompts covers only 0.53 for a share
    of 0.98, and 0.88 for a share of 0.9.

    Args:
        values: (N,) numbers from 0 to 1.
        groups: (N,) the prompt of each value.

    Raises:
        ValueError: As in `bootstrap_mean`.
    """
    interval = share_interval(values, groups, level=0.95)
    return Estimate(float(np.mean(np.asarray(values, dtype=float))), interval, len(groups))


def share_interval(values: ArrayLike, groups: Sequence[Hashable], *, level: float) -> tuple[float, float]:
    """Computes the interval of `mean_share` at any level.

    Args:
        values: (N,) numbers from 0 to 1.
        groups: (N,) the prompt of each value.
        level: Coverage of the interval, such as 0.95.

    Raises:
        ValueError: As in `bootstrap_mean`.
    """
    sample, group_ids = _check_values(values, groups)
    n_groups, center = int(group_ids.max()) + 1, float(sample.mean())
    if center in (0.0, 1.0):
        low, high = _wilson_interval(center, n_groups, NormalDist().inv_cdf((1 + level) / 2))
        return (0.0, high) if center == 0.0 else (low, 1.0)  # rounding would leave this bound slightly off
    if sample.min() == sample.max():  # for example, every comparison is a tie
        return center, center
    if n_groups == 1:
        return 0.0, 1.0
    # The linearized variance of a ratio: groups may have different sizes.
    residuals = np.bincount(group_ids, weights=sample - center) / (len(sample) / n_groups)
    variance = float(residuals @ residuals) / n_groups / (n_groups - 1)
    variance = max(variance, float(sample.var()) / len(sample) / n_groups)  # the group means may be equal by chance
    trials = center * (1 - center) / variance * (n_groups - 1) / n_groups
    quantile = _t_quantile(n_groups - 1, level)
    low, _ = _wilson_interval(center - 0.1 / trials, trials, quantile)
    _, high = _wilson_interval(center + 0.1 / trials, trials, quantile)
    return low, high


def _wilson_interval(center: float, trials: float, z: float) -> tuple[float, float]:
    rate = min(1.0, max(0.0, center))
    middle = (rate + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half_width = z / (1 + z**2 / trials) * math.sqrt(rate * (1 - rate) / trials + z**2 / (4 * trials**2))
    return middle - half_width, middle + half_width


def _t_quantile(degrees_of_freedom: int, level: float = 0.95) -> float:
    """Returns the half-width of a two-sided t interval, in standard errors."""
    from scipy.special import stdtrit  # importing it takes longer than most commands take to start

    return float(stdtrit(degrees_of_freedom, (1 + level) / 2))


def accuracy(correct: ArrayLike, groups: Sequence[Hashable]) -> Estimate:
    """Computes the share of right answers.

    Args:
        correct: (N,) 1 or 0.
        groups: (N,) the prompt of each answer.

    Returns:
        The share, with Wilson's interval if each prompt has one answer, else with the interval of `mean_share`.

    Raises:
        ValueError: As in `bootstrap_mean`.
    """
    answers, group_ids = _check_values(correct, groups)
    if len(answers) == int(group_ids.max()) + 1:
        return proportion(int(answers.sum()), len(answers))
    return mean_share(answers, groups)


def correlation(
    x: ArrayLike, y: ArrayLike, groups: Sequence[Hashable], *, seed: int, ranks: bool = False, resamples: int = 1000
) -> Estimate | None:
    """Computes Pearson's r, or Spearman's ρ, with an interval that resamples groups and ranks each resample again.

    Args:
        x: (N,) numbers.
        y: (N,) numbers.
        groups: (N,) the prompt of each pair (x, y).
        seed: Seed of the resamples.
        ranks: True for Spearman's ρ, which is r of the ranks; tied values share the mean of their ranks.
        resamples: Number of resamples.

    Returns:
        The correlation; None if x or y does not vary.

    Raises:
        ValueError: As in `bootstrap_mean`.
    """
    first, group_ids = _check_values(x, groups)
    second, _ = _check_values(y, groups)
    # Each value's index among the sorted distinct values suffices to rank any resample.
    value_indices = [np.unique(side, return_inverse=True)[1] for side in (first, second)]

    def coefficients(weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the coefficient under each of (R, N) weights; NaN where x or y does not vary."""
        sides = (
            [np.stack([_weighted_ranks(indices, row) for row in weights]) for indices in value_indices]
            if ranks
            else [first, second]
        )
        totals = weights.sum(1, keepdims=True)
        a, b = (side - (weights * side).sum(1, keepdims=True) / totals for side in sides)
        variance = (weights * a**2).sum(1) * (weights * b**2).sum(1)
        covariance = (weights * a * b).sum(1)
        return np.where(variance > 0, covariance / np.sqrt(np.where(variance > 0, variance, 1.0)), np.nan)

    if min(indices.max() for indices in value_indices) == 0:
        return None
    n_groups = int(group_ids.max()) + 1
    # Weights of every value take more memory than those of groups, so fewer resamples are computed at once.
    step = max(1, _MAX_CELLS // (8 * len(first)))
    resampled_values = np.concatenate(
        [
            coefficients(counts[start : start + step, group_ids])
            for counts in resample_counts(n_groups, seed, resamples)
            for start in range(0, len(counts), step)
        ]
    )
    # A resample in which x or y does not vary has no correlation.
    resampled_values = resampled_values[~np.isnan(resampled_values)]
    low, high = np.quantile(resampled_values, quantile_levels(n_groups)) if len(resampled_values) else (-1.0, 1.0)
    return Estimate(float(coefficients(np.ones((1, len(first))))[0]), (float(low), float(high)), len(first))


def _weighted_ranks(indices: NDArray[np.intp], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks N values that occur `weights` times each, given (N,) their indices among the sorted distinct values."""
    counts = np.bincount(indices, weights=weights)
    return (np.cumsum(counts) - counts + (counts + 1) / 2)[indices]


def proportion(successes: int, n: int) -> Estimate:
    """Computes successes / n with Wilson's interval, which is valid near 0 and 1 and with few trials.

    Args:
        successes: Number of successes.
        n: Number of trials.

    Raises:
        ValueError: `n` is 0, or `successes` is not from 0 to `n`.

    Source: Wilson 1927, JASA 22:209.
    """
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"A proportion needs 0 <= successes <= n and n > 0, not {successes} of {n}.")
    low, high = _wilson_interval(successes / n, n, _Z)
    # With no successes, or with successes only, rounding would leave a bound slightly off 0 or 1.
    return Estimate(successes / n, (low if successes else 0.0, high if successes < n else 1.0), n)


def jackknife(value: float, leave_one_out: ArrayLike, *, n: int) -> Estimate:
    """Computes `value` ± 1.96 standard errors from the values with one group left out.

    se² = (G−1)/G · Σ(θ_i − θ̄)². Use it for statistics that a bootstrap biases by drawing duplicates. With one group,
    the interval is (−∞, ∞).

    Args:
        value: The statistic over all groups.
        leave_one_out: (G,) the statistic without each group in turn.
        n: Number of observations behind the estimate.

    Source: Tukey 1958.
    """
    theta = np.asarray(leave_one_out, dtype=float)
    n_groups = len(theta)
    if n_groups < 2:
        return Estimate(value, (-math.inf, math.inf), n)
    # Values with one group left out differ little, so their variance is scaled up by (G − 1)².
    standard_error = math.sqrt((n_groups - 1) / n_groups * float(np.square(theta - theta.mean()).sum()))
    return Estimate(value, (value - _Z * standard_error, value + _Z * standard_error), n)


def _check_values(values: ArrayLike, groups: Sequence[Hashable]) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    sample = np.asarray(values, dtype=float)
    if sample.ndim != 1 or len(sample) == 0:
        raise ValueError(f"Values must be a flat list of at least one number, not of shape {sample.shape}.")
    if len(groups) != len(sample):
        raise ValueError(f"There are {len(sample)} values and {len(groups)} groups: each value needs its group.")
    if not np.isfinite(sample).all():
        raise ValueError(f"Value {int(np.argmin(np.isfinite(sample)))} is not finite: {sample.tolist()[:5]} …")
    return sample, group_indices(groups)
