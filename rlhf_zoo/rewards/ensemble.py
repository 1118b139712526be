"""Combines several reward models into a single reward."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .. import functional as F
from ..errors import ZooError
from ..modeling.sampling.sampler import Samples
from .model import RewardModel

#: The default λ of mean_minus_variance.
DEFAULT_PENALTY = 0.5


def check_ensemble(models: Sequence[Any], how: str | None) -> None:
    """Checks that the number of reward models fits the setting that combines them.

    Args:
        models: The reward models or their paths.
        how: One of `functional.ENSEMBLES`; None for a single model.

    Raises:
        ZooError: There are several models and `how` is None, there are fewer than two and `how` is set, or a model is
            listed twice.
    """
    if len(models) > 1 and how is None:
        raise ZooError(
            f"There are {len(models)} reward models and reward_ensemble is not set: choose "
            f"{' or '.join(map(repr, F.ENSEMBLES))}."
        )
    if len(models) < 2 and how is not None:
        count = "one reward model" if models else "no reward model"
        raise ZooError(f"reward_ensemble is {how!r}, but there is {count}: use several, or remove reward_ensemble.")
    duplicate = next((model for index, model in enumerate(models) if model in models[:index]), None)
    if duplicate is not None:
        name = duplicate if isinstance(duplicate, str) else getattr(duplicate, "name", type(duplicate).__name__)
        raise ZooError(f"The reward model {name} is listed twice: use different models.")


class RewardEnsemble:
    """Combines the scores of M reward models with `functional.ensemble_scores`.

    The scores of all models must be on the same scale. So a model that centers or scales its scores must have a stored
    mean and standard deviation.

    Args:
        models: At least two different models.
        how: One of `functional.ENSEMBLES`.
        penalty: λ of mean_minus_variance; None for DEFAULT_PENALTY.

    Raises:
        ZooError: A model that centers or scales its scores has no stored statistics, or `check_ensemble` fails.
    """

    def __init__(self, models: Sequence[RewardModel], *, how: str | None, penalty: float | None = None) -> None:
        check_ensemble(models, how)
        for model in models:
            if model.lacks_statistics:
                raise ZooError(
                    f"The reward model {model.name} has no stored mean and standard deviation, which put the scores of "
                    "several models on the same scale: use models that `rlhf-zoo reward` trained, or set "
                    "score_centering and score_scaling to 'running' or 'none' if all scores are on the same scale "
                    "already."
                )
        self.models, self.how = list(models), str(how)  # `check_ensemble` has refused None
        self.penalty = DEFAULT_PENALTY if penalty is None else penalty

    def score_each(
        self,
        samples: Samples,
        texts: Sequence[Any],
        *,
        model_context: Callable[..., AbstractContextManager] = nullcontext,
    ) -> Tensor:
        """Scores sampled completions with each model; see `RewardModel.score_samples`.

        Args:
            samples: B completions.
            texts: B complete texts (prompt + completion) or conversations.
            model_context: Called with each model before it scores. The returned context is open while the model scores.

        Returns:
            Scores, (M, B).
        """
        scores = []
        for model in self.models:
            with model_context(model.model):
                scores.append(model.score_samples(samples, texts).to(samples.logprobs.device))
        return torch.stack(scores)

    def score_samples(self, samples: Samples, texts: Sequence[Any]) -> Tensor:
        """Scores sampled completions with all models combined.

        Args:
            samples: B completions.
            texts: B complete texts (prompt + completion) or conversations.

        Returns:
            Scores, (B,).
        """
        return self.combine(self.score_each(samples, texts))

    def score_texts(self, texts: Sequence[Any], *, ended: Sequence[bool]) -> Tensor:
        """Scores texts and conversations; see `RewardModel.score_texts`.

        Args:
            texts: B texts or conversations.
            ended: For each text, whether it ended by itself and was not cut off.

        Returns:
            Scores, (B,).
        """
        return self.combine(torch.stack([model.score_texts(texts, ended=ended).cpu() for model in self.models]))

    def combine(self, scores: Tensor) -> Tensor:
        """Combines the scores of the models.

        Args:
            scores: (M, B).

        Returns:
            Scores, (B,).
        """
        return F.ensemble_scores(scores, how=self.how, penalty=self.penalty)
