"""Intervals against scipy's bootstrap, known binomials, and their own coverage."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from rlhf_zoo.evaluation.stats import (
    Estimate,
    WinRate,
    accuracy,
    bootstrap_mean,
    bootstrap_perplexity,
    correlation,
    group_indices,
    jackknife,
    mean_share,
    perplexity_difference,
    proportion,
    quantile_levels,
    summarize_seeds,
    win_rate,
)


def clustered(seed: int, prompts: int = 200, spread: float = 1.0):
    """Unequal numbers of values per prompt, with a common effect of the prompt."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(prompts), rng.integers(1, 5, size=prompts))
    return rng.normal(size=prompts)[groups] * spread + rng.normal(size=len(groups)), groups.tolist()


def by_scipy(sample, statistic, **options):
    options = {"paired": True, "method": "percentile", "rng": np.random.default_rng(1), **options}
    return scipy_stats.bootstrap(sample, statistic, **options)


def test_bootstrap_mean_agrees_with_scipy():
    values, groups = clustered(0)
    sums, counts = np.bincount(groups, weights=values), np.bincount(groups)
    reference = by_scipy(
        (sums, counts), lambda s, c, axis=-1: s.sum(axis) / c.sum(axis), vectorized=True, n_resamples=20_000
    )
    estimate = bootstrap_mean(values, groups, seed=0, resamples=20_000)
    assert estimate.value == pytest.approx(values.mean(), abs=1e-12)
    assert estimate.n == len(values)
    error = reference.standard_error
    assert estimate.ci95 == pytest.approx(tuple(reference.confidence_interval), abs=0.08 * error)


def test_bootstrap_is_seeded_and_ignores_group_names():
    values, groups = clustered(1)
    estimate = bootstrap_mean(values, groups, seed=5)
    assert bootstrap_mean(values, [f"prompt {group}" for group in groups], seed=5) == estimate
    assert bootstrap_mean(values, groups, seed=6).ci95 != estimate.ci95
    assert group_indices(["b", "a", "b", ("t", 1)]).tolist() == [0, 1, 0, 2]


def test_bootstrap_in_blocks_equals_whole(monkeypatch):
    values, groups = clustered(2)
    whole = bootstrap_mean(values, groups, seed=0)
    monkeypatch.setattr("rlhf_zoo.evaluation.stats._MAX_CELLS", 1000)
    assert bootstrap_mean(values, groups, seed=0) == whole


@pytest.mark.parametrize(
    ("values", "groups", "message"),
    [
        ([], [], "at least one"),
        ([[1.0]], [0], "shape"),
        ([1.0, 2.0], [0], "2 values and 1 groups"),
        ([1.0, math.nan], [0, 1], "Value 1 is not finite"),
    ],
)
def test_bootstrap_mean_rejects_bad_values(values, groups, message):
    with pytest.raises(ValueError, match=message):
        bootstrap_mean(values, groups, seed=0)


VALUES = st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3), st.integers(0, 4)), min_size=1, max_size=30)


@given(rows=VALUES)
@settings(deadline=None, max_examples=60)
def test_win_rate_is_symmetric_and_counts_ties_as_half(rows):
    a, b, groups = (list(column) for column in zip(*rows, strict=True))
    ours, theirs = (win_rate(*pair, groups) for pair in ((a, b), (b, a)))
    wins = sum(x > y for x, y in zip(a, b, strict=True))
    ties = sum(x == y for x, y in zip(a, b, strict=True))
    assert ours.value == pytest.approx((wins + ties / 2) / len(rows))
    assert ours.ties == theirs.ties == pytest.approx(ties / len(rows))
    assert ours.value + theirs.value == pytest.approx(1)
    assert 0 <= ours.ci95[0] <= ours.ci95[1] <= 1
    assert win_rate(a, a, groups) == WinRate(0.5, (0.5, 0.5), len(rows), 1.0)


