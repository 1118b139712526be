"""How much the reward models of an ensemble agree, on held-out pairs and on completions of SFT and PPO."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .calibration import measure_calibration
from .ensemble import average_by_kl, disagreement, pairwise_agreement, standardize, unrelated_disagreement
from .stats import accuracy, bootstrap_mean, correlation

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class PolicyTexts:
    """N completions with their prompts.

    Attributes:
        groups: (N,) the group of each completion's prompt; intervals resample groups.
        texts: (N,) each prompt followed by its completion, as a text or a conversation.
        ended: (N,) whether the completion ended by itself.
        judge_scores: (N,) the judge's scores; None if the run was not evaluated.
        kl: (N,) Σ log π − log π_SFT of each completion, nats; None if the run was not evaluated.
    """

    groups: Sequence[Hashable]
    texts: Sequence[Any]
    ended: Sequence[bool]
    judge_scores: Sequence[float] | None = None
    kl: Sequence[float] | None = None


@dataclass(frozen=True)
class EnsembleScores:
    """The scores of M reward models.

    Attributes:
        margins: (M, pairs) chosen − rejected on held-out pairs. A tie counts as wrong, as on a reward model's card.
        pair_prompts: (pairs,) the group of each pair's prompt.
        raw_scores: Side -> (M, N) raw scores of its completions. The sides are sft and, if the run was evaluated, ppo.
        texts: Side -> its completions.
        seed: Seed of the resamples of intervals.
    """

    margins: Scores
    pair_prompts: Sequence[Hashable]
    raw_scores: Mapping[str, Scores]
    texts: Mapping[str, PolicyTexts]
    seed: int

    @cached_property
    def scores(self) -> dict[str, Scores]:
        """Side -> (M, N) scores, of mean 0 and standard deviation 1 for each model on SFT's completions."""
        return {side: standardize(rows, self.raw_scores["sft"]) for side, rows in self.raw_scores.items()}

    def report(self, seeds: Sequence[int], directories: Sequence[str]) -> dict[str, Any]:
        """Returns the models, their ensemble and their disagreement as overview.json holds them.

        Args:
            seeds: The seed of each model.
            directories: The directory of each model.
        """
        # A model with larger scores would weigh more in the mean, so its margins are divided by their scale.
        mean_margins = (self.margins / self.raw_scores["sft"].std(axis=1, keepdims=True)).mean(axis=0)
        pair_agreements = pairwise_agreement(self.margins)
        models = []
        for model, model_margins in enumerate(self.margins):
            calibration = measure_calibration(model_margins, seed=self.seed)
            models.append(
                {
                    "seed": seeds[model],
                    "directory": directories[model],
                    "accuracy": accuracy(model_margins > 0, self.pair_prompts).to_json(),
                    "ece": calibration["ece"],
                    "ece_by_chance": calibration["ece_by_chance"],
                    **self._text_figures({side: rows[model] for side, rows in self.scores.items()}),
                }
            )
        return {
            "seeds": list(seeds),
            "models": models,
            "ensemble": {
                "accuracy": accuracy(mean_margins > 0, self.pair_prompts).to_json(),
                **self._text_figures({side: rows.mean(axis=0) for side, rows in self.scores.items()}),
            },
            "agreement": {
                "mean": fmean(agreement.value for agreement in pair_agreements.values()),
                "pairs": [
                    {"seeds": [seeds[a], seeds[b]], **agreement.to_json()}
                    for (a, b), agreement in pair_agreements.items()
                ],
            },
            "disagreement": self._disagreement(),
            "own_minus_others": self._first_model_excess(),
        }

    def _text_figures(self, scores: Mapping[str, Scores]) -> dict[str, Any]:
        """Returns PPO's mean standardized score, and Spearman's ρ of scores and judge for each side.

        Both are None if the run was not evaluated; ρ is also None if scores do not vary.
        """
        if "ppo" not in self.texts:
            return {"ppo_score": None, "judge_correlation": None}
        correlations = {
            side: correlation(scores[side], texts.judge_scores, texts.groups, seed=self.seed, ranks=True)
            for side, texts in self.texts.items()
            if texts.judge_scores is not None
        }
        return {
            "ppo_score": self._mean(scores["ppo"]),
            "judge_correlation": {side: rho.to_json() if rho else None for side, rho in correlations.items()},
        }

    def _mean(self, values: Scores) -> dict[str, Any]:
        """Averages over completions, with an interval that resamples prompts, which both sides share."""
        return bootstrap_mean(values, self.texts["sft"].groups, seed=self.seed).to_json()

    def _disagreement(self) -> dict[str, Any]:
        by_side = {side: disagreement(rows) for side, rows in self.scores.items()}
        ppo = self.texts.get("ppo")
        figures: dict[str, Any] = {
            "over": "completions of the evaluation" if ppo else "samples of the SFT model on training prompts",
            "unrelated": unrelated_disagreement(len(self.margins)),
            "sft": self._mean(by_side["sft"]),
            "ppo": None,
            "ppo_minus_sft": None,
            "by_kl": [],
        }
        if ppo is not None and ppo.kl is not None:
            figures["ppo"] = self._mean(by_side["ppo"])
            figures["ppo_minus_sft"] = self._mean(by_side["ppo"] - by_side["sft"])
            figures["by_kl"] = average_by_kl(by_side["ppo"], ppo.kl, ppo.groups, seed=self.seed)
        return figures

    def _first_model_excess(self) -> dict[str, Any] | None:
        """Computes how much higher than the others the first model, PPO's reward model, scores PPO's completions."""
        if "ppo" not in self.texts:
            return None
        ppo = self.scores["ppo"]
        return self._mean(ppo[0] - ppo[1:].mean(axis=0))
