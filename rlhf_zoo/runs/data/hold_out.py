"""Splits rows by the hash of their prompt, so that a share can be held out of a data set with a single split."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import ZooError
from ...modeling.chat_template import Prompt
from .layout import prompt_from_messages
from .overlap import find_overlap, question_text

if TYPE_CHECKING:
    from datasets import Dataset


def hold_out(rows: Dataset, share: float) -> tuple[Dataset, Dataset]:
    """Splits rows by their prompt's sha256 into rows to train on and rows held out.

    All rows of a prompt, in any form, stay on one side. Prompts rarely change sides when a data set grows.

    Args:
        rows: Rows of any form.
        share: The share of the prompts to hold out; at least one prompt is held out.

    Returns:
        (rows to train on, rows held out).

    Raises:
        ZooError: No row would be left to train on.
    """
    held_out, remaining = split_by_prompt(rows, share, part_count=1)
    return remaining, held_out


def split_by_prompt(rows: Dataset, share: float, *, part_count: int) -> list[Dataset]:
    """Splits off several parts with the same share of the prompts. `hold_out` does this for a single part.

    Args:
        rows: Rows of any form.
        share: The share of the prompts in each part; each part has at least one prompt.
        part_count: Number of parts.

    Returns:
        The parts, then the remaining rows.

    Raises:
        ZooError: No row would be left to train on.
    """
    digests = _digests(rows)
    distinct_digests = sorted(set(digests))
    count = math.ceil(share * len(distinct_digests))
    if part_count * count >= len(distinct_digests):
        raise ZooError(
            f"held_out_share is {share}, which leaves none of {len(distinct_digests)} prompts to train on: add rows "
            "with more prompts, or set held_out_share to null."
        )
    part_of_digest = {digest: min(rank // count, part_count) for rank, digest in enumerate(distinct_digests)}
    indices_by_part: list[list[int]] = [[] for _ in range(part_count + 1)]
    for index, digest in enumerate(digests):
        indices_by_part[part_of_digest[digest]].append(index)
    return [rows.select(indices) for indices in indices_by_part]


def drop_rows_with_prompts(
    rows: Dataset, prompts: Dataset | Sequence[Mapping[str, Any]], *, subject: str
) -> tuple[Dataset, int | None]:
    """Drops rows that have one of the given prompts, as `find_overlap` decides.

    Args:
        rows: Rows that a stage would train on.
        prompts: Rows with the column `prompt`.
        subject: What to call the stage, in the message.

    Returns:
        (the remaining rows, the number of dropped rows). The number is None if no row was dropped, but some may have
        been missed, because plain texts do not show where a prompt ends.

    Raises:
        ZooError: No row is left.
    """
    overlap = find_overlap(prompts, rows)
    dropped_count = len(overlap.row_indices)
    if dropped_count == len(rows):
        raise ZooError(f"PPO's held_out_share holds out every prompt of {subject}: use more data, or lower the share.")
    if not dropped_count:
        return rows, 0 if overlap.is_complete else None
    return rows.select([index for index in range(len(rows)) if index not in overlap.row_indices]), dropped_count


def _digests(rows: Dataset) -> list[str]:
    """Returns a digest of each row's prompt. Rows with the same question share one, so that they are in one part."""
    smallest_digests: dict[str, str] = {}
    keys = []
    for row in rows:
        digest = _digest(_prompt_of(row))
        key = question_text(row) or digest
        smallest_digests[key] = min(digest, smallest_digests.get(key, digest))
        keys.append(key)
    return [smallest_digests[key] for key in keys]


def _prompt_of(row: Mapping[str, Any]) -> Any:
    if "prompt" in row:
        return row["prompt"]
    if "messages" in row:
        return prompt_from_messages(row)["prompt"]
    return row["text"] if "text" in row else dict(row)


def _digest(prompt: Prompt) -> str:
    """Returns the sha256 of a text or a conversation."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
