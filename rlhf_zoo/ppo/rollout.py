"""A rollout: completions of a batch of prompts, with the numbers that an update needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import functional as F
from ..modeling.sampling.sampler import Samples
from ..rewards import RewardScores
from .config import PPOConfig
from .kl_controller import RunningScores


@dataclass(frozen=True)
class Rollout:
    """B completions with at most T tokens.

    Attributes:
        samples: Prompts, completions, mask and log π_old.
        ref_logprobs: (B, T) in nats, log π_ref.
        values: (B, T), V_old.
        has_reference: Whether there is a reference. Without it, ref_logprobs is log π_old, and KL is unknown.
        engine_logprobs: (B, T) in nats, log π of another engine that sampled the tokens; None for our own sampler.
    """

    samples: Samples
    ref_logprobs: Tensor
    values: Tensor
    has_reference: bool = True
    engine_logprobs: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """(B, T) bool, True on response tokens."""
        return self.samples.mask

    @property
    def logprobs(self) -> Tensor:
        """(B, T) in nats, log π_old."""
        return self.samples.logprobs

    @property
    def kl(self) -> Tensor:
        """Σ_t k1_t of each completion, (B,) in nats, NaN without a reference.

        The metrics use this KL, regardless of the penalty's estimator.
        """
        if not self.has_reference:
            return torch.full((len(self.mask),), torch.nan, device=self.mask.device)
        return F.kl_penalty(self.logprobs, self.ref_logprobs, estimator="k1").masked_fill(~self.mask, 0).sum(1)

    @property
    def engine_mismatch(self) -> Tensor | None:
        """Mean |log π_old − log π of the engine| over a completion's tokens, (B,) in nats; None for our own sampler."""
        if self.engine_logprobs is None:
            return None
        difference = (self.logprobs - self.engine_logprobs).abs().masked_fill(~self.mask, 0)
        return difference.sum(1) / self.mask.sum(1)

    def select(self, indices: Tensor) -> Rollout:
        """Selects rows, and drops columns that are padding in all of them.

        Args:
            indices: (n,) int64.
        """
        samples = self.samples.select(indices)
        # `Samples.select` drops columns that are padding in all of these rows, so drop them from the other tensors too.
        width = samples.mask.shape[1]
        engine_logprobs = None if self.engine_logprobs is None else self.engine_logprobs[indices, :width]
        return replace(
            self,
            samples=samples,
            ref_logprobs=self.ref_logprobs[indices, :width],
            values=self.values[indices, :width],
            engine_logprobs=engine_logprobs,
        )


@dataclass(frozen=True)
class Advantages:
    """Rewards, advantages and returns of a rollout's actions. A is T if each token is an action, 1 if a completion is.

    Attributes:
        reward_scores: The scores before shaping.
        shaped_scores: (B,), before score_centering "prompt" subtracts the mean of the prompt's other scores.
        non_score: (B,), −β·ΣKL if KL is in the reward, otherwise 0.
        rewards: (B, A), after whitening, if any.
        values: (B, A), V_old.
        advantages: (B, A), after whitening, if any.
        returns: (B, A).
        mask: (B, A) bool.
    """

    reward_scores: RewardScores
    shaped_scores: Tensor
    non_score: Tensor
    rewards: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    mask: Tensor

    def select(self, indices: Tensor) -> Advantages:
        """Selects rows, except of `reward_scores`, and drops action positions that are padding in all of them.

        Args:
            indices: (n,) int64.
        """
        # The width counts actions, not tokens: if the completion is one action, there is a single column.
        width = int(self.mask[indices].sum(1).max())
        per_action = ("rewards", "values", "advantages", "returns", "mask")
        selected_tensors = {name: getattr(self, name)[indices, :width] for name in per_action}
        selected_tensors |= {name: getattr(self, name)[indices] for name in ("shaped_scores", "non_score")}
        return replace(self, **selected_tensors)


def shape_reward_scores(
    reward_scores: RewardScores, ended: Tensor, args: PPOConfig, running_scores: RunningScores
) -> Tensor:
    """Centers, scales and clips scores, then corrects them for a missing end of sequence.

    With "stored", the reward models have already centered or scaled their scores. With score_centering "prompt",
    `compute_advantages` centers them, because that needs the prompt's other completions.

    Args:
        reward_scores: The scores of B completions.
        ended: (B,) bool.
        args: The settings.
        running_scores: The running statistics.

    Returns:
        (B,).
    """
    scores = F.shape_scores(
        reward_scores.total,
        mean=running_scores.mean if args.score_centering == "running" else 0.0,
        std=running_scores.std if args.score_scaling == "running" else 1.0,
        clip=args.score_clip,
    )
    # Subtract the penalty after clipping, so that score_clip cannot undo it.
    scores = F.missing_eos_penalty(scores, ended, penalty=args.missing_eos_penalty)
    return F.missing_eos_score(scores, ended, score=args.missing_eos_score)


def shape_token_scores(
    reward_scores: RewardScores, ended: Tensor, args: PPOConfig, running_scores: RunningScores
) -> Tensor | None:
    """Scales per-token scores as the score is scaled: by the running σ with score_scaling "running".

    Without the end of sequence, missing_eos_score replaces the completion's score, and its per-token scores are 0.
    `compute_advantages` gives the last token what centering, clipping and penalties change in the score.

    Args:
        reward_scores: The scores of B completions.
        ended: (B,) bool.
        args: The settings.
        running_scores: The running statistics.

    Returns:
        (B, T); None if no reward gives per-token scores.
    """
    if reward_scores.by_token is None:
        return None
    std = running_scores.std if args.score_scaling == "running" else 1.0
    token_scores = F.shape_scores(reward_scores.by_token, std=std)
    # A replaced score is the completion's only reward.
    return token_scores if args.missing_eos_score is None else token_scores.masked_fill(~ended.unsqueeze(1), 0)
