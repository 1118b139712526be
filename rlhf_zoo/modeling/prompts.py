"""Checks, tokenizes and numbers the prompts of a data set for PPO."""

import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from datasets import Dataset, concatenate_datasets
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..errors import ZooError
from .chat import completion_text, display_text, tokenize_prompt
from .reserved_columns import PROMPT_INDEX, PROMPT_TOKENS, how_to_rename, withheld_columns

log = logging.getLogger(__name__)

#: The longest excerpt of a prompt that an error quotes, in characters.
MAX_QUOTED = 60


def need_columns(dataset: Dataset, columns: list[str], *, subject: str) -> None:
    """Checks that a data set has columns, and rows.

    Args:
        dataset: The data set.
        columns: The columns.
        subject: The data set's name in errors.

    Raises:
        ZooError: A column is missing, or there is no row.
    """
    missing = [column for column in columns if column not in dataset.column_names]
    if missing:
        raise ZooError(
            f"{subject} has no column {missing[0]!r}, only {', '.join(map(repr, dataset.column_names))}: rename the "
            "column or choose another data set."
        )
    if len(dataset) == 0:
        raise ZooError(f"{subject} is empty: choose another split.")


def check_room(row: int, ids: list[int], *, context: int | None, room: int) -> None:
    """Checks that a prompt leaves room for its completion.

    Args:
        row: The prompt's index, for the error.
        ids: The prompt's token ids.
        context: The model's context length; None if unbounded.
        room: The most tokens of a completion.

    Raises:
        ZooError: The prompt is empty or too long.
    """
    if not ids:
        raise ZooError(f"Prompt {row} is empty: the policy needs at least one token to start from.")
    if context is not None and len(ids) + room > context:
        raise ZooError(
            f"Prompt {row} has {len(ids)} tokens and exceeds the context of {context} with response_length {room}: "
            "shorten the prompt or lower response_length."
        )


def prepare_prompts(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int | None,
    room: int,
    num_proc: int | None = None,
) -> Dataset:
    """Adds token ids and a fixed index to each prompt, in columns with reserved names.

    If the data set has `input_ids`, the policy reads these, and reward functions read `prompt`.

    Args:
        dataset: A data set with `prompt` (texts or conversations) or, as in TRL's PPO, `input_ids`, which may be padded
            and may have an `attention_mask`.
        tokenizer: The policy's.
        context: The model's context length; None if unbounded.
        room: The most tokens of a completion.
        num_proc: The number of processes that tokenize.

    Returns:
        The data set in plain Python values, its `input_ids` without padding.

    Raises:
        ZooError: A prompt is empty, leaves too little room, has an `attention_mask` that does not fit its `input_ids`,
            or has `input_ids` of another text than its `prompt`.
    """
    dataset = dataset.with_format(None)
    has_ids = PROMPT_TOKENS in dataset.column_names
    need_columns(dataset, [PROMPT_TOKENS] if has_ids else ["prompt"], subject="The prompt data set")
    if has_ids:
        dataset = _remove_padding(dataset, tokenizer)
        if "prompt" in dataset.column_names:
            _check_same_prompts(dataset, tokenizer)
    else:
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