def test_win_rate_matches_hand_computation():
    result = win_rate([3, 1, 2, 5], [1, 1, 4, 0], ["p", "p", "q", "r"])
    assert (result.value, result.ties, result.n) == (0.625, 0.25, 4)
    assert win_rate([1.0, 1.05], [1.04, 1.0], [0, 1], tolerance=0.1).ties == 1.0
    assert result.to_json() == {"value": 0.625, "ci95": list(result.ci95), "n": 4, "ties": 0.25}


def test_win_rate_of_unanimous_wins_has_wilson_interval():
    """9 completions of 3 prompts all win: 3 independent comparisons leave much open."""
    result = win_rate(np.ones(9), np.zeros(9), [0, 0, 0, 1, 1, 1, 2, 2, 2])
    assert result.value == 1.0 and result.n == 9
    assert result.ci95 == proportion(3, 3).ci95 and result.ci95[0] == pytest.approx(0.4385, abs=1e-4)


@given(n=st.integers(1, 2000), data=st.data())
@settings(deadline=None)
def test_proportion_has_wilson_interval(n, data):
    successes = data.draw(st.integers(0, n))
    estimate = proportion(successes, n)
    reference = scipy_stats.binomtest(successes, n).proportion_ci(method="wilson")
    assert estimate.ci95 == pytest.approx((reference.low, reference.high), abs=1e-9)
    assert estimate.value == successes / n and estimate.n == n


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (-1, 5), (6, 5)])
def test_proportion_rejects_impossible_counts(successes, n):
    with pytest.raises(ValueError, match="successes"):
        proportion(successes, n)


def test_jackknife_of_mean_equals_standard_error():
    values = np.random.default_rng(0).normal(size=50)
    left_out = (values.sum() - values) / 49
    estimate = jackknife(values.mean(), left_out, n=50)
    half = 1.959964 * values.std(ddof=1) / math.sqrt(50)
    assert estimate.ci95 == pytest.approx((values.mean() - half, values.mean() + half), abs=1e-6)
    assert jackknife(0.5, [0.5], n=1).ci95 == (-math.inf, math.inf)


def test_over_seeds_gives_interval_from_five_seeds_on():
    few, many = summarize_seeds([1.0, 3.0]).to_json(), summarize_seeds([1.0, 2.0, 3.0, 4.0, 5.0]).to_json()
    assert few == {"mean": 2.0, "range": [1.0, 3.0]}
    half = scipy_stats.t.ppf(0.975, 4) * math.sqrt(2.5 / 5)
    assert many.pop("ci95") == pytest.approx([3 - half, 3 + half], rel=5e-3)
    assert many == {"mean": 3.0, "range": [1.0, 5.0]}


def test_estimate_is_plain_json():
    assert Estimate(0.5, (0.25, 0.75), 4).to_json() == {"value": 0.5, "ci95": [0.25, 0.75], "n": 4}
    estimate = bootstrap_mean(np.float32([1, 2, 3]), [0, 1, 2], seed=0)
    assert type(estimate.value) is float and all(type(bound) is float for bound in estimate.ci95)


@pytest.mark.parametrize("ranks", [False, True])
def test_correlation_agrees_with_scipy(ranks):
    rng = np.random.default_rng(5)
    x = rng.normal(size=300)
    y = np.round(0.4 * x + rng.normal(size=300), 1)  # with ties
    result = correlation(x, y, list(range(300)), seed=0, ranks=ranks, resamples=4000)
    measure = scipy_stats.spearmanr if ranks else scipy_stats.pearsonr
    assert result.value == pytest.approx(measure(x, y).statistic, rel=1e-12)
    reference = by_scipy((x, y), lambda a, b: measure(a, b).statistic, vectorized=False, n_resamples=1000)
    # Two bootstraps of this size place an end of the interval within about 0.007 of each other.
    assert result.ci95 == pytest.approx(tuple(reference.confidence_interval), abs=0.02)
    assert result.n == 300


