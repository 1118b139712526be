"""A minibatch, the data of one optimizer step, and its micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .actor_critic import TextBatch
from .rollout import Advantages, Rollout


class MinibatchSize(NamedTuple):
    """The denominators of a minibatch's loss, over all processes.

    Attributes:
        actions: () int64, the actions of all its completions.
        sequences: () int64, completions.
        length: the most actions that a completion may have.
        text_tokens: () int64, target tokens of all its texts; None without texts.
    """

    actions: Tensor
    sequences: Tensor
    length: int
    text_tokens: Tensor | None = None


@dataclass(frozen=True)
class Minibatch:
    """b completions with their estimates, and texts for the language-model loss; or a micro-batch of these.

    Attributes:
        rollout: the completions, with log π_old, log π_ref and V_old.
        estimates: their advantages and returns, by action.
        rows: (b,) int64, their rows in the update's rollout.
        size: of the minibatch, even if this is a micro-batch. Losses are divided by it, so that those of the
            micro-batches add up to the minibatch's.
        texts: for the language-model loss; None for none.
    """

    rollout: Rollout
    estimates: Advantages
    rows: Tensor
    size: MinibatchSize
    texts: TextBatch | None = None

    @classmethod
    def of(
        cls, rollout: Rollout, estimates: Advantages, rows: Tensor, *, length: int, texts: TextBatch | None = None
    ) -> Minibatch:
        """Takes some rows of an update's rollout as a minibatch.

        Args:
            rollout: all completions of the update, of all processes.
            estimates: their advantages and returns.
            rows: (b,) int64, the completions to take.
            length: the most actions that a completion may have.
            texts: for the language-model loss, of all processes.

        Returns:
            The minibatch, without columns that are padding in all of its rows.
        """
        # Counted before the minibatch is split, because each micro-batch and process divides by the whole size.
        size = MinibatchSize(
            actions=estimates.mask[rows].sum(),
            sequences=torch.tensor(len(rows), device=rows.device),
            length=length,
            text_tokens=None if texts is None else texts.mask.sum(),
        )
        return cls(rollout.rows(rows), estimates.rows(rows), rows, size, texts)

    def __len__(self) -> int:
        """Number of completions."""
        return len(self.rollout.samples)

    def micro_batch(self, rows: Tensor, texts: TextBatch | None = None) -> Minibatch:
        """Takes some rows of this minibatch; the size stays the minibatch's.

        Args:
            rows: (m,) int64, places within this minibatch.
            texts: the part of the minibatch's texts for this micro-batch.

        Returns:
            The micro-batch, without columns that are padding in all of its rows.
        """
        return replace(
            self,
            rollout=self.rollout.rows(rows),
            estimates=self.estimates.rows(rows),
            rows=self.rows[rows],
            texts=texts,
        )
