"""A minibatch (the rows of one optimizer step) and its micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .actor_critic import TextBatch
from .rollout import Advantages, Rollout


class MinibatchSize(NamedTuple):
    """The counts that a minibatch's loss is divided by, over all processes.

    Attributes:
        actions: () int64, the number of actions in all completions.
        sequences: () int64, the number of completions.
        max_actions: The maximum number of actions in a completion.
        text_tokens: () int64, the number of target tokens in all texts; None without texts.
    """

    actions: Tensor
    sequences: Tensor
    max_actions: int
    text_tokens: Tensor | None = None


@dataclass(frozen=True)
class Minibatch:
    """b completions with their advantages, and texts for the PTX loss: a minibatch, or one of its micro-batches.

    Attributes:
        rollout: The completions, with log π_old, log π_ref and V_old.
        advantages: The completions' advantages and returns, per action.
        indices: (b,) int64, the rows of these completions in the update's rollout.
        size: The size of the whole minibatch, even if this is a micro-batch. Losses are divided by it, so that the
            losses of the micro-batches add up to the minibatch's.
        texts: The texts for the PTX loss; None without that loss.
    """

    rollout: Rollout
    advantages: Advantages
    indices: Tensor
    size: MinibatchSize
    texts: TextBatch | None = None

    @classmethod
    def of(
        cls,
        rollout: Rollout,
        advantages: Advantages,
        indices: Tensor,
        *,
        max_actions: int,
        texts: TextBatch | None = None,
    ) -> Minibatch:
        """Makes a minibatch from some completions of an update's rollout.

        Args:
            rollout: All completions of the update, of all processes.
            advantages: The completions' advantages and returns.
            indices: (b,) int64, the completions of the minibatch.
            max_actions: The maximum number of actions in a completion.
            texts: The texts for the PTX loss, of all processes; None without that loss.

        Returns:
            The minibatch, without columns that are padding in all of its completions.
        """
        # Count before the minibatch is split, because each micro-batch and process divides by the whole size.
        size = MinibatchSize(
            actions=advantages.mask[indices].sum(),
            sequences=torch.tensor(len(indices), device=indices.device),
            max_actions=max_actions,
            text_tokens=None if texts is None else texts.mask.sum(),
        )
        return cls(rollout.select(indices), advantages.select(indices), indices, size, texts)

    def __len__(self) -> int:
        """Number of completions."""
        return len(self.rollout.samples)

    def micro_batch(self, indices: Tensor, texts: TextBatch | None = None) -> Minibatch:
        """Makes a micro-batch from some completions of this minibatch. `size` stays the minibatch's.

        Args:
            indices: (m,) int64, rows within this minibatch.
            texts: The part of the minibatch's texts for this micro-batch.

        Returns:
            The micro-batch, without columns that are padding in all of its completions.
        """
        return replace(
            self,
            rollout=self.rollout.select(indices),
            advantages=self.advantages.select(indices),
            indices=self.indices[indices],
            texts=texts,
        )
