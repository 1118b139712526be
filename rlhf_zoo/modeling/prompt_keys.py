"""Recognizes equal prompts, and counts distinct ones."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .chat_template import Prompt, is_conversation

if TYPE_CHECKING:
    from datasets import Dataset


def prompt_key(prompt: Prompt) -> str:
    """Returns a text that is equal for equal prompts.

    Args:
        prompt: A text or a conversation.

    Returns:
        The key. A text has the same key as a conversation whose only turn is a user turn with this text. White space
        around the text does not count.
    """
    if isinstance(prompt, str):
        return prompt.strip()
    turns = [(turn["role"], turn.get("content")) for turn in prompt] if is_conversation(prompt) else prompt
    if isinstance(turns, list) and len(turns) == 1 and turns[0][0] == "user" and isinstance(turns[0][1], str):
        return turns[0][1].strip()
    # Use `default=str`, because a column may hold values that JSON cannot represent, such as images.
    return json.dumps(turns, sort_keys=True, default=str)


def count_distinct_prompts(prompts: Iterable[Prompt]) -> int:
    """Counts distinct prompts, by `prompt_key`.

    Args:
        prompts: Texts or conversations.
    """
    return len(set(map(prompt_key, prompts)))


def format_prompt_count(distinct_count: int, row_count: int) -> str:
    """Formats a number of prompts.

    Args:
        distinct_count: The number of distinct prompts.
        row_count: The number of rows with these prompts.

    Returns:
        "200"; "200 (in 1,000 rows)" if prompts are repeated.
    """
    text = f"{distinct_count:,}"
    return text if distinct_count == row_count else f"{text} (in {row_count:,} rows)"


def format_group_count(group_count: int | None, prompt_count: int) -> str:
    """Formats the number of groups of prompts that ask the same question, as a suffix to the number of prompts.

    Args:
        group_count: The number of groups; None if it is unknown.
        prompt_count: The number of prompts.

    Returns:
        " in 24 groups"; "" if their number is unknown, or if no two prompts ask the same question.
    """
    if group_count is None or group_count == prompt_count:
        return ""
    return f" in {group_count:,} group{'' if group_count == 1 else 's'}"


def describe_prompt_count(rows: Dataset) -> str:
    """Counts the distinct prompts of a data set, and formats their number.

    Args:
        rows: A data set with the column `prompt`.

    Returns:
        The text that `format_prompt_count` returns.
    """
    return format_prompt_count(count_distinct_prompts(rows["prompt"]), len(rows))
