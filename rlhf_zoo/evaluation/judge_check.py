"""Whether a judge may judge: what it makes of labeled pairs, how it errs beside the reward, and whether it is steady.

A judge that was trained and tested on labels that are swapped looks as good as another, so its own held-out accuracy
cannot tell; pairs that were labeled elsewhere can. Where nobody labeled any, a judge can still be compared with itself:
a coin does not agree with itself from one half of the samples to the other.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from .calibration import calibration
from .stats import Estimate, WinRate, correlation, proportion, win_rate

__all__ = ["Finding", "JudgeCheck", "SharedErrors", "check_judge", "shared_errors", "split_half"]

Finding = Literal["agrees", "says nothing", "contradicts"]
_SMALLEST = 1e-6  # of a probability, so that its log-odds are finite


@dataclass(frozen=True)
class SharedErrors:
    """Of judge and reward on the same labeled pairs, where each is right or wrong.

    correlation: of their errors (φ), None where one never errs; judge_errs: overall; where_reward_errs: the same among
    the pairs that the reward orders wrongly, None where it orders all rightly. A label that is wrong counts against
    both, so that noisy labels alone make errors look shared.
    """

    correlation: Estimate | None
    judge_errs: Estimate
    where_reward_errs: Estimate | None

    def to_json(self) -> dict[str, Any]:
        return {
            "correlation": self.correlation.to_json() if self.correlation else None,
            "judge_errs": self.judge_errs.to_json(),
            "where_reward_errs": self.where_reward_errs.to_json() if self.where_reward_errs else None,
        }


@dataclass(frozen=True)
class JudgeCheck:
    """accuracy: the share of pairs whose chosen side the judge scores higher, a tie half, by prompts.

    calibration: of a judge whose scores are probabilities, by `calibration.calibration` over differences of log-odds;
    else None. with_reward: errors that it shares with the training reward, None where there is no other reward.
    """

    accuracy: WinRate
    calibration: dict[str, Any] | None
    with_reward: SharedErrors | None = None

    @property
    def finding(self) -> Finding:
        """By the 95% interval of the accuracy: above ½, below it, or neither."""
        low, high = self.accuracy.ci95
        return "agrees" if low > 0.5 else "contradicts" if high < 0.5 else "says nothing"

    @property
    def unfit(self) -> str | None:
        """Why the judge is none, a sentence; None where it may judge, which the verdict asks more for."""
        if self.finding != "contradicts":
            return None
        low, high = self.accuracy.ci95
        return (
            f"The judge contradicts the labels: it scores the chosen side higher in {self.accuracy.value:.3f} "
            f"[{low:.3f}, {high:.3f}] of {self.accuracy.n} labeled pairs; look for swapped labels in what it learned."
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "accuracy": self.accuracy.to_json(),
            "finding": self.finding,
            "unfit": self.unfit,
            "calibration": self.calibration,
            **({"with_reward": self.with_reward.to_json()} if self.with_reward else {}),
        }


def check_judge(
    chosen: ArrayLike,
    rejected: ArrayLike,
    prompts: Sequence[Hashable],
    *,
    probabilities: bool,
    seed: int,
    reward_margins: ArrayLike | None = None,
) -> JudgeCheck:
    """Of a judge's scores of N labeled pairs; probabilities: whether they are P(good), 0 to 1.

    reward_margins: (N,) what the training reward gives the chosen side beyond the other. Raises ValueError where there
    are no pairs, lengths differ, or a score is not finite.
    """
    accuracy = win_rate(chosen, rejected, prompts, seed=seed)
    margins = np.subtract(np.asarray(chosen, dtype=float), np.asarray(rejected, dtype=float))
    shared = None if reward_margins is None else shared_errors(margins, reward_margins, prompts, seed=seed)
    if not probabilities:
        return JudgeCheck(accuracy, None, shared)
    good, bad = (np.clip(np.asarray(side, dtype=float), _SMALLEST, 1 - _SMALLEST) for side in (chosen, rejected))
    log_odds = np.log(good / (1 - good)) - np.log(bad / (1 - bad))
    return JudgeCheck(accuracy, calibration(log_odds, seed=seed), shared)


def shared_errors(judge: ArrayLike, reward: ArrayLike, prompts: Sequence[Hashable], *, seed: int) -> SharedErrors:
    """judge, reward: (N,) margins of the chosen side over the other; one of 0 or less is an error."""
    errs, reward_errs = (np.asarray(margins, dtype=float) <= 0 for margins in (judge, reward))
    both = int((errs & reward_errs).sum())
    return SharedErrors(
        correlation(errs.astype(float), reward_errs.astype(float), prompts, seed=seed),
        proportion(int(errs.sum()), len(errs)),
        proportion(both, int(reward_errs.sum())) if reward_errs.any() else None,
    )


def split_half(scores: ArrayLike, prompts: Sequence[Hashable], *, seed: int) -> Estimate | None:
    """How far a judge agrees with itself: the rank correlation of its mean scores of two halves of the samples.

    scores: (R, S), a row for each policy and prompt, S samples each; prompts: (R,) the prompt of each row, the unit
    that is resampled. A coin has 0; so has a judge to whom all prompts and policies are alike. None where there are
    fewer than two samples, or a half does not vary.
    """
    sample = np.asarray(scores, dtype=float)
    if sample.ndim != 2 or sample.shape[1] < 2:
        return None
    halves = sample[:, 0::2].mean(1), sample[:, 1::2].mean(1)
    return correlation(*halves, prompts, seed=seed, ranks=True)
