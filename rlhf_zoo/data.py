"""Data sets in the forms that the trainers take: prompts, lines and preference pairs."""

import logging
from collections.abc import Mapping
from typing import Any

from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .chat import prompt_ids as tokenize_prompt
from .errors import ZooError
from .reserved import PROMPT_INDEX, PROMPT_TOKENS, how_to_rename, withheld

log = logging.getLogger(__name__)


def need_columns(dataset: Dataset, columns: list[str], *, of: str) -> None:
    """Raises ZooError when `dataset` lacks a column or has no row; `of` names it in the message."""
    missing = [column for column in columns if column not in dataset.column_names]
    if missing:
        raise ZooError(
            f"{of} has no column {missing[0]!r}, only {', '.join(map(repr, dataset.column_names))}: rename the column "
            "or choose another data set."
        )
    if len(dataset) == 0:
        raise ZooError(f"{of} is empty: choose another split.")


def check_room(row: int, ids: list[int], *, context: int | None, room: int) -> None:
    """Raises ZooError for an empty prompt, and for one that leaves less than `room` tokens of the context."""
    if not ids:
        raise ZooError(f"Prompt {row} is empty: the policy needs at least one token to start from.")
    if context is not None and len(ids) + room > context:
        raise ZooError(
            f"Prompt {row} has {len(ids)} tokens, and with response_length {room} it passes the context of {context}: "
            "shorten it or lower response_length."
        )


def prepare_prompts(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int | None,
    room: int,
    num_proc: int | None = None,
) -> Dataset:
    """Adds token ids and a fixed index to each prompt, in columns of our own names.

    dataset: has `prompt` (texts or conversations) or, as TRL's PPO took them, `input_ids`. context: positions of the
    model, None if unbounded; room: tokens that a completion may take; num_proc: processes that tokenize. Raises
    ZooError for an empty prompt or one that leaves too little room.
    """
    need_columns(
        dataset, ["input_ids"] if PROMPT_TOKENS in dataset.column_names else ["prompt"], of="The prompt data set"
    )
    if PROMPT_TOKENS not in dataset.column_names:
        dataset = dataset.map(
            lambda row: {PROMPT_TOKENS: tokenize_prompt(row["prompt"], tokenizer)},
            desc="Tokenizing prompts",
            num_proc=num_proc,
        )
    for row, ids in enumerate(dataset[PROMPT_TOKENS]):
        check_room(row, ids, context=context, room=room)
    if PROMPT_INDEX in dataset.column_names:  # part of a data set that a trainer prepared
        dataset = dataset.remove_columns(PROMPT_INDEX)
    return dataset.add_column(PROMPT_INDEX, list(range(len(dataset))))


def say_withheld(dataset: Dataset) -> None:
    """Says in a line which columns reward functions do not get, as these get something of ours by that name."""
    for name in withheld(dataset.column_names):
        log.warning("Reward functions do not get the prompts' column %r: to pass it on, %s.", name, how_to_rename(name))


def unstacked(batch: Mapping[str, Any], tokenizer: Any) -> list[dict[str, Any]]:
    """A batch that a collator stacked, as one mapping a prompt, with unpadded token ids."""
    columns = dict(batch)
    attention = columns.pop("attention_mask", None)
    ids, pad = columns.get(PROMPT_TOKENS), tokenizer.pad_token_id
    if attention is None and isinstance(ids, Tensor) and pad not in (None, tokenizer.eos_token_id):
        attention = ids != pad  # TRL's PPO told prompts from padding so
    rows = []
    for place in range(len(next(iter(columns.values())))):
        row = {n: x[place].tolist() if isinstance(x, Tensor) else x[place] for n, x in columns.items()}
        if attention is not None:
            row[PROMPT_TOKENS] = [i for i, real in zip(row[PROMPT_TOKENS], attention[place], strict=True) if real]
        rows.append(row)
    return rows
