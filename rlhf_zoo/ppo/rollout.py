"""A rollout: completions of one batch of prompts, scored, with what the update needs of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import functional as F
from ..rewards import Scored
from ..sampling import Samples

__all__ = ["Advantages", "Rollout", "length_sorted"]


@dataclass(frozen=True)
class Rollout:
    """B completions of T positions at most.

    samples: prompts, completions, mask and log π_old; ref_logprobs (B, T): log π_ref; values (B, T): V_old.
    """

    samples: Samples
    ref_logprobs: Tensor
    values: Tensor

    @property
    def mask(self) -> Tensor:
        return self.samples.mask

    @property
    def logprobs(self) -> Tensor:
        return self.samples.logprobs

    @property
    def kl(self) -> Tensor:
        """Σ_t k1_t of each completion, (B,) in nats: what is reported as KL, whatever the penalty's estimator."""
        return F.kl_penalty(self.logprobs, self.ref_logprobs, estimator="k1").masked_fill(~self.mask, 0).sum(1)


@dataclass(frozen=True)
class Advantages:
    """Of a rollout: scores after shaping (B,), −β·ΣKL (B,), rewards per token, advantages and returns, each (B, T)."""

    scored: Scored
    scores: Tensor
    non_score: Tensor
    rewards: Tensor
    advantages: Tensor
    returns: Tensor


def length_sorted(index: Tensor, mask: Tensor, size: int) -> list[Tensor]:
    """Splits the rows `index` of a minibatch into micro-batches of `size`, alike in length: less padding is computed.

    The split changes no result: losses are summed over the minibatch's tokens.
    """
    order = mask[index].sum(1).argsort(stable=True)
    return list(torch.split(index[order], size))
