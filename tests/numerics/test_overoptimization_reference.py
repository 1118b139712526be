"""Fits equal scipy's, and their intervals agree with scipy's covariance and bootstrap."""

import numpy as np
import pytest
from scipy import optimize, special
from scipy import stats as scipy_stats

from rlhf_zoo.evaluation.overoptimization import fit_form


def rl(d, alpha, beta):
    return d * alpha - beta * special.xlogy(d, d)


def best_of_n(d, alpha, beta):
    return d * alpha - beta * d**2


FORMS = {"rl": rl, "best-of-n": best_of_n}
DERIVATIVES = {  # curve_fit's numerical derivatives have an error of 1e-8
    "rl": lambda d, alpha, beta: np.stack([d, -special.xlogy(d, d)], axis=1),
    "best-of-n": lambda d, alpha, beta: np.stack([d, -(d**2)], axis=1),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_coefficients_equal_those_of_curve_fit(form, weighted, seed):
    rng = np.random.default_rng(seed)
    d = np.sort(rng.uniform(0.05, 8, size=12))
    y = FORMS[form](d, 2.0, 0.5) + rng.normal(size=12)
    errors = rng.uniform(0.5, 2, size=12) if weighted else None
    result = fit_form(form, d**2, y, errors=errors, seed=0)
    (alpha, beta), covariance = optimize.curve_fit(
        FORMS[form], d, y, p0=(1.0, 1.0), sigma=errors, absolute_sigma=weighted, jac=DERIVATIVES[form]
    )
    assert (result.alpha.value, result.beta.value) == pytest.approx((alpha, beta), abs=1e-8)

    # The intervals: normal if the errors are known (widened by the scatter), else t with the residuals' variance.
    quantile = 1.959964 * max(1.0, result.scatter) ** 0.5 if weighted else scipy_stats.t(10).ppf(0.975)
    half_widths = quantile * np.sqrt(np.diag(covariance))
    resampled = fit_form(form, d**2, y, errors=errors, seed=0, resamples=40_000)
    for estimate, width in zip((resampled.alpha, resampled.beta), half_widths, strict=True):
        assert (estimate.ci95[1] - estimate.ci95[0]) / 2 == pytest.approx(width, rel=0.03)


def test_scatter_is_chi_square_per_degree_of_freedom():
    rng = np.random.default_rng(0)
    d, errors = np.linspace(0.5, 5, 9), rng.uniform(0.5, 2, size=9)
    result = fit_form(
        "rl", d**2, rl(d, 2.0, 1.0) + errors * rng.normal(size=9), errors=errors, seed=0, resamples=40_000
    )
    chi_square = float(((np.array(result.residuals) / errors) ** 2).sum())
    assert result.scatter == pytest.approx(chi_square / 7, rel=0.02)
    assert result.scatter_p == pytest.approx(scipy_stats.chi2(7).sf(chi_square), abs=0.01)


def test_bootstrap_over_prompts_equals_scipys():
    rng = np.random.default_rng(0)
    d = np.linspace(0.5, 5, 8)
    scores = rl(d, 2.0, 1.0)[:, None] + rng.normal(size=60) + 2 * rng.normal(size=(8, 60))
    result = fit_form("rl", d**2, scores, seed=0, resamples=20_000)
    design = np.stack([d, -special.xlogy(d, d)], axis=1)
    weights = 1 / scores.var(1, ddof=1)
    solve = np.linalg.solve((design * weights[:, None]).T @ design, (design * weights[:, None]).T)
    factor = max(1.0, result.scatter) ** 0.5
    for row, estimate in enumerate((result.alpha, result.beta)):
        # α and β are means over prompts of the coefficients that each prompt's scores would give.
        coefficients = solve[row] @ scores
        assert estimate.value == pytest.approx(coefficients.mean(), rel=1e-10)
        reference = scipy_stats.bootstrap(
            (coefficients,), np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(1)
        ).confidence_interval
        ends = coefficients.mean() + factor * (np.array([reference.low, reference.high]) - coefficients.mean())
        assert estimate.ci95 == pytest.approx(tuple(ends), abs=0.05 * (ends[1] - ends[0]))
