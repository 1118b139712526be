"""Prepares a data set of prompts for PPO: checks, tokenizes and numbers the rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..errors import ZooError
from .chat import completion_text, display_text, tokenize_prompt
from .reserved_columns import PROMPT_INDEX, PROMPT_TOKENS, how_to_rename, withheld_columns

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)

#: The maximum length of a prompt's excerpt in an error, in characters.
MAX_QUOTED = 60


def require_columns(dataset: Dataset, columns: list[str], *, subject: str) -> None:
    """Checks that a data set has certain columns and at least one row.

    Args:
        dataset: The data set.
        columns: The names of the required columns.
        subject: The data set's name in errors.

    Raises:
        ZooError: A column is missing, or there are no rows.
    """
    missing_columns = [column for column in columns if column not in dataset.column_names]
    if missing_columns:
        raise ZooError(
            f"{subject} has no column {missing_columns[0]!r}, only {', '.join(map(repr, dataset.column_names))}: "
            "rename the column or choose another data set."
        )
    if len(dataset) == 0:
        raise ZooError(f"{subject} is empty: choose another split.")


def check_prompt_length(row: int, ids: list[int], *, context_length: int | None, max_new_tokens: int) -> None:
    """Checks that a prompt and its completion fit into the model's context.

    Args:
        row: The prompt's row number, for errors.
        ids: The prompt's token ids.
        context_length: The model's context length in tokens; None if it has no limit.
        max_new_tokens: The maximum number of tokens in a completion.

    Raises:
        ZooError: The prompt is empty or too long.
    """
    if not ids:
        raise ZooError(f"Prompt {row} is empty, but the policy needs at least one token to start from: remove it.")
    if context_length is not None and len(ids) + max_new_tokens > context_length:
        raise ZooError(
            f"Prompt {row} has {len(ids)} tokens and exceeds the context of {context_length} with "
            f"response_length {max_new_tokens}: shorten the prompt or lower response_length."
        )


def prepare_prompts(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context_length: int | None,
    max_new_tokens: int,
    num_proc: int | None = None,
) -> Dataset:
    """Adds token ids and a fixed index to each prompt, in columns with reserved names.

    If the data set already has `input_ids`, the policy reads those, but reward functions still read `prompt`.

    Args:
        dataset: A data set with `prompt` (texts or conversations) or, as in TRL's PPO, `input_ids`, which may be padded
            with or without an `attention_mask`.
        tokenizer: The policy's tokenizer.
        context_length: The model's context length in tokens; None if it has no limit.
        max_new_tokens: The maximum number of tokens in a completion.
        num_proc: The number of processes that tokenize; None for this process alone.

    Returns:
        The data set, with plain Python values and unpadded `input_ids`.

    Raises:
        ZooError: A column is missing or there are no rows, a prompt is empty or too long, its `attention_mask` does not
            fit its `input_ids`, or its `input_ids` do not encode `prompt`.
    """
    dataset = dataset.with_format(None)
    has_ids = PROMPT_TOKENS in dataset.column_names
    require_columns(dataset, [PROMPT_TOKENS] if has_ids else ["prompt"], subject="The prompt data set")
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
        check_prompt_length(row, ids, context_length=context_length, max_new_tokens=max_new_tokens)
    if PROMPT_INDEX in dataset.column_names:  # another trainer has prepared this data set
        dataset = dataset.remove_columns(PROMPT_INDEX)
    # The random stream of a prompt depends on its index, so the index must not depend on the order of batches.
    return dataset.add_column(PROMPT_INDEX, list(range(len(dataset))))


def _remove_padding(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Returns the data set with unpadded `input_ids` and without `attention_mask`."""
    other_columns = [name for name in dataset.column_names if name not in (PROMPT_TOKENS, "attention_mask")]
    from datasets import Dataset, concatenate_datasets

    ids = Dataset.from_dict({PROMPT_TOKENS: read_unpadded_ids(dataset, tokenizer, subject="Prompt")})
    return concatenate_datasets([ids, dataset.select_columns(other_columns)], axis=1) if other_columns else ids


