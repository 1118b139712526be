"""The published forms, their peaks, what a fit refuses to say, and best-of-n against all subsets."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_zoo.evaluation.overoptimisation import (
    Fit,
    best_of_n,
    best_of_n_kl,
    best_of_n_weights,
    fit,
    gain,
    root_kl,
)

FORMS = ("rl", "best-of-n")
EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence"


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


def curve(form: str, alpha: float, beta: float, *, furthest: float = 6.0, size: int = 8) -> tuple[np.ndarray, ...]:
    d = np.linspace(0.6, furthest, size)
    return d, gain(form, d, alpha, beta)


# ---- forms


def test_distance_is_the_root_of_kl_and_a_negative_estimate_is_0():
    np.testing.assert_array_equal(root_kl([-1e-7, 0.0, 4.0]), [0.0, 0.0, 2.0])


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_exactly_0_at_0_without_a_warning(form, recwarn):
    np.testing.assert_array_equal(gain(form, [0.0, 0.0], 3.0, 2.0), [0.0, 0.0])
    assert not recwarn.list


def test_literal_values():
    np.testing.assert_allclose(gain("rl", [1.0, math.e, 2.0], 3.0, 2.0), [3.0, math.e, 6 - 4 * math.log(2)], rtol=1e-14)
    np.testing.assert_allclose(gain("best-of-n", [1.0, 2.0], 3.0, 2.0), [1.0, -2.0], rtol=1e-14)


# ---- recovering what was put in


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", ["means", "errors", "prompts"])
def test_noise_free_coefficients_and_peak_are_recovered_exactly(form, shape):
    alpha, beta = (2.0, 1.0) if form == "rl" else (2.0, 0.3)
    d, truth = curve(form, alpha, beta)
    gains = np.repeat(truth[:, None], 30, axis=1) if shape == "prompts" else truth
    errors = np.linspace(0.001, 0.002, len(d)) if shape == "errors" else None
    found = fit(form, d**2, gains, errors=errors, seed=0)
    assert (found.alpha.value, found.beta.value) == pytest.approx((alpha, beta), rel=1e-12)
    assert found.r_squared == pytest.approx(1.0, abs=1e-12)
    assert max(np.abs(found.residuals)) < 1e-12 and found.fits is not False
    assert found.peak is not None and found.no_peak is None
    assert (found.peak.d.value, found.peak.gain.value) == pytest.approx(peak_of(form, alpha, beta), rel=1e-11)
    assert found.peak.kl == pytest.approx(peak_of(form, alpha, beta)[0] ** 2, rel=1e-11)
    np.testing.assert_allclose(found([0.0, *d]), [0.0, *truth], atol=1e-11)


def covered(form: str, mode: str, *, draws: int = 200, scatter: float = 0.0) -> dict[str, float]:
    alpha, beta = (2.0, 1.0) if form == "rl" else (2.0, 0.3)
    d, truth = curve(form, alpha, beta)
    place, height = peak_of(form, alpha, beta)
    errors = np.linspace(0.2, 0.5, len(d)) if mode == "errors" else None
    hits = {"alpha": 0, "beta": 0, "place": 0, "height": 0, "misfit": 0}
    told = 0
    for seed in range(draws):
        rng = np.random.default_rng(seed)
        if mode == "prompts":
            gains = by_prompt(truth, seed, scatter=scatter)
        else:
            gains = truth + (0.3 if errors is None else errors) * rng.normal(size=len(d))
        found = fit(form, d**2, gains, errors=errors, seed=seed, resamples=400)
        pairs = {"alpha": (found.alpha, alpha), "beta": (found.beta, beta)}
        if found.peak:
            told += 1
            pairs |= {"place": (found.peak.d, place), "height": (found.peak.gain, height)}
        for name, (estimate, value) in pairs.items():
            hits[name] += estimate.ci95[0] <= value <= estimate.ci95[1]
        hits["misfit"] += found.fits is False
    return {name: count / (told if name in ("place", "height") else draws) for name, count in hits.items()} | {
        "told": told / draws
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", ["prompts", "errors", "means"])
def test_intervals_cover_the_truth_about_as_often_as_they_say(form, mode):
    share = covered(form, mode)
    print(form, mode, share)
    assert all(0.90 <= share[name] <= 0.99 for name in ("alpha", "beta", "place", "height")), share
    assert share["told"] >= 0.95 and share["misfit"] <= 0.02


def test_scatter_of_checkpoints_widens_the_intervals_and_is_no_misfit():
    """Each checkpoint off the curve by more than the noise of measurement: resampled prompts alone see none of it."""
    share = covered("rl", "prompts", scatter=0.6)
    print("scatter", share)
    assert share["alpha"] >= 0.88 and share["beta"] >= 0.88 and share["misfit"] <= 0.02
    d, truth = curve("rl", 2.0, 1.0)
    found = fit("rl", d**2, by_prompt(truth, 0, scatter=3.0), seed=0)
    assert found.scatter > 5 and found.scatter_p < 0.01 and found.fits is True


def test_kl_by_prompt_is_resampled_with_the_scores():
    d, truth = curve("rl", 2.0, 1.0)
    gains = by_prompt(truth, 3, noise=0.05)
    known = fit("rl", d**2, gains, seed=0)
    same = fit("rl", np.repeat(d[:, None] ** 2, gains.shape[1], axis=1), gains, seed=0)
    assert same.alpha.ci95 == pytest.approx(known.alpha.ci95, rel=1e-9)
    varied = np.random.default_rng(0).exponential(size=gains.shape)
    varied *= d[:, None] ** 2 / varied.mean(1, keepdims=True)
    found = fit("rl", varied, gains, seed=0)
    assert found.alpha.value == pytest.approx(known.alpha.value, rel=1e-9)
    assert found.observed == pytest.approx(known.observed, rel=1e-12)
    wide, narrow = (one.peak.d.ci95[1] - one.peak.d.ci95[0] for one in (found, known))
    assert wide > 2 * narrow


def test_errors_weigh_the_points():
    """A point without weight may say anything; equal weights would follow it."""
    d, truth = curve("rl", 2.0, 1.0)
    bent = truth + np.where(np.arange(len(d)) == 3, 5.0, 0.0)
    errors = np.where(np.arange(len(d)) == 3, 1e4, 0.01)
    assert fit("rl", d**2, bent, errors=errors, seed=0).beta.value == pytest.approx(1.0, abs=1e-6)
    assert abs(fit("rl", d**2, bent, seed=0).beta.value - 1.0) > 0.05


def test_no_point_outweighs_100_others():
    """A collapsed policy scores the same on every prompt: its error is 0, and the curve need not go through it."""
    d, truth = curve("rl", 2.0, 1.0)
    off = truth + np.where(np.arange(len(d)) == 7, -3.0, 0.0)
    certain, floored = (fit("rl", d**2, off, errors=[*[0.1] * 7, last], seed=0) for last in (0.0, 0.01))
    assert certain.alpha.value == floored.alpha.value and certain.beta.value == floored.beta.value
    assert abs(certain.residuals[-1]) > 0.01


# ---- peaks


@pytest.mark.parametrize("form", FORMS)
def test_a_peak_beyond_the_observed_range_is_not_told(form):
    alpha, beta = (2.0, 1.0) if form == "rl" else (2.0, 0.3)
    place, _ = peak_of(form, alpha, beta)
    d, truth = curve(form, alpha, beta, furthest=0.9 * place)
    found = fit(form, d**2, truth, errors=np.full(len(d), 1e-3), seed=0)
    assert found.peak is None and "would peak at d =" in found.no_peak
    d, truth = curve(form, alpha, beta, furthest=1.05 * place)
    found = fit(form, d**2, truth, errors=np.full(len(d), 0.2), seed=0)
    assert found.peak is None and "the peak lies somewhere in" in found.no_peak
    d, truth = d[4:] + 3 * place, gain(form, d[4:] + 3 * place, alpha, beta)
    found = fit(form, d**2, truth, errors=np.full(len(d), 1e-3), seed=0)
    assert found.peak is None and "would peak at d =" in found.no_peak


def test_a_rising_curve_has_no_peak():
    d = np.linspace(0.5, 4, 10)
    straight = fit("rl", d**2, 1.5 * d, errors=np.full(10, 0.05), seed=0)
    assert straight.beta.value == pytest.approx(0.0, abs=1e-12) and straight.peak is None
    assert "may not bend down" in straight.no_peak
    assert fit("best-of-n", d**2, d + 0.3 * d * d, errors=np.full(10, 0.05), seed=0).peak is None


@pytest.mark.parametrize("form", FORMS)
def test_a_peak_is_seldom_told_of_curves_without_one(form):
    d = np.linspace(0.5, 5, 9)
    told = sum(
        fit(form, d**2, by_prompt(0.6 * d, seed), seed=seed, resamples=300).peak is not None for seed in range(200)
    )
    print(form, "peaks told of straight lines:", told / 200)
    assert told / 200 <= 0.03


# ---- misfit


def collapse(d: np.ndarray) -> np.ndarray:
    """Rises to a plateau, then breaks down at once: neither form."""
    return np.where(d < 4, np.minimum(d, 2.0), 2.0 - 4 * (d - 4))


@pytest.mark.parametrize("form", FORMS)
def test_a_form_that_does_not_fit_is_said_not_to(form):
    d = np.linspace(0.3, 8, 30)
    measured = by_prompt(collapse(d), 0)
    for found in (
        fit(form, d**2, measured, seed=0),
        fit(form, d**2, measured.mean(1), errors=measured.std(1) / 80**0.5, seed=0),
        fit(form, d**2, measured.mean(1), seed=0),
    ):
        assert found.fits is False and found.pattern_p < 0.01
        assert found.peak is None and "does not fit" in found.no_peak


def test_the_wrong_form_is_told_from_the_right_one_where_the_noise_allows():
    d, truth = curve("rl", 2.0, 1.0, furthest=10.0, size=20)
    measured = by_prompt(truth, 0, prompts=500)
    assert fit("rl", d**2, measured, seed=0).fits is True
    assert fit("best-of-n", d**2, measured, seed=0).fits is False


def test_noise_that_checkpoints_share_is_no_misfit():
    """The SFT score is subtracted from all: its noise shifts them together, and the residuals are smooth along d."""
    d, truth = curve("rl", 2.0, 1.0, size=30)
    smooth = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        gains = truth[:, None] + 0.1 * rng.normal(size=(30, 60)) + 2.0 * rng.normal(size=60)
        found = fit("rl", d**2, gains, seed=seed)
        smooth += found.pattern_p < 0.01
        assert found.fits is True and found.scatter_p >= 0.01
    assert smooth >= 10


def test_with_few_points_nothing_is_said_of_the_fit():
    d, truth = curve("rl", 2.0, 1.0, size=4)
    found = fit("rl", d**2, truth + 0.1 * (-1) ** np.arange(4), errors=np.full(4, 0.1), seed=0)
    assert found.fits is None and found.pattern_p is None and found.scatter is not None


# ---- what is left out, and what is refused


def test_points_at_the_reference_are_left_out_and_order_does_not_matter():
    d, truth = curve("rl", 2.0, 1.0)
    noisy = truth + np.random.default_rng(0).normal(size=len(d)) * 0.1
    plain = fit("rl", d**2, noisy, seed=0)
    more = fit("rl", [-1e-7, 0.0, *d**2], [0.4, -7.0, *noisy], seed=0)
    assert more == plain and plain.points == len(d)
    turned = np.random.default_rng(1).permutation(len(d))
    assert fit("rl", (d**2)[turned], noisy[turned], seed=0) == plain


def test_a_fit_is_seeded_and_plain_json():
    d, truth = curve("rl", 2.0, 1.0)
    measured = by_prompt(truth, 5)
    first = fit("rl", d**2, measured, seed=1)
    assert fit("rl", d**2, measured, seed=1) == first != fit("rl", d**2, measured, seed=2)
    document = json.loads(json.dumps(first.to_json(), allow_nan=False))
    assert document["alpha"]["n"] == 80 and document["points"] == 8 and document["observed"] == [0.6, 6.0]
    assert document["peak"]["kl"] == document["peak"]["d"]["value"] ** 2 and document["no_peak"] is None
    json.dumps(fit("rl", d**2, np.zeros(8), seed=0).to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("kl", "gains", "options", "message"),
    [
        ([1, 2], [1, 2], {}, "3 different KL above 0, not 2"),
        ([0, 0, 1, 1, 2], [0, 0, 1, 1, 2], {}, "3 different KL above 0, not 2"),
        ([1, 2, 3], [1, 2], {}, r"\(3,\) and \(2,\)"),
        ([1, 2, 3], [1, math.nan, 2], {}, "not finite"),
        ([1, 2, math.inf], [1, 1, 2], {}, "not finite"),
        ([1, 2, 3], [1, 1, 2], {"errors": [1, 2]}, "3 numbers"),
        ([1, 2, 3], [1, 1, 2], {"errors": [1, 2, -1]}, "3 numbers"),
        ([1, 2, 3], [[1, 1], [2, 2], [3, 3]], {"errors": [1, 2, 1]}, "one or the other"),
    ],
)
def test_bad_input_is_refused(kl, gains, options, message):
    with pytest.raises(ValueError, match=message):
        fit("rl", kl, gains, seed=0, **options)


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="rl, best-of-n, not 'ppo'"):
        fit("ppo", [1, 2, 3], [1, 2, 3], seed=0)


# ---- best of n


def test_kl_of_best_of_n():
    np.testing.assert_allclose(best_of_n_kl([1, 2, 64]), [0.0, math.log(2) - 0.5, math.log(64) - 63 / 64], rtol=1e-15)
    with pytest.raises(ValueError, match="n >= 1, not 0"):
        best_of_n_kl([4, 0])


@pytest.mark.parametrize("n", [2, 5, 16])
def test_kl_of_best_of_n_is_exact_without_ties_and_a_bound_with_them(n):
    """Of m equally likely completions, best-of-n takes that of rank i with chance (i^n − (i−1)^n) / m^n."""
    for m, least in ((10_000, 0.999), (4, 0.0)):
        ranks = np.arange(1, m + 1) / m
        chosen = ranks**n - (ranks - 1 / m) ** n
        exact = float((chosen * np.log(np.maximum(chosen, 1e-300) * m)).sum())
        assert least * best_of_n_kl(n) <= exact <= best_of_n_kl(n)


@pytest.mark.parametrize(("pool", "n"), [(1, 1), (5, 1), (5, 5), (7, 3), (64, 16)])
def test_weights_are_those_of_the_order_statistic(pool, n):
    exact = [math.comb(i - 1, n - 1) / math.comb(pool, n) for i in range(1, pool + 1)]
    np.testing.assert_allclose(best_of_n_weights(pool, n), exact, rtol=1e-13)
    assert best_of_n_weights(pool, n).sum() == pytest.approx(1.0, rel=1e-13)


def test_weights_of_a_large_pool_stay_exact():
    weights = best_of_n_weights(4000, 2000)
    assert np.isfinite(weights).all() and weights.sum() == pytest.approx(1.0, rel=1e-10)
    assert weights[-1] == 0.5 and (weights[:1999] == 0).all()


def over_all_subsets(proxy: list[int], judge: list[int], n: int) -> float:
    """The mean over all subsets of the judge's score of the proxy's favourite, ties shared among favourites."""
    found = []
    for chosen in itertools.combinations(range(len(proxy)), n):
        top = max(proxy[i] for i in chosen)
        favourites = [judge[i] for i in chosen if proxy[i] == top]
        found.append(sum(favourites) / len(favourites))
    return sum(found) / len(found)


@given(rows=st.lists(st.tuples(st.integers(0, 3), st.integers(-5, 5)), min_size=1, max_size=7))
@settings(deadline=None, max_examples=80)
def test_best_of_n_is_the_mean_over_all_subsets_ties_and_all(rows):
    proxy, judge = ([row[side] for row in rows] for side in (0, 1))
    sizes = range(1, len(rows) + 1)
    np.testing.assert_allclose(
        best_of_n([proxy], sizes, judge=[judge])[:, 0], [over_all_subsets(proxy, judge, n) for n in sizes], atol=1e-12
    )
    np.testing.assert_allclose(
        best_of_n([proxy], sizes)[:, 0], [over_all_subsets(proxy, proxy, n) for n in sizes], atol=1e-12
    )


def test_prompts_are_kept_apart():
    rng = np.random.default_rng(0)
    proxy, judge = rng.integers(0, 4, size=(5, 8)), rng.normal(size=(5, 8))
    together = best_of_n(proxy, [1, 3, 8], judge=judge)
    assert together.shape == (3, 5)
    np.testing.assert_allclose(
        together,
        np.concatenate([best_of_n(proxy[i : i + 1], [1, 3, 8], judge=judge[i : i + 1]) for i in range(5)], axis=1),
    )
    np.testing.assert_allclose(together[0], judge.mean(1))


def test_the_estimate_is_unbiased_for_the_population():
    """Of normal scores: E max of 4 is 1.02938; a judge with correlation ½ sees half of it."""
    rng = np.random.default_rng(0)
    proxy = rng.normal(size=(20_000, 6))
    judge = 0.5 * proxy + rng.normal(size=proxy.shape)
    assert best_of_n(proxy, [4]).mean() == pytest.approx(1.02938, abs=0.015)
    assert best_of_n(proxy, [4], judge=judge).mean() == pytest.approx(1.02938 / 2, abs=0.02)


def test_best_of_n_feeds_the_fit():
    """Judge = proxy − its square: choosing hard by the proxy overshoots, and the form finds the top."""
    rng = np.random.default_rng(1)
    sizes = [1, 2, 4, 8, 16, 32, 64]
    proxy = rng.normal(size=(600, 64))
    scores = best_of_n(proxy, sizes, judge=proxy - 0.5 * np.maximum(proxy, 0) ** 2)
    found = fit("best-of-n", best_of_n_kl(sizes), scores - scores[0], seed=0)
    assert found.points == 6 and found.peak is not None
    best = root_kl(best_of_n_kl(sizes))[scores.mean(1).argmax()]
    assert abs(found.peak.d.value - best) < 0.4


@pytest.mark.parametrize(
    ("proxy", "sizes", "judge", "message"),
    [
        ([[1.0, 2.0]], [3], None, "pool of 2 needs 1 <= n <= 2, not 3"),
        ([[1.0, 2.0]], [0], None, "not 0"),
        ([1.0, 2.0], [1], None, "prompts, pool"),
        ([[1.0, 2.0]], [1], [[1.0]], "equal shape"),
        ([[1.0, math.nan]], [1], None, "not finite"),
    ],
)
def test_bad_pools_are_refused(proxy, sizes, judge, message):
    with pytest.raises(ValueError, match=message):
        best_of_n(proxy, sizes, judge=judge)


# ---- the runs in docs/evidence


def evidence(name: str) -> list[dict]:
    return json.loads((EVIDENCE / f"{name}.json").read_text(encoding="utf-8"))["runs"]


def gold_fit(run: dict, *, below: float = math.inf) -> Fit:
    """The gold utility of the training rollouts: means of 64, without their errors, from step 1 (the SFT model) on."""
    rows = [row for row in run["curve"] if row["kl"] < below]
    return fit("rl", [row["kl"] for row in rows], [row["gold"] - run["sft"]["judge"] for row in rows], seed=0)


def test_gold_of_the_runs_without_kl_peaks_and_then_collapses():
    peaks = []
    for run in [run for run in evidence("tiny-world-ablation") if run["beta"] == 0]:
        whole = gold_fit(run)
        assert whole.fits is False and whole.peak is None
        before = gold_fit(run, below=20)  # the collapse comes later
        assert before.fits is True
        peaks += [before.peak] if before.peak is not None else []
    assert len(peaks) >= 2
    for peak in peaks:
        assert 2 < peak.kl < 14 and 1.2 < peak.gain.value < 2.3


def test_gold_of_the_recipes_runs_has_no_peak():
    for run in evidence("tiny-world"):
        found = gold_fit(run)
        assert found.fits is True and found.peak is None
        assert "may not bend down" in found.no_peak or "No peak in the observed range" in found.no_peak
