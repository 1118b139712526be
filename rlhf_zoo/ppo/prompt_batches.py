"""Reads batches of prompts: numbers the rows and drops filler rows."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase, Trainer

from ..modeling.prompts import uncollate
from ..modeling.reserved_columns import PROMPT_INDEX


class PromptReader(Trainer):
    """A Trainer that reads prompts. A prompt's number is part of the key of its random stream."""

    processing_class: PreTrainedTokenizerBase

    def index_here(self, place: int) -> int:
        """Returns an index that no other process gives to one of its prompts.

        Args:
            place: The prompt's number in this process.
        """
        return place * self.args.world_size + self.args.process_index

    def as_rows(self, batch: Any, *, before: int = 0) -> list[dict]:
        """Converts a batch of the collator to one mapping per prompt, with unpadded token ids.

        If the collator dropped the prompts' numbers, prompts are numbered in the order in which a single process would
        read them.

        Args:
            batch: a list of rows, or a mapping of stacked columns.
            before: how many prompts all processes have already read in this step or evaluation.
        """
        if not isinstance(batch, Mapping):
            return list(batch)
        rows = uncollate(batch, self.processing_class)
        first = before + self.args.process_index * len(rows)
        return [{PROMPT_INDEX: first + index} | row for index, row in enumerate(rows)]

    def not_filling(self, rows: int) -> int:
        """Counts the prompts of a batch that are not filler.

        Accelerate fills the last batch of an epoch with the first prompts, so that all processes get equally many.

        Args:
            rows: Prompts in the batch.
        """
        gradient_state = self.accelerator.gradient_state
        if self.args.world_size == 1 or not gradient_state.end_of_dataloader or gradient_state.remainder <= 0:
            return rows
        return min(max(gradient_state.remainder - self.args.process_index * rows, 0), rows)

    def rows_of(self, loader: Iterable[Any]) -> Iterator[list[dict]]:
        """Yields batches of numbered prompts.

        Args:
            loader: The batches.
        """
        read_before = 0
        for batch in loader:
            rows = self.as_rows(batch, before=read_before)
            read_before += len(rows) * self.args.world_size
            yield rows
