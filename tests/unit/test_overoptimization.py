"""The published forms, their peaks, what a fit refuses to say, and best-of-n against all subsets."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_zoo.evaluation.overoptimization import best_of_n_kl, best_of_n_weights, expected_best_of_n, fit_form

FORMS = ("rl", "best-of-n")


def peak_of(form: str, alpha: float, beta: float) -> tuple[float, float]:
    """Place and height by the formulas of arXiv:2210.10760, put down again."""
    if form == "rl":
        place = math.exp(alpha / beta - 1)
        return place, place * (alpha - beta * math.log(place))
    return alpha / (2 * beta), alpha**2 / (4 * beta)


def by_prompt(truth: np.ndarray, seed: int, *, prompts: int = 80, noise: float = 2.0, scatter: float = 0.0):
    """(K, P) gains whose noise they share by prompt (the SFT score is subtracted), and scatter of checkpoints."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=prompts) + noise * rng.normal(size=(len(truth) + 1, prompts))
    return truth[:, None] + scores[1:] - scores[0] + scatter * rng.normal(size=(len(truth), 1))


def gain(form: str, d: np.ndarray, alpha: float, beta: float) -> np.ndarray:
    """R(d) by the formulas of arXiv:2210.10760, put down again."""
    return alpha * d - beta * (d * np.log(d) if form == "rl" else d * d)


def curve(form: str, alpha: float, beta: float, *, furthest: float = 6.0, size: int = 8) -> tuple[np.ndarray, ...]:
    d = np.linspace(0.6, furthest, size)
    return d, gain(form, d, alpha, beta)


# ---- recovering what was put in


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", ["means", "errors", "prompts"])
def test_fit_recovers_noise_free_coefficients_and_peak(form, shape):
    alpha, beta = (2.0, 1.0) if form == "rl" else (2.0, 0.3)
    d, truth = curve(form, alpha, beta)
    gains = np.repeat(truth[:, None], 30, axis=1) if shape == "prompts" else truth
    errors = np.linspace(0.001, 0.002, len(d)) if shape == "errors" else None
    result = fit_form(form, d**2, gains, errors=errors, seed=0)
    assert (result.alpha.value, result.beta.value) == pytest.approx((alpha, beta), rel=1e-12)
    assert result.r_squared == pytest.approx(1.0, abs=1e-12)
    assert max(np.abs(result.residuals)) < 1e-12 and result.fits is not False
    assert result.peak is not None and result.no_peak is None
    assert (result.peak.d.value, result.peak.gain.value) == pytest.approx(peak_of(form, alpha, beta), rel=1e-11)
    assert result.peak.kl == pytest.approx(peak_of(form, alpha, beta)[0] ** 2, rel=1e-11)


@pytest.mark.parametrize("form", FORMS)
def test_fit_intervals_have_nominal_coverage(form):
    """Those of the coefficients are also held against scipy's: tests/numerics/test_overoptimization_reference.py."""
    alpha, beta = (2.0, 1.0) if form == "rl" else (2.0, 0.3)
    d, truth = curve(form, alpha, beta)
    expected = (alpha, beta, *peak_of(form, alpha, beta))
    hits = np.zeros(4)
    for seed in range(100):
        result = fit_form(form, d**2, by_prompt(truth, seed), seed=seed, resamples=300)
        intervals = [one.ci95 for one in (result.alpha, result.beta, result.peak.d, result.peak.gain)]
        hits += [low <= value <= high for (low, high), value in zip(intervals, expected, strict=True)]
    assert (hits >= 87).all() and (hits <= 100).all()


def test_scatter_of_checkpoints_is_reported_and_is_no_misfit():
    """Each checkpoint off the curve by more than the noise of measurement: resampled prompts alone see none of it."""
    d, truth = curve("rl", 2.0, 1.0)
    calm, result = (fit_form("rl", d**2, by_prompt(truth, 0, scatter=each), seed=0) for each in (0.0, 3.0))
    assert result.scatter > 5 and result.scatter_p < 0.01 and result.fits is True
    wide, narrow = (one.alpha.ci95[1] - one.alpha.ci95[0] for one in (result, calm))
    assert wide / narrow == pytest.approx(result.scatter**0.5, rel=0.1), "Birge's factor"


