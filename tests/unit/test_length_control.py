"""The length-controlled win rate against scikit-learn, scipy, and judges whose liking for length is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit
from sklearn.linear_model import LogisticRegression

from rlhf_zoo.evaluation.length_control import RIDGE, fit_logistic, length_controlled_win_rate
from rlhf_zoo.evaluation.stats import proportion, win_rate


def lengths(n: int, *, more: int = 0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(70 + more, 131 + more, n), rng.integers(70, 131, n)


def scores(n: int, log_odds, *, seed: int = 1, ties: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    won = (rng.random(n) < expit(log_odds)).astype(float)
    return np.where(rng.random(n) < ties, 0.5, won)


def controlled(score, a, b, *, groups=None, resamples=50, seed=0, **options):
    groups = list(range(len(score))) if groups is None else groups
    return length_controlled_win_rate(score, a, b, groups, seed=seed, resamples=resamples, **options)


def test_fit_is_scikit_learns():
    """Ties are half a win and half a loss there, and the intercept is a column, so that it is penalised as well."""
    a, b = lengths(300)
    feature = np.tanh((a - b) / (a - b).std())
    y = scores(300, 0.4 + feature, ties=0.2)
    x = np.stack([np.ones(300), feature], axis=1)
    model = LogisticRegression(C=1 / RIDGE, fit_intercept=False, tol=1e-12, max_iter=10_000)
    model.fit(np.tile(x, (2, 1)), [1] * 300 + [0] * 300, sample_weight=np.concatenate([y, 1 - y]))
    beta = fit_logistic(x, y, np.ones(300), ridge=RIDGE)
    np.testing.assert_allclose(beta, model.coef_[0], rtol=1e-5)
    found = controlled(y, a, b)
    assert found.value == pytest.approx(expit(model.coef_[0][0]), rel=1e-5)
    assert found.slope == pytest.approx(model.coef_[0][1], rel=1e-5)
    assert found.scale == pytest.approx((a - b).std(), rel=1e-12)


@pytest.mark.parametrize("ridge", [1e-3, 0.5, 30.0])
def test_fit_is_scipys_also_with_weights(ridge):
    rng = np.random.default_rng(3)
    x = np.stack([np.ones(80), rng.normal(size=80)], axis=1)
    y, weights = rng.choice([0.0, 0.5, 1.0], 80), rng.integers(0, 4, 80).astype(float)

    def loss(beta):
        logits = x @ beta
        return weights @ (np.logaddexp(0, logits) - y * logits) + ridge / 2 * beta @ beta

    by_scipy = minimize(loss, np.zeros(2), method="BFGS", options={"gtol": 1e-10})
    beta = fit_logistic(x, y, weights, ridge=ridge)
    np.testing.assert_allclose(beta, by_scipy.x, atol=1e-6)
    far = fit_logistic(x, y, weights, ridge=ridge, start=np.array([30.0, -50.0]))
    np.testing.assert_allclose(far, beta, atol=1e-9)


@pytest.mark.parametrize("more", [0, 15])
def test_a_judge_of_length_alone_leaves_a_half(more):
    a, b = lengths(800, more=more)
    found = controlled((np.sign(a - b) + 1) / 2, a, b)
    assert abs(found.value - 0.5) < 0.04
    assert found.slope > 20
    assert found.plain.value == found.longer == ((np.sign(a - b) + 1) / 2).mean()
    assert more == 0 or found.plain.value > 0.65


def test_a_judge_of_length_alone_leaves_exactly_a_half_where_lengths_are_alike():
    """Each pair and its mirror image."""
    a, b = lengths(100)
    a, b = np.concatenate([a, b]), np.concatenate([b, a])
    found = controlled((np.sign(a - b) + 1) / 2, a, b)
    assert found.value == pytest.approx(0.5, abs=1e-9) and found.longer == 0.5


def test_a_judge_that_ignores_length_keeps_the_plain_win_rate():
    """Each pair comes with both outcomes' shares the same at each length: 7 wins, 1 tie, 2 losses."""
    a, b = lengths(60)
    y = np.tile([1.0] * 7 + [0.5] + [0.0] * 2, 60)
    found = controlled(y, np.repeat(a, 10), np.repeat(b, 10))
    assert found.plain.value == 0.75
    assert found.value == pytest.approx(0.75, abs=1e-5)
    assert found.slope == pytest.approx(0, abs=1e-4)


