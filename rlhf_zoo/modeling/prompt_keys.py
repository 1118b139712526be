"""Which prompts are the same, and how many different ones there are."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from .chat_template import Prompt, is_conversation


def prompt_key(prompt: Prompt) -> str:
    """Returns what tells a prompt from others.

    Args:
        prompt: A text or a conversation.

    Returns:
        A text that is equal for equal prompts. A text and a conversation of one user turn with that text are equal,
        also where the space around them differs.
    """
    if isinstance(prompt, str):
        return prompt.strip()
    turns = [(turn["role"], turn["content"]) for turn in prompt] if is_conversation(prompt) else prompt
    if isinstance(turns, list) and len(turns) == 1 and turns[0][0] == "user" and isinstance(turns[0][1], str):
        return turns[0][1].strip()
    return json.dumps(turns, sort_keys=True, default=str)


def count_distinct_prompts(prompts: Iterable[Prompt]) -> int:
    """Counts the different prompts, by `prompt_key`.

    Args:
        prompts: Texts or conversations, one a row.
    """
    return len(set(map(prompt_key, prompts)))


def format_prompt_count(distinct: int, rows: int) -> str:
    """Writes a number of prompts for people.

    Args:
        distinct: The number of different prompts.
        rows: The number of rows that have them.

    Returns:
        "200", or "200 (in 1,000 rows)" where prompts are repeated.
    """
    return f"{distinct:,}" if distinct == rows else f"{distinct:,} (in {rows:,} rows)"


def describe_prompt_count(rows: Any) -> str:
    """Counts the different prompts of a data set and writes their number for people.

    Args:
        rows: A data set with the column `prompt`.

    Returns:
        As `format_prompt_count`.
    """
    return format_prompt_count(count_distinct_prompts(rows["prompt"]), len(rows))