def _remove_padding(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Returns the data set with unpadded `input_ids` and without `attention_mask`."""
    kept = [name for name in dataset.column_names if name not in (PROMPT_TOKENS, "attention_mask")]
    columns = [Dataset.from_dict({PROMPT_TOKENS: read_unpadded_ids(dataset, tokenizer, subject="Prompt")})]
    return concatenate_datasets([*columns, *([dataset.select_columns(kept)] if kept else [])], axis=1)


def read_unpadded_ids(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, *, subject: str) -> list[list[int]]:
    """Returns the column `input_ids` without padding.

    Args:
        dataset: The data set. Its column `attention_mask` marks padding. Without that column, PAD is padding if it is
            not EOS.
        tokenizer: The tokenizer that defines PAD.
        subject: The name of a row in errors, such as "Prompt" in "Prompt 3".

    Raises:
        ZooError: A mask has another length than its ids, or there is padding between tokens.
    """
    dataset = dataset.with_format(None)
    padded = list(dataset[PROMPT_TOKENS])
    has_mask = "attention_mask" in dataset.column_names
    masks = dataset["attention_mask"] if has_mask else [_padding_mask(ids, tokenizer) for ids in padded]
    return [
        _unpad(ids, mask, subject=f"{subject} {row}") for row, (ids, mask) in enumerate(zip(padded, masks, strict=True))
    ]


def _padding_mask(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[bool]:
    """Returns which ids are not padding if there is no mask: as in TRL's PPO, all but PAD, if PAD is not EOS."""
    pad = tokenizer.pad_token_id
    marks_padding = pad not in (None, tokenizer.eos_token_id)
    return [not marks_padding or token_id != pad for token_id in ids]


def _unpad(ids: Sequence[int], mask: Sequence[Any] | None, *, subject: str) -> list[int]:
    """Returns the ids that the mask keeps.

    Raises:
        ZooError: The mask has another length, or drops ids between ids that it keeps.
    """
    if mask is None or len(mask) != len(ids):
        length = "none" if mask is None else f"one of {len(mask)}"
        raise ZooError(
            f"{subject} has {len(ids)} input_ids and an attention_mask of another length ({length}): give one entry "
            "for each id."
        )
    positions = [position for position, is_token in enumerate(mask) if is_token]
    if positions and len(positions) != positions[-1] - positions[0] + 1:
        raise ZooError(
            f"{subject} has padding between its tokens, at position {_first_gap(positions)} of input_ids: pad on the "
            "left or on the right."
        )
    return [ids[position] for position in positions]


def _first_gap(positions: Sequence[int]) -> int:
    return next(previous + 1 for previous, position in pairwise(positions) if position != previous + 1)


def _check_same_prompts(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
    """Warns if `input_ids` are not the ids to which the trainer would tokenize `prompt`.

    Raises:
        ZooError: `input_ids` encode another text than `prompt`.
    """
    difference_count = 0
    for row, (prompt, ids) in enumerate(zip(dataset["prompt"], dataset[PROMPT_TOKENS], strict=True)):
        if ids == tokenize_prompt(prompt, tokenizer):
            continue
        difference_count += 1
        text = str(tokenizer.decode(ids, skip_special_tokens=True))
        turns = [prompt] if isinstance(prompt, str) else [completion_text([turn]) for turn in prompt]
        if not all(turn.strip() in text for turn in turns):
            raise ZooError(
                f"Prompt {row} is {display_text(prompt)[:MAX_QUOTED]!r}, but its input_ids encode "
                f"{text[:MAX_QUOTED]!r}: the policy would read the input_ids and reward functions the prompt, so "
                "remove the column that is wrong."
            )
    if difference_count:
        log.warning(
            "%d of %d prompts have input_ids that differ from the tokenized 'prompt': the policy reads input_ids, "
            "and reward functions get 'prompt'.",
            difference_count, len(dataset),
        )  # fmt: skip


def warn_of_reserved_columns(dataset: Dataset) -> None:
    """Warns of columns that reward functions do not get, because their names are reserved.

    Args:
        dataset: The prompts.
    """
    for name in withheld_columns(dataset.column_names):
        log.warning("Reward functions do not get the prompts' column %r: to pass it on, %s.", name, how_to_rename(name))


def uncollate(batch: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Splits a batch that a collator stacked into one mapping per prompt, with unpadded token ids.

    Args:
        batch: The columns of the batch.
        tokenizer: The policy's.

    Raises:
        ZooError: An `attention_mask` does not fit its `input_ids`.
    """
    columns = dict(batch)
    attention = columns.pop("attention_mask", None)
    rows = []
    for index in range(len(next(iter(columns.values())))):
        row = {name: x[index].tolist() if isinstance(x, Tensor) else x[index] for name, x in columns.items()}
        if (ids := row.get(PROMPT_TOKENS)) is not None:
            mask = _padding_mask(ids, tokenizer) if attention is None else list(map(bool, attention[index]))
            row[PROMPT_TOKENS] = _unpad(ids, mask, subject=f"Prompt {index} of a batch")
        rows.append(row)
    return rows
