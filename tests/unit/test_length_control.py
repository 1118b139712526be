"""The length-controlled win rate against scipy, and judges whose length bias is known."""

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit

from rlhf_zoo.evaluation.length_control import RIDGE, length_controlled_win_rate
from rlhf_zoo.evaluation.logistic import fit_logistic
from rlhf_zoo.evaluation.stats import proportion, win_rate


def lengths(n: int, *, more: int = 0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(70 + more, 131 + more, n), rng.integers(70, 131, n)


def scores(n: int, log_odds, *, seed: int = 1, ties: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    won = (rng.random(n) < expit(log_odds)).astype(float)
    return np.where(rng.random(n) < ties, 0.5, won)


def controlled_win_rate(score, a, b, *, groups=None, resamples=50, seed=0):
    groups = list(range(len(score))) if groups is None else groups
    return length_controlled_win_rate(score, a, b, groups, seed=seed, resamples=resamples)


def test_fit_logistic_matches_scipy_with_weights():
    rng, ridge = np.random.default_rng(3), 0.5
    x = np.stack([np.ones(80), rng.normal(size=80)], axis=1)
    y, weights = rng.choice([0.0, 0.5, 1.0], 80), rng.integers(0, 4, 80).astype(float)

    def loss(beta):
        logits = x @ beta
        return weights @ (np.logaddexp(0, logits) - y * logits) + ridge / 2 * beta @ beta

    by_scipy = minimize(loss, np.zeros(2), method="BFGS", options={"gtol": 1e-10})
    beta = fit_logistic(x, y, weights, ridge=ridge)
    np.testing.assert_allclose(beta, by_scipy.x, atol=1e-6)
    far = fit_logistic(x, y, weights, ridge=ridge, initial=np.array([30.0, -50.0]))
    np.testing.assert_allclose(far, beta, atol=1e-9)


def test_length_controlled_win_rate_recovers_known_effect():
    a, b = lengths(20_000, more=15)
    feature = np.tanh((a - b) / (a - b).std())
    y = scores(20_000, 0.3 + 1.5 * feature, ties=0.0)
    result = controlled_win_rate(y, a, b, resamples=40)
    assert result.value == pytest.approx(expit(0.3), abs=0.02)
    assert result.plain.value > result.value + 0.05
    assert result.ci95[0] < expit(0.3) < result.ci95[1]
    beta = fit_logistic(np.stack([np.ones(20_000), feature], axis=1), y, np.ones(20_000), ridge=RIDGE)
    assert (result.value, result.slope) == pytest.approx((expit(beta[0]), beta[1]), rel=1e-6)
    assert result.scale == pytest.approx((a - b).std(), rel=1e-12)
    assert list(result.to_json()) == ["value", "ci95", "n", "plain", "slope", "scale", "longer", "shift", "warning"]


@pytest.mark.parametrize("score", [1.0, 0.0])
def test_length_controlled_win_rate_is_finite_for_constant_outcomes(score):
    a, b = lengths(100)
    result = controlled_win_rate(np.full(100, score), a, b, groups=[i // 2 for i in range(100)])
    assert np.isfinite(result.slope) and result.value == pytest.approx(score, abs=0.001)
    assert result.ci95 == proportion(50 * int(score), 50).ci95


def test_constant_length_differences_leave_plain_win_rate():
    assert controlled_win_rate([1.0], [10], [3]).ci95 == proportion(1, 1).ci95, "one comparison"
    y = np.array([1.0, 1.0, 1.0, 0.0])
    for a, b in ((np.full(4, 120), np.full(4, 100)), (np.arange(4) + 5, np.arange(4) + 5), (np.zeros(4), np.zeros(4))):
        result = controlled_win_rate(y, a, b)
        assert result.value == pytest.approx(0.75, abs=1e-3) and result.slope == 0 and result.scale == 0


def test_length_controlled_interval_groups_by_prompt():
    """Copies of a comparison add no information under the same prompt, but do under prompts of their own."""
    a, b = lengths(60)
    y = scores(60, 0.5)
    once = controlled_win_rate(y, a, b, resamples=200)
    copies = [np.repeat(values, 4) for values in (y, a, b)]
    within = controlled_win_rate(*copies, groups=np.repeat(np.arange(60), 4).tolist(), resamples=200)
    apart = controlled_win_rate(*copies, resamples=200)
    assert within.value == pytest.approx(once.value, abs=1e-4) and within.plain == win_rate(
        copies[0], 1 - copies[0], np.repeat(np.arange(60), 4).tolist()
    )
    assert within.ci95 == pytest.approx(once.ci95, abs=5e-3)
    assert apart.ci95[1] - apart.ci95[0] < 0.7 * (once.ci95[1] - once.ci95[0])


def test_length_control_warns_when_lengths_do_not_overlap():
    rng = np.random.default_rng(0)
    won, short = rng.integers(0, 2, 300).astype(float), rng.normal(50, 2, 300)
    near = length_controlled_win_rate(won, short + rng.normal(0, 2, 300), short, range(300), seed=1, resamples=20)
    far = length_controlled_win_rate(won, short + rng.normal(2, 2, 300), short, range(300), seed=1, resamples=20)
    always = length_controlled_win_rate(won, short + 5, short, range(300), seed=1, resamples=20)
    assert near.warning is None and near.to_json()["warning"] is None
    assert far.warning and "not identified" in far.warning and far.shift == pytest.approx(1, abs=0.2)
    assert always.warning and "longer" in always.warning
