"""State other than weights that changes from update to update: β, and running statistics of scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class KLController:
    """Adapts the KL coefficient: β ← β·(1 + clip(KL/target − 1, ±0.2)·n/horizon).

    Attributes:
        kl_coef: β.
        kl_target: The KL to hold, in nats per completion; None keeps β fixed.
        kl_horizon: The horizon in episodes. A larger horizon adapts β more slowly.

    Source: arXiv:1909.08593, section 2.2.
    """

    kl_coef: float
    kl_target: float | None = None
    kl_horizon: int = 10_000

    def update(self, kl: float, episodes: int) -> KLController:
        """Returns the controller after a rollout.

        Args:
            kl: The mean over completions of Σ_t k1_t, in nats.
            episodes: The number of completions in the rollout.
        """
        if self.kl_target is None:
            return self
        # A single unusual rollout must change β only a little.
        error = min(max(kl / self.kl_target - 1, -0.2), 0.2)
        return replace(self, kl_coef=self.kl_coef * (1 + error * episodes / self.kl_horizon))


@dataclass(frozen=True)
class RunningScores:
    """Mean and standard deviation of all scores since the run started.

    Attributes:
        count: The number of scores.
        total: Σs.
        squares: Σs².
    """

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def update(self, moments: Sequence[float]) -> RunningScores:
        """Returns the statistics with a rollout added.

        Args:
            moments: (n, Σs, Σs²) of the rollout's scores, over all processes.
        """
        count, total, squares = moments
        return RunningScores(self.count + count, self.total + total, self.squares + squares)

    @property
    def mean(self) -> float:
        """The mean; 0 before the first score."""
        return self.total / self.count if self.count else 0.0

    @property
    def std(self) -> float:
        """The unbiased standard deviation; 1 until there are two different scores."""
        if self.count < 2:
            return 1.0
        # Cancellation may make the difference slightly negative.
        return math.sqrt(max(self.squares - self.count * self.mean**2, 0.0) / (self.count - 1)) or 1.0
