"""The fall from the judge's best checkpoint to the last, beyond the noise of choosing the best of many.

The best of many noisy checkpoints looks better than it is, so the fall from it is not tested like one difference. For
each checkpoint k the contrast KEPT · y_k + (1 − KEPT) · y_SFT − y_last is above 0 only if the last is worse than k or
than SFT. The largest of their t statistics is compared with the distribution, by resampling prompts, of the largest one
were all contrasts 0: Dunnett's many-to-one comparison, as the studentised bootstrap of Romano & Wolf 2005 (Econometrica
73:1237). Under a flat judge it finds a fall in 2.5% of runs, however many checkpoints there are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .stats import Estimate, bootstrap_mean, resampled

KEPT = 0.9  # of the best checkpoint's gain over SFT; differences smaller than this do not matter, however certain
_POWER = 0.841621  # standard errors beyond a threshold that 80% of evaluations are
LEVEL = 0.025  # one-sided, the half of the 95% intervals beside it

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Fall:
    """From the judge's best checkpoint to the last. step: of the best, 0 or the baseline's own where that is the best.

    drop: best − last, with its plain interval, too narrow after a choice. kept: the share of the best's gain over SFT
    that the last has, None where there was none. p: how often noise alone would make as large a fall from any
    checkpoint, the choice accounted for. noticed: the share of an earlier checkpoint's gain to which the last would
    have to fall for 80% of such evaluations to find it, below 0 where SFT's level is not low enough; None where no
    earlier one has a gain.
    """

    step: int
    drop: Estimate
    kept: float | None
    p: float
    noticed: float | None = None

    @property
    def found(self) -> bool:
        return self.p <= LEVEL

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "drop": self.drop.to_json(),
            "kept": self.kept,
            "p": self.p,
            "found": self.found,
            "noticed": self.noticed,
        }


def difference(scores: Floats, of: int, less: int, seed: int, resamples: int) -> Estimate:
    """Row `of` − row `less` with its 95% interval, paired by prompt."""
    return bootstrap_mean(scores[of] - scores[less], range(scores.shape[1]), seed=seed, resamples=resamples)


def fallen(scores: Floats, steps: Sequence[int], seed: int, resamples: int) -> Fall:
    """From the best of the rows to the last one; row 0 is the SFT model."""
    means = scores.mean(1)
    best, last = int(means.argmax()), len(means) - 1
    contrasts = _contrasts(len(means)) @ scores
    scale = float(np.abs(scores).max())
    observed, largest = _largest_t(contrasts, scale, seed, resamples)
    earlier = int(means[:-1].argmax())
    error = float(contrasts[earlier].std()) / math.sqrt(scores.shape[1])
    gain_before = float(means[earlier] - means[0])
    with np.errstate(invalid="ignore"):  # between two resamples without any spread, whose t is infinite
        to_see = (float(np.quantile(largest, 1 - LEVEL)) + _POWER) * error
    gained = means[best] - means[0]
    return Fall(
        step=steps[best],
        drop=difference(scores, best, last, seed, resamples),
        kept=float((means[last] - means[0]) / gained) if gained > 0 else None,
        p=float((1 + (largest >= observed).sum()) / (1 + resamples)),
        noticed=KEPT - to_see / gain_before if gain_before > 0 and math.isfinite(to_see) else None,
    )


def _contrasts(size: int) -> Floats:
    """(size − 1, size): KEPT · y_k + (1 − KEPT) · y_0 − y_last for k = 0 … size − 2; y_0 − y_last for k = 0."""
    matrix = KEPT * np.eye(size - 1, size)
    matrix[:, 0] += 1 - KEPT
    matrix[:, -1] -= 1
    return matrix


def _largest_t(values: Floats, scale: float, seed: int, resamples: int) -> tuple[float, Floats]:
    """The largest t of contrasts (J, P), and (resamples,) what it is where all contrasts are 0."""
    prompts = values.shape[1]
    tiny = 1e-12 * scale  # a rounding, where two policies score alike on every prompt
    means = values.mean(1)
    observed = _t(means, values.std(1), tiny, prompts)
    share = np.concatenate(list(resampled(prompts, seed, resamples))) / prompts
    centered = values - means[:, None]
    moved = share @ centered.T
    spread = np.sqrt(np.maximum(share @ np.square(centered).T - moved**2, 0.0))
    return float(observed.max()), _t(moved, spread, tiny, prompts).max(1)


def _t(mean: Floats, spread: Floats, tiny: float, prompts: int) -> Floats:
    """t statistics; 0 where a mean is a rounding, infinite where it is not and the spread is."""
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(spread > tiny, mean / spread * math.sqrt(prompts), np.sign(mean) * np.inf)
    return np.where(np.abs(mean) > tiny, t, 0.0)
