"""Counts the rows that SFT's max_length cuts, and those among them that lose the whole answer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import ZooError
from ...modeling.chat import has_answer_prefix, tokenize_prompt
from ...modeling.chat_template import is_conversation, render_ids

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class CutRows:
    """Counts of rows with more than `max_length` tokens.

    Attributes:
        max_length: Maximum number of tokens that SFT keeps of a row.
        rows: Number of rows that SFT trains on.
        cut: Number of rows with more than `max_length` tokens.
        without_answer: Number of cut rows that keep no token of the answer.
    """

    max_length: int
    rows: int
    cut: int
    without_answer: int

    @property
    def sentence(self) -> str:
        """The counts as a sentence without its period."""
        clause = f"; {self.without_answer:,} of them keep no token of the answer" if self.without_answer else ""
        return f"max_length, {self.max_length}, cuts {self.cut:,} of {self.rows:,} rows{clause}"


def count_cut_rows(
    rows: Dataset, tokenizer: PreTrainedTokenizerBase, trainer: Any, *, text_column: str
) -> CutRows | None:
    """Counts the rows that SFT's max_length cuts.

    Args:
        rows: The rows that SFT trains on, in the columns that SFT reads.
        tokenizer: The policy's tokenizer, with its chat template.
        trainer: The trainer's configuration.
        text_column: The column of plain texts.

    Returns:
        The counts; None if no token is lost: max_length is None, or packing moves the remaining tokens to another row.
    """
    max_length = trainer.max_length
    if max_length is None or (trainer.packing and trainer.packing_strategy != "bfd"):
        return None
    keeps_start = trainer.truncation_mode == "keep_start"
    cut_count = lost_answer_count = 0
    for row in rows:
        if len(_row_ids(row, tokenizer, text_column)) > max_length:
            cut_count += 1
            answer_start = _answer_start(row, tokenizer) if keeps_start else None
            lost_answer_count += answer_start is not None and answer_start >= max_length
    return CutRows(max_length, len(rows), cut_count, lost_answer_count)


def _row_ids(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, text_column: str) -> list[int]:
    """Tokenizes a row as trl does."""
    if "prompt" in row:
        content = row["prompt"] + row["completion"]
    else:
        content = row["messages" if "messages" in row else text_column]
    if is_conversation(content):
        return render_ids(content, tokenizer)
    eos = str(tokenizer.eos_token or "")
    return list(tokenizer(content if content.endswith(eos) else content + eos)["input_ids"])


def _answer_start(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Returns how many tokens precede a row's last answer; None if the row has no separate answer, or it is unknown."""
    if "prompt" in row:
        prompt = row["prompt"]
    elif "messages" in row and has_answer_prefix(row["messages"]):
        prompt = row["messages"][:-1]
    else:
        return None
    with suppress(ZooError):  # some templates refuse a conversation that does not end in an answer
        return len(tokenize_prompt(prompt, tokenizer))
    return None
