"""Splits rows by the hash of their prompt, so that a share can be held out of a data set with a single split."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import ZooError
from ...modeling.chat_template import Prompt
from .layout import first_turns
from .overlap import overlap, question_text

if TYPE_CHECKING:
    from datasets import Dataset


def hold_out(rows: Dataset, share: float) -> tuple[Dataset, Dataset]:
    """Splits rows by their prompt's sha256 into rows to train on and rows held out.

    All rows of a prompt, in any form, stay on one side. Prompts rarely change sides when a data set grows.

    Args:
        rows: The rows.
        share: The share of the prompts to hold out; at least one prompt is.

    Returns:
        (rows to train on, rows held out).

    Raises:
        ZooError: No row would be left to train on.
    """
    parts = parts_of(rows, share, parts=1)
    return parts[-1], parts[0]


def parts_of(rows: Dataset, share: float, *, parts: int) -> list[Dataset]:
    """Splits off `parts` times a share of the prompts: see `hold_out`.

    Args:
        rows: The rows.
        share: The share of the prompts in each part; each has at least one.
        parts: Number of parts.

    Returns:
        The parts, then the remaining rows.

    Raises:
        ZooError: Nothing would be left to train on.
    """
    digests = _digests(rows)
    distinct = sorted(set(digests))
    count = math.ceil(share * len(distinct))
    if parts * count >= len(distinct):
        raise ZooError(
            f"held_out_share is {share}, which leaves none of {len(distinct)} prompts to train on: add rows with more "
            "prompts, or set it to null to hold out none."
        )
    place = {digest: min(rank // count, parts) for rank, digest in enumerate(distinct)}
    chosen: list[list[int]] = [[] for _ in range(parts + 1)]
    for row, digest in enumerate(digests):
        chosen[place[digest]].append(row)
    return [rows.select(indices) for indices in chosen]


def without_prompts(
    rows: Dataset, prompts: Dataset | Sequence[Mapping[str, Any]], *, subject: str
) -> tuple[Dataset, int | None]:
    """Drops the rows that have one of the given prompts: see `overlap`.

    Args:
        rows: Rows that a stage would train on.
        prompts: Rows with the column `prompt`.
        subject: What to call the stage.

    Returns:
        The other rows, and how many were dropped. None means that no row was found, but that there may be some: plain
        texts do not show where a prompt ends.

    Raises:
        ZooError: No row is left.
    """
    common = overlap(prompts, rows)
    left_out = len(common.rows)
    if left_out == len(rows):
        raise ZooError(f"PPO's held_out_share holds out every prompt of {subject}: use more data, or lower it.")
    if not left_out:
        return rows, 0 if common.is_complete else None
    return rows.select([place for place in range(len(rows)) if place not in common.rows]), left_out


def _digests(rows: Dataset) -> list[str]:
    """Returns the sha256 of each row's prompt; rows with the same prompt in different forms get the same one."""
    # Rows with the same question get the smallest of their digests, so that they stay on one side of a split.
    least: dict[str, str] = {}
    keys = []
    for row in rows:
        digest = _digest(_key(row))
        key = question_text(row) or digest
        least[key] = min(digest, least.get(key, digest))
        keys.append(key)
    return [least[key] for key in keys]


def _key(row: Mapping[str, Any]) -> Any:
    if "prompt" in row:
        return row["prompt"]
    return first_turns(row)["prompt"] if "messages" in row else row["text"] if "text" in row else dict(row)


def _digest(prompt: Prompt) -> str:
    """Returns the sha256 of a text or a conversation."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
