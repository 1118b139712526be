"""What adapts from update to update, apart from weights: β, and the statistics of the scores so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class KLController:
    """Adapts the KL coefficient: β ← β·(1 + clip(KL/target − 1, ±0.2)·n/horizon).

    Attributes:
        kl_coef: β.
        kl_target: in nats per completion; None keeps β.
        kl_horizon: in episodes; the larger, the slower β moves.

    Source: arXiv:1909.08593, section 2.2.
    """

    kl_coef: float
    kl_target: float | None = None
    kl_horizon: int = 10_000

    def update(self, kl: float, episodes: int) -> KLController:
        """The controller after a rollout of `episodes` completions whose mean Σ k1 was `kl` nats."""
        if self.kl_target is None:
            return self
        error = min(max(kl / self.kl_target - 1, -0.2), 0.2)
        return replace(self, kl_coef=self.kl_coef * (1 + error * episodes / self.kl_horizon))


@dataclass(frozen=True)
class RunningScores:
    """Mean and deviation of every score since the run began: count, Σs and Σs² in float64."""

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def update(self, moments: Sequence[float]) -> RunningScores:
        """With one rollout's (n, Σs, Σs²) over all processes added."""
        count, total, squares = moments
        return RunningScores(self.count + count, self.total + total, self.squares + squares)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def std(self) -> float:
        """The unbiased deviation; 1 before there are two different scores."""
        if self.count < 2:
            return 1.0
        return math.sqrt(max(self.squares - self.count * self.mean**2, 0.0) / (self.count - 1)) or 1.0