def test_correlation_resamples_whole_groups():
    """A group is one observation, repeated: then the interval is that of the groups, not of the copies."""
    rng = np.random.default_rng(6)
    x = rng.normal(size=60)
    y = x + rng.normal(size=60)
    one = correlation(x, y, list(range(60)), seed=0)
    copied = correlation(np.repeat(x, 9), np.repeat(y, 9), np.repeat(np.arange(60), 9).tolist(), seed=0)
    assert copied.value == pytest.approx(one.value, rel=1e-12) and copied.ci95 == pytest.approx(one.ci95, rel=1e-9)
    split = correlation(np.repeat(x, 9), np.repeat(y, 9), list(range(540)), seed=0)
    assert split.ci95[1] - split.ci95[0] < 0.5 * (one.ci95[1] - one.ci95[0])


def test_correlation_is_none_when_values_are_constant():
    assert correlation([1.0, 1.0], [1.0, 2.0], "ab", seed=0) is None
    assert correlation([1.0, 2.0], [3.0, 3.0], "ab", seed=0, ranks=True) is None
    assert correlation([1.0, 2.0, 4.0], [2.0, 4.0, 9.0], "abc", seed=0, ranks=True).value == pytest.approx(1)


def test_perplexity_is_per_token_with_interval_over_prompts():
    logprobs, lengths = [-2.0, -4.0, -3.0, -1.0], [2, 2, 3, 1]
    result = bootstrap_perplexity(logprobs, lengths, [0, 0, 1, 1], seed=1)
    assert result.value == pytest.approx(math.exp(10 / 8)) and result.n == 4
    assert result.ci95 == pytest.approx((math.exp(4 / 4), math.exp(6 / 4)))  # of two prompts, either twice
    alike = bootstrap_perplexity([-1.0] * 6, [1] * 6, range(6), seed=1)
    assert (alike.value, alike.ci95) == (pytest.approx(math.e), pytest.approx((math.e, math.e)))
    with pytest.raises(ValueError, match="some prompt have none"):
        bootstrap_perplexity([0.0, -1.0], [0, 1], [0, 1], seed=1)


