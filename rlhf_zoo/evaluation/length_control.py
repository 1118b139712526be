"""The win rate that would be left if both sides were equally long.

Judges like long texts, and PPO finds that out. Dubois et al. 2024 (arXiv:2404.04475, AlpacaEval 2) fit a logistic
regression of the preference on the length difference and predict at difference zero. This one has their intercept and
length term; their term for a prompt's difficulty is left out, since it is fitted over many models.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .stats import Estimate, WinRate, fit_logistic, group_indices, levels, proportion, sigmoid, win_rate

RIDGE = 1e-3  # penalty ½·RIDGE·‖β‖² on the sum over comparisons: as a thousandth of one more comparison
FARTHEST = 0.5
"""Standard deviations by which the lengths may differ in the mean: at one, equal policies come out at 0.36."""


@dataclass(frozen=True)
class LengthControlled(Estimate):
    """The win rate at equal length, with what it was before.

    slope: log-odds that one more unit of tanh(difference / scale) brings; positive where length is liked. scale: the
    standard deviation of the length differences, in the unit of the lengths. longer: how often the first side is the
    longer one, equal lengths half. shift: the mean difference over that deviation.
    """

    plain: WinRate
    slope: float
    scale: float
    longer: float
    shift: float

    @property
    def warning(self) -> str | None:
        """Why the figure may mislead, a sentence; None where the lengths of the two sides overlap."""
        if abs(self.shift) <= FARTHEST:
            return None
        side = "longer" if self.shift > 0 else "shorter"
        apart = f"{abs(self.shift):.2g} standard deviations" if math.isfinite(self.shift) else "always"
        return (
            f"The win rate at equal length is not identified: the first side is {apart} {side}, so that few pairs tell "
            "what happens at equal length, and where good texts are longer the figure takes a part of what is good."
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
) -> LengthControlled:
    """σ(β₀) of P(first wins) = σ(β₀ + β₁ tanh(Δ/s)), Δ the length difference and s its standard deviation.

    scores: (N,) 1 where the first side won, ½ for a tie, 0; lengths, other_lengths: (N,) of the first and the second
    side; groups: (N,) the prompt of each. Fitted by maximum likelihood with a ridge penalty on both coefficients, which
    keeps them finite where lengths separate wins from losses, or there are only wins. Where differences do not vary,
    the fit has nothing to tell length by: slope 0, and the plain win rate.

    The interval resamples groups and fits each resample anew, s too; where every comparison went the same way it is
    Wilson's over groups, as `stats.win_rate` has it. Raises ValueError for what that would refuse.
    """
    score = np.asarray(scores, dtype=float)
    plain = win_rate(score, 1 - score, groups)
    difference = np.asarray(lengths, dtype=float) - np.asarray(other_lengths, dtype=float)
    everything = np.ones(len(score))
    whole, scale = _fit(score, difference, everything, np.zeros(2))
    value = float(sigmoid(whole[0]))
    index = group_indices(groups)
    size = int(index.max()) + 1
    if plain.value in (0.0, 1.0):
        interval = proportion(round(plain.value * size), size).ci95
    else:
        rng = np.random.default_rng(seed)
        chance = np.full(size, 1 / size)
        drawn = [
            _fit(score, difference, rng.multinomial(size, chance)[index].astype(float), whole)[0][0]
            for _ in range(resamples)
        ]
        low, high = np.quantile(sigmoid(np.array(drawn)), levels(size))
        interval = (float(low), float(high))
    longer = float(((np.sign(difference) + 1) / 2).mean())
    mean = float(difference.mean())
    shift = mean / scale if scale > 0 else math.copysign(math.inf, mean) if mean else 0.0
    return LengthControlled(value, interval, len(score), plain, float(whole[1]), scale, longer, shift)


def _fit(
    score: NDArray[np.float64],
    difference: NDArray[np.float64],
    weights: NDArray[np.float64],
    start: NDArray[np.float64],
) -> tuple[NDArray[np.float64], float]:
    """(β₀, β₁) and the scale."""
    mean = np.average(difference, weights=weights)
    scale = float(np.sqrt(np.average((difference - mean) ** 2, weights=weights)))
    if scale <= 1e-12 * np.abs(difference).max(initial=1.0):
        ones = np.ones((len(score), 1))
        return np.array([fit_logistic(ones, score, weights, ridge=RIDGE)[0], 0.0]), 0.0
    features = np.stack([np.ones(len(score)), np.tanh(difference / scale)], axis=1)
    return fit_logistic(features, score, weights, ridge=RIDGE, start=start), scale
