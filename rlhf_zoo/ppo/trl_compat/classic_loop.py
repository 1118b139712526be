"""The update behind TRL 0.x's `step`, with the statistics that it returned."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ... import functional as F
from ..rollout import Advantages, Rollout
from ..trainer import PPOTrainer as ZooPPOTrainer

#: Maps TRL 0.x's names of metrics to ours, where the values are the same.
SAME_METRICS = {
    "objective/kl": "objective/kl",
    "ppo/loss/policy": "loss/policy",
    "ppo/loss/value": "loss/value",
    "ppo/loss/total": "loss",
    "ppo/policy/entropy": "objective/entropy",
    "ppo/policy/approxkl": "policy/approxkl",
    "ppo/policy/clipfrac": "policy/clipfrac",
    "ppo/policy/ratio": "policy/ratio",
    "ppo/val/clipfrac": "value/clipfrac",
}


class ClassicLoop(ZooPPOTrainer):
    """A trainer for which PAD may be EOS, as in TRL's tutorials, because completions come with their lengths."""

    needs_own_pad = False
    statistics: Mapping[str, Any] = {}

    def record_metrics(self, rollout: Rollout, advantages: Advantages, loss_metrics: Mapping[str, float]) -> None:
        """Also computes TRL's statistics of this update: means over completions or tokens of all processes.

        Args:
            rollout: The rollout of all processes.
            advantages: The rollout's rewards and advantages.
            loss_metrics: Means of the update's losses and their terms.
        """
        super().record_metrics(rollout, advantages, loss_metrics)
        token_mask, action_mask = rollout.mask, advantages.mask
        squared_error = (advantages.values - advantages.returns).square()
        return_mean, return_std = self.mean_and_std(advantages.returns, action_mask)
        value_mean, value_std = self.mean_and_std(advantages.values, action_mask)
        score_mean, score_std = self.mean_and_std(advantages.shaped_scores)
        length_statistics = {
            "queries": self.mean_and_std(rollout.samples.prompt_mask.sum(1).float()),
            "responses": self.mean_and_std(token_mask.sum(1).float()),
        }
        statistics = {
            **{name: self.last_metrics.get(ours, math.nan) for name, ours in SAME_METRICS.items()},
            "objective/kl_coef": self.controller.kl_coef,
            "objective/kl_dist": rollout.kl.tolist(),
            # TRL 0.x reports −Σ log π of the sampled tokens here, and the exact entropy as ppo/policy/entropy.
            "objective/entropy": self.mean(-rollout.logprobs.masked_fill(~token_mask, 0).sum(1)),
            "ppo/mean_non_score_reward": self.mean(advantages.non_score) / length_statistics["responses"][0],
            "ppo/mean_scores": score_mean,
            "ppo/std_scores": score_std,
            "ppo/returns/mean": return_mean,
            "ppo/returns/var": return_std**2,
            "ppo/val/mean": value_mean,
            "ppo/val/var": value_std**2,
            "ppo/val/error": self.mean(squared_error.masked_fill(~action_mask, math.nan)),
            "ppo/learning_rate": self.get_learning_rates()[0],
        }
        for name, (mean, deviation) in length_statistics.items():
            statistics |= {f"tokens/{name}_len_mean": mean, f"tokens/{name}_len_std": deviation}
        # Equal returns have no variance to explain.
        if statistics["ppo/returns/var"]:
            statistics["ppo/val/var_explained"] = 1 - statistics["ppo/val/error"] / statistics["ppo/returns/var"]
        self.statistics = statistics

    def mean_and_std(self, x: Tensor, mask: Tensor | None = None) -> tuple[float, float]:
        """Computes the mean and the unbiased standard deviation, over all processes.

        Args:
            x: A tensor of any shape.
            mask: A bool mask of the same shape; None for all entries that are not NaN.
        """
        mean, deviation = F.mean_and_std(self.moments(x, mask))
        return float(mean), float(deviation)
