"""Batches of prompts as the trainer reads them: numbered, and without the rows that only fill a batch up."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase, Trainer

from ..modeling.prompts import uncollate
from ..modeling.reserved_columns import PROMPT_INDEX


class PromptReader(Trainer):
    """A Trainer that reads prompts. A prompt's number is part of the key of its random stream."""

    processing_class: PreTrainedTokenizerBase

    def index_here(self, place: int) -> int:
        """An index of a prompt at `place` among this process's own, which no other process gives a prompt of its."""
        return place * self.args.world_size + self.args.process_index

    def as_rows(self, batch: Any, *, before: int = 0) -> list[dict]:
        """A batch as the collator gave it, as one mapping a prompt, with unpadded token ids.

        Prompts whose number the collator left out are numbered in the order in which one process would read them.

        Args:
            batch: a list of rows, or a mapping of stacked columns.
            before: how many prompts all processes have read of this step or evaluation before.
        """
        if not isinstance(batch, Mapping):
            return list(batch)
        rows = uncollate(batch, self.processing_class)
        first = before + self.args.process_index * len(rows)
        return [{PROMPT_INDEX: first + place} | row for place, row in enumerate(rows)]

    def not_filling(self, rows: int) -> int:
        """How many of the `rows` prompts in the last batch that was read are not there only to fill it up.

        Accelerate gives the last batch of a pass as many rows in each process, by reading the first prompts again.
        """
        reading = self.accelerator.gradient_state
        if self.args.world_size == 1 or not reading.end_of_dataloader or reading.remainder <= 0:
            return rows
        return min(max(reading.remainder - self.args.process_index * rows, 0), rows)

    def rows_of(self, loader: Iterable[Any]) -> Iterator[list[dict]]:
        """The rows of held-out prompts, batch by batch, each prompt with its number."""
        before = 0
        for batch in loader:
            rows = self.as_rows(batch, before=before)
            before += len(rows) * self.args.world_size
            yield rows
