"""Fits published curves of a policy's gain over SFT as a function of its distance d = √KL, and finds their peak.

Gao, Schulman & Hilton 2022 (arXiv:2210.10760), §3: as a proxy reward is optimized, the gain over the SFT model follows

    RL:         R(d) = d (α − β log d)     peak at d = exp(α/β − 1), of height β d
    best-of-n:  R(d) = d (α − β d)         peak at d = α / 2β, of height α² / 4β

with R(0) = 0 by construction. Both are linear in (α, β), so least squares fits them. A fit only describes what was
observed. It is not used outside the observed range of d, or if the form does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .stats import Estimate

Form = Literal["rl", "best-of-n"]
Floats = NDArray[np.float64]

#: Smallest number of points: two for the coefficients, and one more to show a misfit.
MIN_POINTS = 3
MIN_PATTERN_POINTS = 6  # with fewer points, there are too few permutations for a p-value of 0.01
MISFIT_LEVEL = 0.01  # p-value below which residuals are not just noise
_MIN_ERROR = 0.1  # lower bound of standard errors, as a share of their median: limits a weight to 100 times the median


@dataclass(frozen=True)
class Peak:
    """The highest point of a fitted form.

    Attributes:
        d: Its distance from SFT, √nats.
        gain: Its gain over SFT, in the units of the score.
    """

    d: Estimate
    gain: Estimate

    @property
    def kl(self) -> float:
        """The KL of the peak, nats."""
        return self.d.value**2

    def to_json(self) -> dict[str, Any]:
        return {"d": self.d.to_json(), "kl": self.kl, "gain": self.gain.to_json()}


@dataclass(frozen=True)
class Fit:
    """A form fitted to the gains of checkpoints; see `fit_form`.

    Attributes:
        form: "rl" or "best-of-n".
        alpha: The coefficient α.
        beta: The coefficient β.
        points: Number of checkpoints fitted.
        observed: Smallest and largest d > 0.
        residuals: (points,) observed − fitted gain, by increasing d.
        r_squared: Share of the weighted variance of the gains that the form explains; None if the gains do not vary.
        scatter: Sum of weighted squared residuals, divided by its expectation under measurement noise; None if unknown.
        scatter_p: How often noise alone would give as large a scatter; None if unknown.
        pattern_p: How often shuffled residuals would be as smooth along d; None for too few points or an exact fit.
        fits: False if the residuals are smooth and, if the noise is known, larger than it; None if `pattern_p` is None.
        peak: The peak; None unless the data identify it.
        no_peak: A sentence on why there is no peak; None if there is a peak.
    """

    form: Form
    alpha: Estimate
    beta: Estimate
    points: int
    observed: tuple[float, float]
    residuals: tuple[float, ...]
    r_squared: float | None
    scatter: float | None
    scatter_p: float | None
    pattern_p: float | None
    fits: bool | None
    peak: Peak | None
    no_peak: str | None

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "alpha": self.alpha.to_json(),
            "beta": self.beta.to_json(),
            "observed": list(self.observed),
            "residuals": list(self.residuals),
            "peak": self.peak.to_json() if self.peak else None,
        }


def root_kl(kl: ArrayLike) -> Floats:
    """Computes d = √KL. A negative estimate of KL counts as 0.

    Args:
        kl: KL in nats, any shape.

    Returns:
        d in √nats, of the same shape.
    """
    return np.sqrt(np.maximum(np.asarray(kl, dtype=float), 0.0))


def fit_form(
    form: Form, kl: ArrayLike, gains: ArrayLike, *, errors: ArrayLike | None = None, seed: int, resamples: int = 2000
) -> Fit:
    """Fits a form by weighted least squares, with 95% intervals.

    Points have the weight 1/error², or equal weights if errors are unknown. Points with d = 0 carry no information on
    α and β and are left out.

    Intervals: with gains by prompt, prompts are resampled, the same for all checkpoints, so comparisons are paired.
    With means and errors, means are drawn from independent normal distributions. With means alone, α and β are drawn
    from their t distribution given the residuals. Each checkpoint is a separate policy, so points may scatter beyond
    measurement noise. If the residuals exceed that noise, the intervals are widened by √scatter (Birge 1932).

    A form does not fit if both of these hold: noise alone would give such residuals in less than 1% of cases, and
    residuals in random order would be as smooth along d in less than 1% (von Neumann's ratio, by permutation). Both are
    needed: large scatter may have no pattern, and noise that checkpoints share, such as that of the SFT score, is
    smooth along d. If errors are unknown, only the second condition is tested.

    A peak is reported if `fits` is not False, the interval of β lies above 0, and the interval of the peak's d lies
    within the observed range. The data then show both the rise and the fall, and the peak's gain is above 0.

    Args:
        form: "rl" or "best-of-n".
        kl: KL in nats: (K,) of each of K checkpoints, or (K, P) by prompt.
        gains: Scores minus those of the SFT model: (K, P) on the same P prompts, or (K,) means.
        errors: (K,) standard errors of mean gains; None if unknown, or if gains are (K, P), from which they follow.
        seed: Seed of the resamples.
        resamples: Number of resamples.

    Raises:
        ValueError: Shapes do not match, a value is not finite, fewer than three distinct d are above 0, or errors are
            given besides gains by prompt.
    """
    points = _prepare_points(kl, gains, errors)
    rng = np.random.default_rng(seed)
    distances, means, weights, n = points.distances, points.means, points.weights, points.n
    design = np.stack([distances, -_beta_term(form, distances)], axis=1)
    sqrt_weights = np.sqrt(weights)
    # Weighted least squares: scaling both sides by √weight gives an ordinary problem.
    coefficients = np.linalg.lstsq(design * sqrt_weights[:, None], means * sqrt_weights, rcond=None)[0]
    residuals = means - design @ coefficients
    misfit = float(weights @ residuals**2)

    draws, scatter, scatter_p = _draw_coefficients(form, points, design, coefficients, misfit, rng, resamples)
    pattern_p = _pattern_p_value(residuals * sqrt_weights, float(np.abs(means * sqrt_weights).max()), rng, resamples)
    fits = (
        None
        if pattern_p is None
        else not (pattern_p < MISFIT_LEVEL and (scatter_p is None or scatter_p < MISFIT_LEVEL))
    )

    alpha, beta = (_interval(float(coefficients[i]), draws[:, i], n) for i in (0, 1))
    observed = (float(distances[0]), float(distances[-1]))
    peak, no_peak = _find_peak(form, alpha, beta, draws, observed, fits, n)
    total_variation = float(weights @ (means - np.average(means, weights=weights)) ** 2)
    return Fit(
        form=form,
        alpha=alpha,
        beta=beta,
        points=len(means),
        observed=observed,
        residuals=tuple(residuals.tolist()),
        r_squared=1 - misfit / total_variation if total_variation > 0 else None,
        scatter=scatter,
        scatter_p=scatter_p,
        pattern_p=pattern_p,
        fits=fits,
        peak=peak,
        no_peak=no_peak,
    )


def _draw_coefficients(
    form: Form,
    points: _Points,
    design: Floats,
    coefficients: Floats,
    misfit: float,
    rng: np.random.Generator,
    resamples: int,
) -> tuple[Floats, float | None, float | None]:
    """Returns (B, 2) draws of (α, β), and the scatter of the points with its p-value (None if unknown)."""
    scatter = scatter_p = None
    if points.errors is None:
        draws = _draw_from_t(design, coefficients, misfit, rng, resamples)
    else:
        resampled_gains, resampled_d = _resample_points(points, points.errors, rng, resamples)
        draws = _solve_least_squares(form, resampled_d, resampled_gains, points.weights)
        scatter, scatter_p = _measure_scatter(misfit, resampled_gains - points.means, design, points.weights)
        if scatter is not None:
            # If points scatter more than their noise, the intervals are wider.
            draws = coefficients + (draws - coefficients) * math.sqrt(max(1.0, scatter))
    return draws[np.isfinite(draws).all(1)], scatter, scatter_p  # not finite if every d of a resample is 0


@dataclass(frozen=True)
class _Points:
    """K checkpoints with KL above 0, by increasing KL.

    Attributes:
        kl: (K,) or (K, P) KL, nats.
        gains: (K,) or (K, P) gains over SFT.
        means: (K,) mean gains.
        errors: (K,) standard errors of the means; None if unknown.
        distances: (K,) d, the root of the mean KL.
        weights: (K,) weights for least squares.
    """

    kl: Floats
    gains: Floats
    means: Floats
    errors: Floats | None
    distances: Floats
    weights: Floats

    @property
    def n(self) -> int:
        """The number of observations: prompts, or checkpoints if gains are means."""
        return self.gains.shape[1] if self.gains.ndim == 2 else len(self.means)


def _prepare_points(kl: ArrayLike, gains: ArrayLike, errors: ArrayLike | None) -> _Points:
    """Checks the input of `fit_form` and returns its points with weights. Raises the ValueError that it documents."""
    kls, gain_values = _check_gains(kl, gains)
    mean_kl = kls.mean(1) if kls.ndim == 2 else kls
    # The pattern test needs the residuals in order of distance.
    order = np.argsort(mean_kl, kind="stable")
    order = order[mean_kl[order] > 0]
    distances = root_kl(mean_kl[order])
    if len(np.unique(distances)) < MIN_POINTS:
        raise ValueError(
            f"A fit needs checkpoints at {MIN_POINTS} different KL values above 0, not {len(np.unique(distances))}."
        )
    kls, gain_values = kls[order], gain_values[order]
    means = gain_values.mean(1) if gain_values.ndim == 2 else gain_values
    if errors is not None and gain_values.ndim == 2:
        raise ValueError("Errors are computed from gains by prompt: pass only one of the two.")
    standard_errors = _standard_errors(gain_values) if errors is None else _check_errors(errors, len(mean_kl))[order]
    if standard_errors is not None and not np.median(standard_errors) > 0:
        standard_errors = None
    # Without the lower bound, one point with a standard error near 0 would decide the whole fit.
    weights = (
        np.ones(len(means))
        if standard_errors is None
        else 1 / np.maximum(standard_errors, _MIN_ERROR * np.median(standard_errors)) ** 2
    )
    return _Points(kls, gain_values, means, standard_errors, distances, weights)


def best_of_n_kl(n: ArrayLike) -> Floats:
    """Computes the KL of best-of-n to the policy that it samples from: log n − (n−1)/n.

    This is exact if scores are continuous, so that no two samples tie (Stiennon et al. 2020, arXiv:2009.01325, App.
    G.3). Otherwise it is an upper bound, for example for a language model, which may write the same completion twice
    (Beirami et al. 2024, arXiv:2401.01879).

    Args:
        n: The number of samples, n ≥ 1, any shape.

    Returns:
        KL in nats, of the same shape.
    """
    sizes = np.asarray(n, dtype=float)
    return np.log(sizes) - (sizes - 1) / sizes


def best_of_n_weights(pool_size: int, n: int) -> Floats:
    """Computes, for each rank, the probability that it is the best of n samples drawn without replacement.

    Args:
        pool_size: The number of samples, N.
        n: The number of samples drawn, 1 ≤ n ≤ N.

    Returns:
        (N,) C(i−1, n−1) / C(N, n) for rank i = 1 … N, lowest first; they sum to 1.
    """
    # Binomials could overflow, so weights are computed from the top rank down: w(i − 1) = w(i) · (i − n) / (i − 1).
    ranks = np.arange(pool_size, 1, -1, dtype=float)
    return np.asarray(np.cumprod(np.r_[n / pool_size, np.maximum(ranks - n, 0) / (ranks - 1)])[::-1], dtype=float)


def expected_best_of_n(proxy: ArrayLike, sizes: Sequence[int], *, judge: ArrayLike | None = None) -> Floats:
    """Computes the expected score of the sample that the proxy ranks first among n.

    The average is over all subsets of size n. It is unbiased for every n ≤ N, with far less noise than a single draw
    (Nakano et al. 2021, arXiv:2112.09332). Ties of the proxy count as broken at random.

    Args:
        proxy: (P, N) the proxy's scores of a pool of N samples per prompt.
        sizes: The values of n.
        judge: (P, N) the scores to average, of the same samples; None for the proxy's scores.

    Returns:
        (len(sizes), P) the expected score of the best of n for each n and prompt.

    Raises:
        ValueError: A score is not finite.
    """
    proxy_scores = np.asarray(proxy, dtype=float)
    scores = proxy_scores if judge is None else np.asarray(judge, dtype=float)
    if not (np.isfinite(proxy_scores).all() and np.isfinite(scores).all()):
        raise ValueError("A score of the pool is not finite.")
    order = np.argsort(proxy_scores, axis=1, kind="stable")
    proxy_scores, scores = (np.take_along_axis(array, order, axis=1) for array in (proxy_scores, scores))
    starts_tie = np.ones(scores.shape, dtype=bool)
    starts_tie[:, 1:] = proxy_scores[:, 1:] != proxy_scores[:, :-1]
    # Each set of tied samples gets a number; `starts_tie` is True in column 0, so no set has samples of two prompts.
    tie_ids = np.cumsum(starts_tie.ravel()) - 1
    tie_means = (np.bincount(tie_ids, weights=scores.ravel()) / np.bincount(tie_ids))[tie_ids].reshape(scores.shape)
    return np.stack([tie_means @ best_of_n_weights(scores.shape[1], n) for n in sizes])


def _beta_term(form: Form, d: Floats) -> Floats:
    """Returns the term whose coefficient is −β: d log d, or d²."""
    if form == "rl":
        # d log d tends to 0 with d, but log 0 is not finite.
        return d * np.log(np.where(d > 0, d, 1.0))
    return d * d


def _check_gains(kl: ArrayLike, gains: ArrayLike) -> tuple[Floats, Floats]:
    kls, gain_values = np.asarray(kl, dtype=float), np.asarray(gains, dtype=float)
    if (
        gain_values.ndim not in (1, 2)
        or gain_values.size == 0
        or kls.shape not in {gain_values.shape, gain_values.shape[:1]}
    ):
        raise ValueError(
            f"Gains must have the shape (checkpoints,) or (checkpoints, prompts), not {gain_values.shape}, and KL the "
            f"same shape or (checkpoints,), not {kls.shape}."
        )
    if not (np.isfinite(kls).all() and np.isfinite(gain_values).all()):
        raise ValueError("A KL or a gain is not finite: remove that checkpoint.")
    return kls, gain_values


def _standard_errors(gains: Floats) -> Floats | None:
    """Returns (K,) standard errors of the means over prompts; None if each checkpoint has only one number."""
    if gains.ndim == 1 or gains.shape[1] < 2:
        return None
    return gains.std(1, ddof=1) / math.sqrt(gains.shape[1])


def _check_errors(errors: ArrayLike, size: int) -> Floats:
    values = np.asarray(errors, dtype=float)
    if values.shape != (size,) or not (np.isfinite(values) & (values >= 0)).all():
        raise ValueError(f"Standard errors must be {size} numbers of at least 0, one per checkpoint.")
    return values


def _resample_points(
    points: _Points, errors: Floats, rng: np.random.Generator, resamples: int
) -> tuple[Floats, Floats]:
    """Returns (B, K) resampled mean gains and (B, K) resampled d; d is (K,) if KL is known by checkpoint only."""
    if points.gains.ndim == 1:
        return points.means + errors * rng.standard_normal((resamples, len(points.means))), points.distances
    n_prompts = points.n
    # KL and gains of every checkpoint use the same resampled prompts, which keeps them paired.
    weights = rng.multinomial(n_prompts, np.full(n_prompts, 1 / n_prompts), size=resamples) / n_prompts
    return weights @ points.gains.T, root_kl(weights @ points.kl.T) if points.kl.ndim == 2 else points.distances


def _measure_scatter(
    misfit: float, noise: Floats, design: Floats, weights: Floats
) -> tuple[float | None, float | None]:
    """Returns `misfit` divided by the mean misfit of (B, K) noise, and its p-value; None, None if all noise is 0."""
    # The residuals of fitting the form to the noise alone. The form is linear, so the true curve cancels.
    sqrt_weights = np.sqrt(weights)
    residuals = noise - (
        np.linalg.lstsq(design * sqrt_weights[:, None], (noise * sqrt_weights).T, rcond=None)[0].T @ design.T
    )
    noise_misfit = (residuals**2) @ weights
    if not noise_misfit.mean() > 0:
        return None, None
    # The observed misfit counts as one of the draws, so the p-value is never 0.
    return float(misfit / noise_misfit.mean()), float((1 + (noise_misfit >= misfit).sum()) / (1 + len(noise_misfit)))


def _solve_least_squares(form: Form, d: Floats, y: Floats, weights: Floats) -> Floats:
    """Fits each row of y (B, K) at d (K,) or (B, K) by the normal equations; returns (α, β) of each row, (B, 2)."""
    g = _beta_term(form, d)
    dd, dg, gg = ((weights * column * other).sum(-1) for column, other in ((d, d), (d, g), (g, g)))
    dy, gy = ((weights * column * y).sum(-1) for column in (d, g))
    determinant = dd * gg - dg * dg
    return np.stack([(gg * dy - dg * gy) / determinant, (dg * dy - dd * gy) / determinant], axis=1)


def _draw_from_t(design: Floats, center: Floats, misfit: float, rng: np.random.Generator, resamples: int) -> Floats:
    """Draws (B, 2) coefficients from their t distribution; the error variance is estimated from the residuals."""
    factor = np.linalg.cholesky(np.linalg.inv(design.T @ design))
    # Draws of the error's standard deviation; a normal draw scaled by one of them is a draw from t.
    scale = np.sqrt(misfit / rng.chisquare(len(design) - 2, resamples))
    return center + scale[:, None] * (rng.standard_normal((resamples, 2)) @ factor.T)


def _pattern_p_value(residuals: Floats, scale: float, rng: np.random.Generator, resamples: int) -> float | None:
    """Computes how often (K,) residuals in random order have as small squared steps (von Neumann 1941, one-sided)."""
    # If all residuals are rounding error, compared to the largest gain (`scale`), there is no pattern to test.
    if len(residuals) < MIN_PATTERN_POINTS or np.ptp(residuals) <= 1e-12 * scale:
        return None
    shuffled_residuals = rng.permuted(np.tile(residuals, (resamples, 1)), axis=1)
    steps = np.square(np.diff(shuffled_residuals, axis=1)).sum(1)
    return float((1 + (steps <= np.square(np.diff(residuals)).sum()).sum()) / (1 + resamples))


def _interval(value: float, draws: Floats, n: int) -> Estimate:
    # "inverted_cdf" returns one of the draws, so infinite and finite draws are never interpolated.
    low, high = np.quantile(draws, [0.025, 0.975], method="inverted_cdf")
    return Estimate(value, (float(low), float(high)), n)


def _find_maximum(form: Form, alpha: Floats, beta: Floats) -> tuple[Floats, Floats]:
    """Returns d and gain of the highest point; infinite if β ≤ 0, since the form then rises without limit."""
    has_peak = beta > 0
    safe_beta = np.where(has_peak, beta, 1.0)
    with np.errstate(over="ignore"):
        if form == "rl":
            d = np.exp(alpha / safe_beta - 1)
            gain = safe_beta * d
        else:
            d = np.maximum(alpha, 0.0) / (2 * safe_beta)
            gain = safe_beta * d**2
    return np.where(has_peak, d, np.inf), np.where(has_peak, gain, np.inf)


def _find_peak(
    form: Form, alpha: Estimate, beta: Estimate, draws: Floats, observed: tuple[float, float], fits: bool | None, n: int
) -> tuple[Peak | None, str | None]:
    def no_peak(reason: str) -> tuple[None, str]:
        return None, f"No peak in the observed range: {reason}."

    if fits is False:
        return no_peak("the form does not fit these scores")
    if beta.ci95[0] <= 0:
        return no_peak(f"β is {beta.value:.3g} ({_format_range(beta.ci95)}), so the curve may not bend down at all")
    maximum = _find_maximum(form, np.array(alpha.value), np.array(beta.value))
    drawn_maxima = _find_maximum(form, draws[:, 0], draws[:, 1])
    d, gain = (_interval(float(value), drawn, n) for value, drawn in zip(maximum, drawn_maxima, strict=True))
    low, high = observed
    observed_range = f"d from {low:.3g} to {high:.3g} was observed"
    if not low <= d.value <= high:
        return no_peak(f"the curve would peak at d = {d.value:.3g}, and {observed_range}")
    if d.ci95[0] < low or d.ci95[1] > high:
        return no_peak(f"the peak lies somewhere in d = {_format_range(d.ci95)}, and {observed_range}")
    return Peak(d, gain), None


def _format_range(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.3g} to {ends[1]:.3g}"