def test_perplexity_difference_is_paired():
    rng = np.random.default_rng(3)
    lengths = rng.integers(3, 12, 80)
    theirs = -lengths * rng.uniform(1.0, 3.0, 80)
    ours = theirs - 0.1 * lengths  # each text a tenth of a nat a token less likely
    groups = [place // 2 for place in range(80)]
    same = perplexity_difference((theirs, lengths), (theirs, lengths), groups, seed=1)
    assert (same.value, same.ci95, same.n) == (0.0, (0.0, 0.0), 80)
    apart = perplexity_difference((ours, lengths), (theirs, lengths), groups, seed=1)
    base = bootstrap_perplexity(theirs, lengths, groups, seed=1)
    assert apart.value == pytest.approx(base.value * (math.exp(0.1) - 1))
    assert apart.ci95 == pytest.approx([bound * (math.exp(0.1) - 1) for bound in base.ci95])
    with pytest.raises(ValueError, match="some prompt have none"):
        perplexity_difference((ours, lengths * 0), (theirs, lengths), groups, seed=1)


def test_accuracy_interval_depends_on_answers_per_prompt():
    """One answer a prompt has Wilson's interval, several that of prompts."""
    groups = [prompt for prompt in range(4) for _ in range(5)]
    right = [1, 0, 0, 1, 0] + [0] * 5 + [1] * 5 + [0, 0, 1, 0, 0]
    assert accuracy(right, groups) == mean_share(right, groups)
    assert accuracy(right, range(20)) == proportion(8, 20)
    assert accuracy([1] * 20, groups).ci95 == proportion(4, 4).ci95


def test_mean_interval_covers_with_few_prompts():
    rng, result = np.random.default_rng(1), {}
    draws = {"normal": (rng.standard_normal, 0.0), "exponential": (rng.standard_exponential, 1.0)}
    for prompts, (name, (draw, true)) in product((20, 48, 180), draws.items()):
        bounds = [bootstrap_mean(draw(prompts), range(prompts), seed=0).ci95 for _ in range(1000)]
        result[name, prompts] = np.mean([low <= true <= high for low, high in bounds])
    assert result["normal", 20] >= 0.935 and result["exponential", 20] >= 0.9 and min(result.values()) >= 0.9


def test_share_interval_covers_near_zero_and_one():
    """At least 0.93 for shares of ½ to 0.98, 20 to 180 prompts, 1 to 3 samples, alike within a prompt or not."""
    rng, worst = np.random.default_rng(1), []
    for p, prompts, samples, alike in product((0.5, 0.8, 0.95, 0.98), (20, 48, 180), (1, 3), (0.001, 0.5)):
        spread = (1 - alike) / alike
        rates = rng.beta(p * spread, (1 - p) * spread, size=(400, prompts))
        won = rng.random((400, prompts, samples)) < rates[:, :, None]
        groups = np.repeat(np.arange(prompts), samples).tolist()
        bounds = [mean_share(one.ravel().astype(float), groups).ci95 for one in won]
        worst.append(np.mean([low <= p <= high for low, high in bounds]))
    noise = 2.5 * math.sqrt(0.93 * 0.07 / 400)  # of 400 trials, for the worst of 48 cells
    assert min(worst) >= 0.93 - noise
    assert np.mean(worst) <= 0.975, "no wider than it has to be"


@pytest.mark.parametrize("groups", [4, 5, 9, 40])
def test_quantile_levels_correct_for_few_groups(groups):
    """Resampling has n below the variance, and a normal's quantile: both are too narrow with few groups."""
    low, high = quantile_levels(groups)
    expected = scipy_stats.norm.cdf(scipy_stats.t.ppf(0.025, groups - 1) * math.sqrt(groups / (groups - 1)))
    assert low == pytest.approx(expected, rel=1e-12) and high == 1 - low
    assert low < 0.85 * scipy_stats.norm.cdf(scipy_stats.t.ppf(0.025, groups - 1)) or groups == 40
    assert quantile_levels(1) == pytest.approx((0.025, 0.975))


def by_korn_and_graubard(values, groups, *, variance=None):
    """The interval of a share, step by step: Wilson's with effective trials, Student's t and a tenth of a trial."""
    values, names = np.asarray(values, dtype=float), sorted(set(groups))
    size, rate = len(names), values.mean()
    sums = [sum(v - rate for v, g in zip(values, groups, strict=True) if g == name) for name in names]
    if variance is None:
        variance = sum(s**2 for s in sums) * size / (size - 1) / len(values) ** 2
    trials = rate * (1 - rate) / variance * (size - 1) / size
    t = scipy_stats.t.ppf(0.975, size - 1)

    def wilson(center, sign):
        center = min(1, max(0, center))
        half = t * math.sqrt(center * (1 - center) / trials + t**2 / (4 * trials**2))
        return (center + t**2 / (2 * trials) + sign * half) / (1 + t**2 / trials)

    return wilson(rate - 0.1 / trials, -1), wilson(rate + 0.1 / trials, 1)


def test_share_interval_equals_korn_graubard():
    values, groups = [1, 1, 1, 0, 0, 0, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 0, 1, 0], "aaabbbcccddddeeefff"
    assert mean_share(values, groups).ci95 == pytest.approx(by_korn_and_graubard(values, groups), abs=1e-3)
    alone = [1, 1, 1, 0, 1, 1]
    assert mean_share(alone, range(6)).ci95 == pytest.approx(by_korn_and_graubard(alone, range(6)), abs=1e-3)


def test_share_variance_is_at_least_that_of_independent_groups():
    """Each prompt has one win of two, so the shares of prompts do not vary: that is luck and no certainty."""
    values, groups = [1, 0] * 6, np.repeat(range(6), 2).tolist()
    floor = 0.25 / 12 / 6
    assert mean_share(values, groups).ci95 == pytest.approx(
        by_korn_and_graubard(values, groups, variance=floor), abs=1e-3
    )
    low, high = mean_share(values, groups).ci95
    assert 0.3 < low < 0.5 < high < 0.7


def test_win_rate_counts_difference_equal_to_tolerance_as_tie():
    """So are equal numbers at no tolerance."""
    assert win_rate([1.0, 3.0, 0.0], [1.5, 1.0, 0.5], [0, 1, 2], tolerance=0.5).ties == pytest.approx(2 / 3)
    result = win_rate([1.0, 2.0], [1.0, 1.0], [0, 1])
    assert (result.value, result.ties) == (0.75, 0.5)
