"""KL controllers: what β multiplies the KL penalty of the next update."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AdaptiveKL", "FixedKL", "KLController", "kl_controller"]


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