def test_kl_by_prompt_is_resampled_with_the_scores():
    d, truth = curve("rl", 2.0, 1.0)
    gains = by_prompt(truth, 3, noise=0.05)
    known = fit_form("rl", d**2, gains, seed=0)
    same = fit_form("rl", np.repeat(d[:, None] ** 2, gains.shape[1], axis=1), gains, seed=0)
    assert same.alpha.ci95 == pytest.approx(known.alpha.ci95, rel=1e-9)
    varied = np.random.default_rng(0).exponential(size=gains.shape)
    varied *= d[:, None] ** 2 / varied.mean(1, keepdims=True)
    result = fit_form("rl", varied, gains, seed=0)
    assert result.alpha.value == pytest.approx(known.alpha.value, rel=1e-9)
    assert result.observed == pytest.approx(known.observed, rel=1e-12)
    wide, narrow = (one.peak.d.ci95[1] - one.peak.d.ci95[0] for one in (result, known))
    assert wide > 2 * narrow


def test_weight_of_a_point_is_bounded():
    """A collapsed policy scores the same on every prompt: its error is 0, and the curve need not go through it."""
    d, truth = curve("rl", 2.0, 1.0)
    off = truth + np.where(np.arange(len(d)) == 7, -3.0, 0.0)
    certain, floored = (fit_form("rl", d**2, off, errors=[*[0.1] * 7, last], seed=0) for last in (0.0, 0.01))
    assert certain.alpha.value == floored.alpha.value and certain.beta.value == floored.beta.value
    assert abs(certain.residuals[-1]) > 0.01


# ---- peaks


@pytest.mark.parametrize("form", FORMS)
def test_peak_beyond_observed_range_is_not_reported(form):
    alpha, beta = (2.0, 1.0) if form == "rl" else (2.0, 0.3)
    place, _ = peak_of(form, alpha, beta)
    d, truth = curve(form, alpha, beta, furthest=0.9 * place)
    result = fit_form(form, d**2, truth, errors=np.full(len(d), 1e-3), seed=0)
    assert result.peak is None and "would peak at d =" in result.no_peak
    d, truth = curve(form, alpha, beta, furthest=1.05 * place)
    result = fit_form(form, d**2, truth, errors=np.full(len(d), 0.2), seed=0)
    assert result.peak is None and "the peak lies somewhere in" in result.no_peak
    d, truth = d[4:] + 3 * place, gain(form, d[4:] + 3 * place, alpha, beta)
    result = fit_form(form, d**2, truth, errors=np.full(len(d), 1e-3), seed=0)
    assert result.peak is None and "would peak at d =" in result.no_peak


def test_rising_curve_has_no_peak_and_few_points_no_fit_test():
    d = np.linspace(0.5, 4, 4)
    straight = fit_form("rl", d**2, 1.5 * d + 0.01 * (-1) ** np.arange(4), errors=np.full(4, 0.05), seed=0)
    assert straight.beta.value == pytest.approx(0.0, abs=0.05) and straight.peak is None
    assert "may not bend down" in straight.no_peak
    assert straight.fits is None and straight.pattern_p is None and straight.scatter is not None
    assert fit_form("best-of-n", d**2, d + 0.3 * d * d, errors=np.full(4, 0.05), seed=0).peak is None


# ---- misfit


@pytest.mark.parametrize("form", FORMS)
def test_misfit_is_reported(form):
    d = np.linspace(0.3, 8, 30)
    # Rises to a plateau, then breaks down at once: neither form.
    measured = by_prompt(np.where(d < 4, np.minimum(d, 2.0), 2.0 - 4 * (d - 4)), 0)
    for result in (
        fit_form(form, d**2, measured, seed=0),
        fit_form(form, d**2, measured.mean(1), errors=measured.std(1) / 80**0.5, seed=0),
        fit_form(form, d**2, measured.mean(1), seed=0),
    ):
        assert result.fits is False and result.pattern_p < 0.01
        assert result.peak is None and "does not fit" in result.no_peak


def test_noise_shared_by_checkpoints_is_no_misfit():
    """The SFT score is subtracted from all: its noise shifts them together, and the residuals are smooth along d."""
    d, truth = curve("rl", 2.0, 1.0, size=30)
    smooth = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        gains = truth[:, None] + 0.1 * rng.normal(size=(30, 60)) + 2.0 * rng.normal(size=60)
        result = fit_form("rl", d**2, gains, seed=seed)
        smooth += result.pattern_p < 0.01
        assert result.fits is True and result.scatter_p >= 0.01
    assert smooth >= 10


# ---- what is left out, and what is refused


