"""Compares other methods with PPO, at PPO's KL and at PPO's compute, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .compute import break_even
from .frontier import MAX_GAP, Floats, Point, best_within_budget, compare_points, interpolate_at_kl
from .overoptimization import MIN_POINTS, fit_form
from .stats import Estimate


@dataclass(frozen=True)
class PPOComparison:
    """The policies with which other methods are compared, all measured on the same prompts.

    Attributes:
        sft: The SFT policy.
        ppo: PPO, averaged over its seeds.
        beta_points: PPO with other values of β.
        seed: Seed of the resamples of intervals.
        served: Number of served completions whose compute is added to that of training.
    """

    sft: Point
    ppo: Point
    beta_points: Sequence[Point]
    seed: int
    served: int

    def row(self, point: Point) -> dict[str, Any]:
        """Returns the metrics of a point as JSON."""
        kl: dict[str, Any] = {"value": point.mean_kl, "ci95": None, "n": point.n}
        if not point.kl_is_bound:
            kl = point.estimate(point.kl, seed=self.seed).to_json()
        document: dict[str, Any] = {
            "label": point.label,
            "kl": {**kl, "is_bound": point.kl_is_bound},
            **self._score_figures(point),
            "win_rate": {opponent: point.rate(values).to_json() for opponent, values in point.wins.items()},
            "extra_metrics": {
                name: self._extra_metric(name, values, point).to_json() for name, values in point.extra_metrics.items()
            },
            "compute": {
                "training": point.training.to_json(),
                "serving": point.serving.to_json(),
                "flops": point.flops(self.served),
            },
        }
        if point.seed_points:
            document["seeds"] = [
                {"label": run.label, **{name: float(getattr(run, name).mean()) for name in ("reward", "judge", "kl")}}
                for run in point.seed_points
            ]
        return document

    def rows(self, points: Sequence[Point]) -> list[dict[str, Any]]:
        """Returns the points of a method as JSON, each compared with PPO at the same KL if PPO was run with other β."""
        documents = [{**self.row(point), **self._ppo_at_kl(point)} for point in points]
        # Only best-of-n has a bound. Its first point, n = 1, is skipped: it is SFT, which is served at PPO's cost.
        if points[0].kl_is_bound:
            for document, point in zip(documents[1:], points[1:], strict=True):
                document["break_even"] = break_even(
                    self.ppo.training.flops,
                    self.ppo.serving.flops,
                    other_training_flops=point.training.flops,
                    other_serving_flops=point.serving.flops,
                )
        return documents

    def at_equal_kl(self, points: Sequence[Point]) -> dict[str, Any]:
        """Compares a method with PPO at PPO's KL, or else at the highest KL at which the method was measured.

        Args:
            points: The method's points. Its frontier begins at SFT (infinite β, or n = 1).
        """
        ppo, frontier = self.ppo, points if points[0].kl_is_bound else [self.sft, *points]
        at_ppo_kl = interpolate_at_kl(frontier, ppo.mean_kl)
        # `interpolate_at_kl` interpolates in √KL, so the mean KL of its point is not exactly PPO's.
        if at_ppo_kl is not None:
            return {"inside": True, **self._compare_point(at_ppo_kl, ppo), "kl": ppo.mean_kl}
        kls = sorted(max(0.0, point.mean_kl) for point in frontier)  # an estimated KL may be negative
        reason = f"outside its range: KL {kls[0]:.2f} to {kls[-1]:.2f}, and PPO's is {ppo.mean_kl:.2f}"
        if kls[0] <= ppo.mean_kl <= kls[-1]:
            below, above = max(kl for kl in kls if kl <= ppo.mean_kl), min(kl for kl in kls if kl >= ppo.mean_kl)
            reason = (
                f"not measured: its points next to PPO's KL of {ppo.mean_kl:.2f} are at {below:.2f} and {above:.2f}, "
                f"more than {MAX_GAP} √nats apart; run a point between them"
            )
        farthest = self._ppo_at_kl(max(points, key=lambda point: point.mean_kl))
        return {"inside": False, "reason": reason, "farthest": farthest.get("ppo_at_its_kl")}

    def at_equal_compute(self, points: Sequence[Point]) -> dict[str, Any]:
        """Compares PPO with the point of a method that the judge scores highest within PPO's FLOPs.

        Args:
            points: The method's points.
        """
        flops_budget = self.ppo.flops(self.served)
        best = best_within_budget(points, flops_budget, served=self.served)
        if best is None:
            cheapest = min(point.flops(self.served) for point in points) / flops_budget
            return {"inside": False, "reason": f"every point takes more, at least {cheapest:.2f} times PPO's FLOPs"}
        return {
            "inside": True,
            "share_of_flops": best.flops(self.served) / flops_budget,
            **self._compare_point(best, self.ppo),
        }

    def fit_best_of_n(self, points: Sequence[Point]) -> dict[str, Any]:
        """Fits d·(α − β·d) of Gao et al. 2022 to the gains of best-of-n over n = 1; d² is the bound on the KL.

        n = 1 is the SFT policy on the pool that best-of-n chooses from. The evaluation's own samples of SFT differ from
        this pool by chance, which would distort the curve.

        Args:
            points: The points of best-of-n, n = 1 first.

        Returns:
            The fits of proxy and judge; {} if there are fewer than three n above 1.
        """
        points_above_one = [point for point in points if point.mean_kl > 0]
        if len(points_above_one) < MIN_POINTS:
            return {}
        kl = np.stack([point.by_prompt(point.kl) for point in points_above_one])
        gains = {
            "proxy": [point.by_prompt(point.reward - points[0].reward) for point in points_above_one],
            "judge": [point.by_prompt(point.judge - points[0].judge) for point in points_above_one],
        }
        return {
            name: fit_form("best-of-n", kl, np.stack(gain), seed=self.seed).to_json() for name, gain in gains.items()
        }

    def _score_figures(self, point: Point) -> dict[str, Any]:
        return {name: point.estimate(getattr(point, name), seed=self.seed).to_json() for name in ("reward", "judge")}

    def _extra_metric(self, name: str, values: Floats, point: Point) -> Estimate:
        """Averages a metric. The scores of a rule may be any numbers; every other metric is a share."""
        if name.startswith("rule:"):
            return point.estimate(values, seed=self.seed)
        return point.rate(values, n=len(values) * max(1, len(point.seed_points)))

    def _ppo_at_kl(self, point: Point) -> dict[str, Any]:
        """Compares a point with PPO at the point's KL; {} if PPO has no points with other β near this KL."""
        ppo = interpolate_at_kl([self.sft, *self.beta_points, self.ppo], point.mean_kl) if self.beta_points else None
        return {} if ppo is None else {"ppo_at_its_kl": self._compare_point(point, ppo)}

    def _compare_point(self, point: Point, ppo: Point) -> dict[str, Any]:
        return {
            "label": point.label, "kl": point.mean_kl, **self._score_figures(point), "ppo": ppo.label,
            "ppo_minus_this": compare_points(ppo, point, seed=self.seed),
        }  # fmt: skip
