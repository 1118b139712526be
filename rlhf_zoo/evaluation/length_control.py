"""The win rate that would remain if both sides were equally long.

Judges like long texts, and PPO learns to exploit that. Dubois et al. 2024 (arXiv:2404.04475, AlpacaEval 2) fit a
logistic regression of the preference on the length difference and predict at difference zero. This module fits their
intercept and length term. It leaves out their term for a prompt's difficulty, which is fitted over many models.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .logistic import fit_logistic, sigmoid
from .stats import Estimate, WinRate, group_indices, proportion, quantile_levels, resample_counts, win_rate

RIDGE = 1e-3  # the penalty ½·RIDGE·‖β‖² weighs about as much as a thousandth of one comparison's loss
#: Largest mean length difference, in standard deviations, without a warning. At 1, equally good policies get a win
#: rate of 0.36 instead of 0.5.
MAX_SHIFT = 0.5


@dataclass(frozen=True)
class LengthControlledWinRate(Estimate):
    """The win rate at equal length, and the plain win rate.

    Attributes:
        plain: The win rate without length control.
        slope: Log-odds per unit of tanh(difference / scale); positive where the judge likes length.
        scale: Standard deviation of the length differences, in the unit of the lengths.
        longer: Share of comparisons in which the first side is longer; equal lengths count half.
        shift: The mean length difference in units of `scale`.
    """

    plain: WinRate
    slope: float
    scale: float
    longer: float
    shift: float

    @property
    def warning(self) -> str | None:
        """A sentence on why the win rate may mislead; None if the lengths of the two sides overlap enough."""
        if abs(self.shift) <= MAX_SHIFT:
            return None
        side = "longer" if self.shift > 0 else "shorter"
        distance = f"{abs(self.shift):.2g} standard deviations" if math.isfinite(self.shift) else "always"
        return (
            f"The win rate at equal length is not identified: the first side is {distance} {side}, so few pairs "
            "show what happens at equal length. If better texts are also longer, the correction removes part of their "
            "advantage."
        )

    def to_json(self) -> dict[str, Any]:
        return {
            **super().to_json(),
            "plain": self.plain.to_json(),
            "slope": self.slope,
            "scale": self.scale,
            "longer": self.longer,
            "shift": self.shift if math.isfinite(self.shift) else None,
            "warning": self.warning,
        }


def length_controlled_win_rate(
    scores: ArrayLike,
    lengths: ArrayLike,
    other_lengths: ArrayLike,
    groups: Sequence[Hashable],
    *,
    seed: int,
    resamples: int = 1000,
) -> LengthControlledWinRate:
    """Computes the win rate at equal length: σ(β₀) of P(first wins) = σ(β₀ + β₁ tanh(Δ/s)).

    Δ is the length difference and s its standard deviation. The fit is by maximum likelihood with a ridge penalty on
    both coefficients, which keeps them finite if lengths separate wins from losses, or if there are only wins. If
    differences do not vary, length cannot be fitted: the slope is 0, and the result is the plain win rate.

    The interval resamples groups and refits both coefficients and s. If one side wins every comparison, it is Wilson's
    interval over groups, as in `stats.win_rate`.

    Args:
        scores: (N,) 1 if the first side won, ½ for a tie, 0 if it lost.
        lengths: (N,) lengths of the first side.
        other_lengths: (N,) lengths of the second side.
        groups: (N,) the prompt of each comparison.
        seed: Seed of the resamples.
        resamples: Number of resamples.

    Raises:
        ValueError: As in `stats.win_rate`.
    """
    outcomes = np.asarray(scores, dtype=float)
    # The plain win rate is reported too, and computing it validates the input.
    plain = win_rate(outcomes, 1 - outcomes, groups)
    difference = np.asarray(lengths, dtype=float) - np.asarray(other_lengths, dtype=float)
    coefficients, scale = _fit(outcomes, difference, np.ones(len(outcomes)), np.zeros(2))
    value = float(sigmoid(coefficients[0]))
    group_ids = group_indices(groups)
    n_groups = int(group_ids.max()) + 1
    # If one side won every comparison, it also wins every resample, so percentiles would show no spread.
    if plain.value in (0.0, 1.0):
        interval = proportion(round(plain.value * n_groups), n_groups).ci95
    else:
        # Each refit starts at the fit to all comparisons, so it takes only a few steps.
        intercepts = [
            _fit(outcomes, difference, group_counts[group_ids], coefficients)[0][0]
            for chunk in resample_counts(n_groups, seed, resamples)
            for group_counts in chunk
        ]
        low, high = np.quantile(sigmoid(np.array(intercepts)), quantile_levels(n_groups))
        interval = (float(low), float(high))
    # Equal lengths count one half.
    longer = float(((np.sign(difference) + 1) / 2).mean())
    mean = float(difference.mean())
    # A constant difference other than 0 is infinitely many standard deviations.
    shift = mean / scale if scale > 0 else math.copysign(math.inf, mean) if mean else 0.0
    return LengthControlledWinRate(value, interval, len(outcomes), plain, float(coefficients[1]), scale, longer, shift)


def _fit(
    outcomes: NDArray[np.float64],
    difference: NDArray[np.float64],
    weights: NDArray[np.float64],
    initial: NDArray[np.float64],
) -> tuple[NDArray[np.float64], float]:
    """Returns (β₀, β₁) and the scale s; `initial` has the coefficients at which the fit starts."""
    mean = np.average(difference, weights=weights)
    scale = float(np.sqrt(np.average((difference - mean) ** 2, weights=weights)))
    # Without variation in length, β₁ is not identified: fit the intercept alone.
    if scale <= 1e-12 * np.abs(difference).max(initial=1.0):
        ones = np.ones((len(outcomes), 1))
        return np.array([fit_logistic(ones, outcomes, weights, ridge=RIDGE)[0], 0.0]), 0.0
    # tanh bounds the effect of a very long text, as in AlpacaEval 2.
    features = np.stack([np.ones(len(outcomes)), np.tanh(difference / scale)], axis=1)
    return fit_logistic(features, outcomes, weights, ridge=RIDGE, initial=initial), scale
