"""Reads batches of prompts: numbers the rows, and counts those that are not filler."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase, Trainer

from ..modeling.prompts import uncollate
from ..modeling.reserved_columns import PROMPT_INDEX


class PromptReader(Trainer):
    """A Trainer that reads prompts. The index of a prompt is part of the key of its random stream."""

    processing_class: PreTrainedTokenizerBase

    def global_index(self, local_index: int) -> int:
        """Returns an index that no other process assigns to a prompt.

        Args:
            local_index: The prompt's index in this process.
        """
        return local_index * self.args.world_size + self.args.process_index

    def rows_from_batch(self, batch: Any, *, prompts_read: int = 0) -> list[dict]:
        """Converts the collator's batch to one mapping per prompt, with unpadded token ids.

        If the collator dropped the prompts' indices, prompts are numbered in the order in which a single process would
        read them.

        Args:
            batch: A list of rows, or a mapping of stacked columns.
            prompts_read: The number of prompts that all processes have already read in this step or evaluation.
        """
        if not isinstance(batch, Mapping):
            return list(batch)
        rows = uncollate(batch, self.processing_class)
        first_index = prompts_read + self.args.process_index * len(rows)
        return [{PROMPT_INDEX: first_index + index} | row for index, row in enumerate(rows)]

    def count_without_filler(self, batch_size: int) -> int:
        """Counts the prompts of a batch that are not filler.

        accelerate fills up the last batch of an epoch with the epoch's first prompts, so that all processes get the
        same number.

        Args:
            batch_size: The number of prompts in the batch.
        """
        gradient_state = self.accelerator.gradient_state
        if self.args.world_size == 1 or not gradient_state.end_of_dataloader or gradient_state.remainder <= 0:
            return batch_size
        return min(max(gradient_state.remainder - self.args.process_index * batch_size, 0), batch_size)

    def numbered_batches(self, loader: Iterable[Any]) -> Iterator[list[dict]]:
        """Yields batches of numbered prompts.

        Args:
            loader: The batches.
        """
        prompts_read = 0
        for batch in loader:
            rows = self.rows_from_batch(batch, prompts_read=prompts_read)
            prompts_read += len(rows) * self.args.world_size
            yield rows