def read_unpadded_ids(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, *, subject: str) -> list[list[int]]:
    """Returns the column `input_ids` without padding.

    Args:
        dataset: The data set. Its column `attention_mask` marks padding. Without that column, PAD marks padding, unless
            PAD is EOS.
        tokenizer: The tokenizer that defines PAD.
        subject: The word for a row in errors, such as "Prompt" in "Prompt 3".

    Raises:
        ZooError: A mask is missing or differs in length from its ids, or there is padding between tokens.
    """
    dataset = dataset.with_format(None)
    padded_ids = list(dataset[PROMPT_TOKENS])
    has_mask = "attention_mask" in dataset.column_names
    masks = dataset["attention_mask"] if has_mask else [_token_mask(ids, tokenizer) for ids in padded_ids]
    rows = enumerate(zip(padded_ids, masks, strict=True))
    return [_unpad(ids, mask, subject=f"{subject} {row}") for row, (ids, mask) in rows]


def _token_mask(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[bool]:
    """Guesses which ids are not padding, as TRL's PPO does: all except PAD; all if PAD is EOS or missing."""
    pad = tokenizer.pad_token_id
    pad_marks_padding = pad not in (None, tokenizer.eos_token_id)
    return [not pad_marks_padding or token_id != pad for token_id in ids]


def _unpad(ids: Sequence[int], mask: Sequence[Any] | None, *, subject: str) -> list[int]:
    """Returns the ids that the mask keeps.

    Raises:
        ZooError: The mask is missing or has a different length, or drops ids between ids that it keeps.
    """
    if mask is None or len(mask) != len(ids):
        problem = "is missing" if mask is None else f"has {len(mask)} entries"
        raise ZooError(
            f"{subject} has {len(ids)} input_ids, but its attention_mask {problem}: give the mask one for each id."
        )
    positions = [position for position, is_token in enumerate(mask) if is_token]
    gap = next((previous + 1 for previous, position in pairwise(positions) if position != previous + 1), None)
    if gap is not None:
        raise ZooError(
            f"{subject} has padding between its tokens, at position {gap} of input_ids: pad on the left or on the "
            "right."
        )
    return [ids[position] for position in positions]


def _check_same_prompts(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
    """Warns if `input_ids` differ from the tokenized `prompt`.

    Raises:
        ZooError: `input_ids` do not encode `prompt`.
    """
    difference_count = 0
    for row, (prompt, ids) in enumerate(zip(dataset["prompt"], dataset[PROMPT_TOKENS], strict=True)):
        if ids == tokenize_prompt(prompt, tokenizer):
            continue
        difference_count += 1
        # Another rendering of the same prompt is allowed, as long as the decoded text contains all turns.
        text = str(tokenizer.decode(ids, skip_special_tokens=True))
        turns = [prompt] if isinstance(prompt, str) else [completion_text([turn]) for turn in prompt]
        if not all(turn.strip() in text for turn in turns):
            raise ZooError(
                f"Prompt {row} is {display_text(prompt)[:MAX_QUOTED]!r}, but its input_ids encode "
                f"{text[:MAX_QUOTED]!r}: the policy would read the input_ids, and reward functions the prompt, so "
                "remove the column that is wrong."
            )
    if difference_count:
        log.warning(
            "%d of %d prompts have input_ids that differ from the tokenized 'prompt': the policy reads input_ids, "
            "and reward functions get 'prompt'.",
            difference_count, len(dataset),
        )  # fmt: skip


def warn_about_reserved_columns(dataset: Dataset) -> None:
    """Warns about columns that reward functions do not get because their names are reserved."""
    for name in withheld_columns(dataset.column_names):
        log.warning("Reward functions do not get the prompts' column %r: to pass it on, %s.", name, how_to_rename(name))


def uncollate(batch: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Splits a collated batch into one mapping per prompt, with unpadded token ids.

    Args:
        batch: {column: values of all prompts}.
        tokenizer: The policy's tokenizer.

    Raises:
        ZooError: An `attention_mask` does not fit its `input_ids`.
    """
    columns = dict(batch)
    attention = columns.pop("attention_mask", None)
    rows = []
    for index in range(len(next(iter(columns.values())))):
        row = {
            name: values[index].tolist() if isinstance(values, Tensor) else values[index]
            for name, values in columns.items()
        }
        if (ids := row.get(PROMPT_TOKENS)) is not None:
            mask = _token_mask(ids, tokenizer) if attention is None else list(map(bool, attention[index]))
            row[PROMPT_TOKENS] = _unpad(ids, mask, subject=f"Prompt {index} of a batch")
        rows.append(row)
    return rows