def test_what_is_left_at_equal_length_is_found():
    a, b = lengths(20_000, more=15)
    y = scores(20_000, 0.3 + 1.5 * np.tanh((a - b) / (a - b).std()), ties=0.0)
    found = controlled(y, a, b, resamples=40)
    assert found.value == pytest.approx(expit(0.3), abs=0.02)
    assert found.plain.value > found.value + 0.05
    assert found.ci95[0] < expit(0.3) < found.ci95[1]


def test_swapping_sides_mirrors_it():
    a, b = lengths(120, more=10)
    y = scores(120, 0.5, ties=0.3)
    one, other = controlled(y, a, b), controlled(1 - y, b, a)
    assert one.value == pytest.approx(1 - other.value, abs=1e-9)
    assert one.slope == pytest.approx(other.slope, abs=1e-7)
    assert one.ci95 == pytest.approx((1 - other.ci95[1], 1 - other.ci95[0]), abs=1e-9)


@pytest.mark.parametrize(("score", "bound"), [(1.0, 0.999), (0.0, 0.001)])
def test_all_of_one_kind_does_not_diverge(score, bound):
    a, b = lengths(100)
    found = controlled(np.full(100, score), a, b, groups=[i // 2 for i in range(100)])
    assert np.isfinite([found.value, found.slope, *found.ci95]).all()
    assert (found.value > bound) if score else (found.value < bound)
    assert found.ci95 == proportion(50 * int(score), 50).ci95


def test_one_comparison():
    found = controlled([1.0], [10], [3])
    assert found.slope == 0 and found.scale == 0 and 0.9 < found.value < 1 and found.n == 1
    assert found.ci95 == proportion(1, 1).ci95


def test_differences_that_do_not_vary_leave_the_plain_win_rate():
    y = np.array([1.0, 1.0, 1.0, 0.0])
    for a, b in ((np.full(4, 120), np.full(4, 100)), (np.arange(4) + 5, np.arange(4) + 5), (np.zeros(4), np.zeros(4))):
        found = controlled(y, a, b)
        assert found.value == pytest.approx(0.75, abs=1e-3) and found.slope == 0 and found.scale == 0


def test_interval_is_paired_over_prompts():
    """Copies of a comparison under its prompt add nothing, and under prompts of their own they do."""
    a, b = lengths(60)
    y = scores(60, 0.5)
    once = controlled(y, a, b, resamples=200)
    copies = [np.repeat(values, 4) for values in (y, a, b)]
    within = controlled(*copies, groups=np.repeat(np.arange(60), 4).tolist(), resamples=200)
    apart = controlled(*copies, resamples=200)
    assert within.value == pytest.approx(once.value, abs=1e-4) and within.plain == win_rate(
        copies[0], 1 - copies[0], np.repeat(np.arange(60), 4).tolist(), seed=0
    )
    assert within.ci95 == pytest.approx(once.ci95, abs=5e-3)
    assert apart.ci95[1] - apart.ci95[0] < 0.7 * (once.ci95[1] - once.ci95[0])


def test_interval_covers_as_often_as_it_says():
    hits = 0
    for seed in range(60):
        a, b = lengths(150, more=10, seed=seed)
        slope = 1.2 * np.tanh((a - b) / 25)
        found = controlled(scores(150, 0.4 + slope, seed=seed + 1000), a, b, resamples=100, seed=seed)
        hits += found.ci95[0] <= expit(0.4) <= found.ci95[1]
    assert hits >= 51  # of 60; at 95% it is fewer in 1 of 1000 trials


def test_json():
    a, b = lengths(30)
    found = controlled(scores(30, 0.2), a, b)
    document = found.to_json()
    assert list(document) == ["value", "ci95", "n", "plain", "slope", "scale", "longer"]
    assert document["plain"] == found.plain.to_json()
    assert controlled(scores(30, 0.2), a, b) == found


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([], [], []), "at least 1"),
        (([1.0], [1, 2], [1]), r"shapes \(1,\), \(2,\)"),
        (([0.7], [1], [1]), "counts 1, 1/2 or 0"),
        (([float("nan")], [1], [1]), "counts 1, 1/2 or 0"),
        (([1.0], [-1], [1]), "not negative"),
        (([1.0], [float("inf")], [1]), "not negative"),
    ],
)
def test_refusals(arguments, said):
    with pytest.raises(ValueError, match=said):
        controlled(*arguments)


def test_other_refusals():
    with pytest.raises(ValueError, match="1 values and 2 groups"):
        controlled([1.0], [1], [2], groups=[0, 1])
    with pytest.raises(ValueError, match="ridge penalty must be above 0"):
        controlled([1.0], [1], [2], ridge=0.0)