def test_fit_ignores_points_at_reference_and_order():
    d, truth = curve("rl", 2.0, 1.0)
    noisy = truth + np.random.default_rng(0).normal(size=len(d)) * 0.1
    plain = fit_form("rl", d**2, noisy, seed=0)
    more = fit_form("rl", [-1e-7, 0.0, *d**2], [0.4, -7.0, *noisy], seed=0)
    assert more == plain and plain.points == len(d)
    turned = np.random.default_rng(1).permutation(len(d))
    assert fit_form("rl", (d**2)[turned], noisy[turned], seed=0) == plain


def test_fit_is_seeded_and_json_serializable():
    d, truth = curve("rl", 2.0, 1.0)
    measured = by_prompt(truth, 5)
    first = fit_form("rl", d**2, measured, seed=1)
    assert fit_form("rl", d**2, measured, seed=1) == first != fit_form("rl", d**2, measured, seed=2)
    document = json.loads(json.dumps(first.to_json(), allow_nan=False))
    assert document["alpha"]["n"] == 80 and document["points"] == 8 and document["observed"] == [0.6, 6.0]
    assert document["peak"]["kl"] == document["peak"]["d"]["value"] ** 2 and document["no_peak"] is None
    json.dumps(fit_form("rl", d**2, np.zeros(8), seed=0).to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("kl", "gains", "options", "message"),
    [
        ([1, 2], [1, 2], {}, "3 different KL values above 0, not 2"),
        ([0, 0, 1, 1, 2], [0, 0, 1, 1, 2], {}, "3 different KL values above 0, not 2"),
        ([1, 2, 3], [1, 2], {}, r"not \(2,\).* not \(3,\)"),
        ([1, 2, 3], [1, math.nan, 2], {}, "not finite"),
        ([1, 2, math.inf], [1, 1, 2], {}, "not finite"),
        ([1, 2, 3], [1, 1, 2], {"errors": [1, 2]}, "3 numbers"),
        ([1, 2, 3], [1, 1, 2], {"errors": [1, 2, -1]}, "3 numbers"),
        ([1, 2, 3], [[1, 1], [2, 2], [3, 3]], {"errors": [1, 2, 1]}, "only one of the two"),
    ],
)
def test_fit_rejects_bad_input(kl, gains, options, message):
    with pytest.raises(ValueError, match=message):
        fit_form("rl", kl, gains, seed=0, **options)


# ---- best of n


def test_best_of_n_kl_matches_formula():
    np.testing.assert_allclose(best_of_n_kl([1, 2, 64]), [0.0, math.log(2) - 0.5, math.log(64) - 63 / 64], rtol=1e-15)


@pytest.mark.parametrize(("pool", "n"), [(1, 1), (5, 1), (5, 5), (7, 3), (64, 16)])
def test_best_of_n_weights_are_those_of_order_statistics(pool, n):
    exact = [math.comb(i - 1, n - 1) / math.comb(pool, n) for i in range(1, pool + 1)]
    np.testing.assert_allclose(best_of_n_weights(pool, n), exact, rtol=1e-13)
    assert best_of_n_weights(pool, n).sum() == pytest.approx(1.0, rel=1e-13)


def over_all_subsets(proxy: list[int], judge: list[int], n: int) -> float:
    """The mean over all subsets of the judge's score of the proxy's favourite, ties shared among favourites."""
    results = []
    for chosen in itertools.combinations(range(len(proxy)), n):
        top = max(proxy[i] for i in chosen)
        favourites = [judge[i] for i in chosen if proxy[i] == top]
        results.append(sum(favourites) / len(favourites))
    return sum(results) / len(results)


@given(rows=st.lists(st.tuples(st.integers(0, 3), st.integers(-5, 5)), min_size=1, max_size=7))
@settings(deadline=None, max_examples=80)
def test_expected_best_of_n_is_mean_over_all_subsets(rows):
    proxy, judge = ([row[side] for row in rows] for side in (0, 1))
    sizes = range(1, len(rows) + 1)
    np.testing.assert_allclose(
        expected_best_of_n([proxy], sizes, judge=[judge])[:, 0],
        [over_all_subsets(proxy, judge, n) for n in sizes],
        atol=1e-12,
    )
    np.testing.assert_allclose(
        expected_best_of_n([proxy], sizes)[:, 0], [over_all_subsets(proxy, proxy, n) for n in sizes], atol=1e-12
    )
    both = expected_best_of_n([proxy, proxy], sizes, judge=[[9] * len(rows), [0] * len(rows)])
    np.testing.assert_allclose(both, [[9, 0]] * len(rows), atol=1e-12)  # prompts are kept apart


def test_expected_best_of_n_rejects_nonfinite_scores():
    with pytest.raises(ValueError, match="not finite"):
        expected_best_of_n([[1.0, math.nan]], [1])
