"""What adapts from update to update, apart from weights: β, and the statistics of the scores so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FixedKL:
    """β stays as it was set."""

    kl_coef: float

    def update(self, kl: float, episodes: int) -> FixedKL:
        return self


@dataclass(frozen=True)
class AdaptiveKL:
    """β ← β·(1 + clip(KL/target − 1, ±0.2)·n/horizon).   Ziegler et al. (arXiv:1909.08593) §2.2.

    `kl_target` is in nats per completion; `kl_horizon` is in episodes: the larger, the slower β moves.
    """

    kl_coef: float
    kl_target: float
    kl_horizon: int

    def update(self, kl: float, episodes: int) -> AdaptiveKL:
        """The controller after a rollout of `episodes` completions whose mean Σ k1 was `kl` nats."""
        error = min(max(kl / self.kl_target - 1, -0.2), 0.2)
        return AdaptiveKL(self.kl_coef * (1 + error * episodes / self.kl_horizon), self.kl_target, self.kl_horizon)


KLController = FixedKL | AdaptiveKL


def kl_controller(*, kl_coef: float, kl_target: float | None, kl_horizon: int) -> KLController:
    """Adaptive when a target is given, else fixed."""
    return FixedKL(kl_coef) if kl_target is None else AdaptiveKL(kl_coef, kl_target, kl_horizon)


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
