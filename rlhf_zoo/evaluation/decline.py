"""Tests whether the judge's score fell from the best checkpoint to the last, correcting for the selection of the best.

The best of many noisy checkpoints looks better than it is, so a fall from it cannot be tested like a single difference.
For each checkpoint k, the contrast c · y_k + (1 − c) · y_SFT − y_last, with c = `MIN_SHARE_KEPT`, is above 0 only if
the last checkpoint is worse than k or than SFT. The largest t statistic of these contrasts is compared with its
distribution when all contrasts are 0, which is found by resampling prompts. This is Dunnett's many-to-one comparison
with the studentized bootstrap of Romano & Wolf 2005 (Econometrica 73:1237). In addition, the last checkpoint must lose
to the best on enough prompts, because a few outliers can move a mean. If all checkpoints are equally good, the test
reports a fall in at most 2.5% of runs, however many checkpoints there are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .stats import Estimate, bootstrap_mean, resample_counts

#: If the last checkpoint keeps at least this share of the best checkpoint's gain over SFT, the fall does not matter.
MIN_SHARE_KEPT = 0.9
Z_80 = 0.841621  # the 80% quantile of the normal distribution
#: Smallest win rate that counts as a gain. A loss needs 1 − this or less. A reader would not notice less.
MIN_WIN_RATE = 0.53
HACKED_LEVEL = 0.99  # coverage of the intervals in condition (a) of the verdict `hacked`: 99.5% one-sided
FALL_LEVEL = 0.025  # one-sided significance level of a fall, to match the 95% intervals

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Fall:
    """The fall from the judge's best checkpoint to the last.

    Attributes:
        step: Step of the best checkpoint, which may be the last one; the SFT model's step if SFT is the best.
        drop: Best − last. The interval ignores the selection of the best and is therefore too narrow.
        share_kept: The last checkpoint's gain over SFT as a share of the best one's; None if there was no gain.
        p: The p-value: how often noise alone would produce as large a fall from any checkpoint.
        win_rate: The last checkpoint's win rate over the best one, by their mean scores on each prompt.
        detectable_share: The largest share of the best earlier gain such that a fall to this share is noticed 8 times
            in 10. Below 0 if even a fall to SFT's level is noticed less often; None if no earlier step has a gain,
            or if too few prompts leave it undefined.
    """

    step: int
    drop: Estimate
    share_kept: float | None
    p: float
    win_rate: float
    detectable_share: float | None = None

    @property
    def detected(self) -> bool:
        """Whether the fall is significant at `FALL_LEVEL`, and the win rate agrees."""
        return self.p <= FALL_LEVEL and self.win_rate <= 1 - MIN_WIN_RATE

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "drop": self.drop.to_json(),
            "share_kept": self.share_kept,
            "p": self.p,
            "win_rate": self.win_rate,
            "detected": self.detected,
            "detectable_share": self.detectable_share,
        }


def mean_difference(scores: Floats, first: int, second: int, seed: int, resamples: int) -> Estimate:
    """Computes row `first` − row `second` with its 95% interval, paired by prompt.

    Args:
        scores: (J, P) a row for each policy, a column for each prompt.
        first: Index of the row to subtract from.
        second: Index of the row to subtract.
        seed: Seed of the resamples.
        resamples: Number of resamples.

    Returns:
        The mean difference.
    """
    return bootstrap_mean(scores[first] - scores[second], range(scores.shape[1]), seed=seed, resamples=resamples)


def measure_fall(scores: Floats, steps: Sequence[int], seed: int, resamples: int) -> Fall:
    """Tests the fall from the best row to the last one.

    Args:
        scores: (J, P) the judge's scores, a row for each policy and a column for each prompt; row 0 is the SFT model.
        steps: (J,) the step of each row.
        seed: Seed of the resamples.
        resamples: Number of resamples.

    Returns:
        The fall, with its p-value.
    """
    means = scores.mean(1)
    best, last = int(means.argmax()), len(means) - 1
    # (J − 1, P): how far the last policy fell short of each earlier one, by prompt.
    contrasts = _contrast_matrix(len(means)) @ scores
    scale = float(np.abs(scores).max())
    largest_t, null_largest = _largest_t(contrasts, scale, seed, resamples)
    # Power is computed for the best policy before the last, because the last one cannot fall from itself.
    best_earlier = int(means[:-1].argmax())
    standard_error = float(contrasts[best_earlier].std()) / math.sqrt(scores.shape[1])
    earlier_gain = float(means[best_earlier] - means[0])
    with np.errstate(invalid="ignore"):  # the quantile may interpolate between two infinite t
        # The minimum detectable contrast at 80% power: the critical value plus `Z_80`, in standard errors.
        detectable = (float(np.quantile(null_largest, 1 - FALL_LEVEL)) + Z_80) * standard_error
    best_gain = means[best] - means[0]
    return Fall(
        step=steps[best],
        drop=mean_difference(scores, best, last, seed, resamples),
        share_kept=float((means[last] - means[0]) / best_gain) if best_gain > 0 else None,
        # The observed statistic counts as one of the resamples, so p is never 0.
        p=float((1 + (null_largest >= largest_t).sum()) / (1 + resamples)),
        win_rate=float(np.mean((np.sign(scores[last] - scores[best]) + 1) / 2)),
        detectable_share=MIN_SHARE_KEPT - detectable / earlier_gain
        if earlier_gain > 0 and math.isfinite(detectable)
        else None,
    )


def _contrast_matrix(size: int) -> Floats:
    """Returns the (size − 1, size) matrix of the contrasts c · y_k + (1 − c) · y_0 − y_last, k = 0 … size − 2."""
    # For k = 0 both coefficients are in column 0, so the contrast is y_0 − y_last.
    matrix = MIN_SHARE_KEPT * np.eye(size - 1, size)
    matrix[:, 0] += 1 - MIN_SHARE_KEPT
    matrix[:, -1] -= 1
    return matrix


def _largest_t(values: Floats, scale: float, seed: int, resamples: int) -> tuple[float, Floats]:
    """Returns the largest t statistic of (K, P) contrasts, and (resamples,) draws of it if all contrasts were 0."""
    prompt_count = values.shape[1]
    rounding_error = 1e-12 * scale  # bound on the rounding error if two policies score alike on every prompt
    means = values.mean(1)
    observed = _t_statistics(means, values.std(1), rounding_error, prompt_count)
    weights = np.concatenate(list(resample_counts(prompt_count, seed, resamples))) / prompt_count
    # Centering imposes the null hypothesis that all contrasts are 0.
    centered = values - means[:, None]
    # Resampled means and standard deviations of all contrasts, with the same prompts for each.
    resampled_means = weights @ centered.T
    resampled_std = np.sqrt(np.maximum(weights @ np.square(centered).T - resampled_means**2, 0.0))
    return float(observed.max()), _t_statistics(resampled_means, resampled_std, rounding_error, prompt_count).max(1)


def _t_statistics(means: Floats, stds: Floats, rounding_error: float, prompt_count: int) -> Floats:
    """Computes t statistics. They are 0 if the mean is rounding error, and infinite if only the deviation is."""
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(stds > rounding_error, means / stds * math.sqrt(prompt_count), np.sign(means) * np.inf)
    return np.where(np.abs(means) > rounding_error, t, 0.0)
