"""Groups rows of similar length into batches with little padding, for `train_sampling_strategy: group_by_length`.

transformers' own sampler draws from the global random state, so a run that resumes within an epoch would read different
rows. That sampler also does not support the pairs of a reward model.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import Trainer

# The number of batches that one sorted pool of rows is split into. A larger pool gives less padding, but the same rows
# then share a batch in more epochs.
_POOL_BATCHES = 50
# Columns with a row's tokens, here and in TRL. A pair is as long as its longer side, because both are padded to it.
_TOKEN_COLUMNS = ("input_ids", "chosen_ids", "rejected_ids")


class SeededLengthSampler(Sampler[int]):
    """Yields every row once, with rows of similar length in each batch. The order depends only on (seed, epoch).

    Args:
        lengths: The number of tokens of each row.
        batch_size: The number of rows in an optimizer step, over all processes.
        seed: The seed of the order.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, *, seed: int) -> None:
        self._lengths, self._batch_size, self._seed = lengths, batch_size, seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch. accelerate calls this when an epoch starts.

        Args:
            epoch: The epoch, from 0.
        """
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        rows = torch.randperm(len(self._lengths), generator=generator).tolist()
        full_count = len(rows) - len(rows) % self._batch_size  # the remaining rows are an incomplete batch, the last
        batches = []
        for start in range(0, full_count, _POOL_BATCHES * self._batch_size):
            pool = sorted(
                rows[start : min(start + _POOL_BATCHES * self._batch_size, full_count)], key=self._lengths.__getitem__
            )
            batches += [pool[offset : offset + self._batch_size] for offset in range(0, len(pool), self._batch_size)]
        for index in torch.randperm(len(batches), generator=generator).tolist():
            yield from batches[index]
        yield from rows[full_count:]


class LengthGroupingMixin(Trainer):
    """Mixin for a trainer: implements `group_by_length` with the same order in a resumed run."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        rows: Any = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy != "group_by_length" or rows is None:
            return super()._get_train_sampler(train_dataset)
        token_columns = [rows[name] for name in _TOKEN_COLUMNS if name in rows.column_names]
        lengths = [max(map(len, row)) for row in zip(*token_columns, strict=True)]
        batch_size = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        return SeededLengthSampler(
            lengths, batch_size, seed=self.args.seed if self.args.data_seed is None else self.args.data_seed
        )
