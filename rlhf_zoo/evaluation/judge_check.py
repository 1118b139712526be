"""Whether a judge agrees with labeled pairs: one that learned from swapped labels prefers the rejected side of them.

A judge that was trained and tested on labels that are swapped looks as good as another, so its own held-out accuracy
cannot tell; pairs that were labeled elsewhere can.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from .calibration import calibration
from .stats import WinRate, win_rate

__all__ = ["Finding", "JudgeCheck", "check_judge"]

Finding = Literal["agrees", "says nothing", "contradicts"]
_SMALLEST = 1e-6  # of a probability, so that its log-odds are finite


@dataclass(frozen=True)
class JudgeCheck:
    """accuracy: the share of pairs whose chosen side the judge scores higher, a tie half, by prompts.

    calibration: of a judge whose scores are probabilities, by `calibration.calibration` over differences of log-odds;
    else None.
    """

    accuracy: WinRate
    calibration: dict[str, Any] | None

    @property
    def finding(self) -> Finding:
        """By the 95% interval of the accuracy: above ½, below it, or neither."""
        low, high = self.accuracy.ci95
        return "agrees" if low > 0.5 else "contradicts" if high < 0.5 else "says nothing"

    @property
    def unfit(self) -> str | None:
        """Why the judge is none, a sentence; None where it may judge."""
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
        }


def check_judge(
    chosen: ArrayLike, rejected: ArrayLike, prompts: Sequence[Hashable], *, probabilities: bool, seed: int
) -> JudgeCheck:
    """Of a judge's scores of N labeled pairs; probabilities: whether they are P(good), 0 to 1.

    Raises ValueError where there are no pairs, lengths differ, or a score is not finite.
    """
    accuracy = win_rate(chosen, rejected, prompts, seed=seed)
    if not probabilities:
        return JudgeCheck(accuracy, None)
    good, bad = (np.clip(np.asarray(side, dtype=float), _SMALLEST, 1 - _SMALLEST) for side in (chosen, rejected))
    margins = np.log(good / (1 - good)) - np.log(bad / (1 - bad))
    return JudgeCheck(accuracy, calibration(margins, seed=seed))
