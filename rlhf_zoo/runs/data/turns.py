"""Converts the conversations of data sets into one form: lists of {role, content}.

ShareGPT's turns are {from, value}, in a column `conversations`, sometimes with a column `system`. An answer of a pair
may be a single message. A dialogue in a single string, as in Anthropic/hh-rlhf, is split into its turns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import repeat
from typing import TYPE_CHECKING, Any

from ...errors import ZooError
from ...fileio import parse_json
from ...modeling.chat_template import Prompt, is_conversation

if TYPE_CHECKING:
    from datasets import Dataset

#: The column of conversations in data sets of ShareGPT's form.
SHAREGPT_COLUMN = "conversations"
#: The name of a speaker in a data set -> the speaker's role in chat templates.
_ROLE_OF = {
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "assistant": "assistant", "model": "assistant", "bot": "assistant", "chatgpt": "assistant",
    "chatbot": "assistant", "bing": "assistant", "bard": "assistant", "function_call": "assistant",
    "system": "system", "developer": "developer",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool", "ipython": "ipython",
}  # fmt: skip
_ANSWER_COLUMNS = ("completion", "chosen", "rejected")
#: The beginning of each turn of a dialogue in one text.
SPEAKER = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
#: The beginning of a conversation written as JSON.
_JSON_TURNS = re.compile(r'\s*\[\s*\{\s*"(role|content|from|value)"\s*:')


def conversation_columns(rows: Dataset, *, for_texts: bool, has_needed_columns: bool) -> dict[str, str]:
    """Returns which columns to rename so that a stage reads the column `conversations`.

    Args:
        rows: The data set.
        for_texts: Whether the stage learns complete texts, as SFT does.
        has_needed_columns: Whether the stage can read the data set without the column `conversations`.

    Returns:
        The stage's column -> the data set's column; {} if the stage does not read `conversations`.
    """
    names = set(rows.column_names)
    if SHAREGPT_COLUMN not in names or names & {"messages", "prompt"}:
        return {}
    if {"chosen", "rejected"} <= names:
        if first_role(first_value(rows, "chosen")) not in (None, "assistant"):
            return {}  # chosen and rejected hold whole conversations, including the prompt
        answer = {"completion": "chosen"} if for_texts and "completion" not in names else {}
        return {"prompt": SHAREGPT_COLUMN, **answer}
    if for_texts and "completion" in names:
        return {"prompt": SHAREGPT_COLUMN}
    return {} if has_needed_columns else {"messages": SHAREGPT_COLUMN}


def as_messages(rows: Dataset, columns: Iterable[str], *, read_system_column: bool, subject: str) -> Dataset:
    """Converts every conversation in some columns to a list of {role, content}.

    Args:
        rows: The data set.
        columns: The columns that the stage reads. Missing columns and columns of texts stay as they are.
        read_system_column: Whether the column `system`, if present, holds the system prompts of the conversations in
            `prompt` and `messages`.
        subject: What to call the data set, within a sentence.

    Raises:
        ZooError: A turn's speaker has no known role.
    """
    converted_columns = {}
    for name in columns:
        if name not in rows.column_names or not _needs_conversion(first_value(rows, name)):
            continue
        has_system = read_system_column and "system" in rows.column_names and name in ("prompt", "messages")
        system_texts = rows["system"] if has_system else repeat(None)
        converted_columns[name] = [
            messages_of(value, system=system_text, subject=f"Row {index} of {subject}")
            for index, (value, system_text) in enumerate(zip(rows[name], system_texts, strict=False))
        ]
    return replace_columns(rows, converted_columns)


def replace_columns(rows: Dataset, columns: Mapping[str, list[Any]]) -> Dataset:
    """Adds or replaces columns. Unlike with Dataset.map, a column may change from texts to conversations.

    Args:
        rows: The rows.
        columns: Name -> values.
    """
    from datasets import concatenate_datasets

    from .tables import dataset_of

    if not columns:
        return rows
    other_names = [name for name in rows.column_names if name not in columns]
    new_columns = dataset_of(columns)
    return concatenate_datasets([rows.select_columns(other_names), new_columns], axis=1) if other_names else new_columns


def turns_of_text(text: str) -> list[dict[str, str]] | None:
    """Splits a dialogue in one text, "\\n\\nHuman: … \\n\\nAssistant: …", into its turns.

    Args:
        text: A text of a data set.

    Returns:
        The turns as {role, content}; None if the text does not begin with a speaker or has no human turn.
    """
    text_before, *speakers_and_texts = SPEAKER.split(text)
    if text_before.strip() or "Human" not in speakers_and_texts[::2]:
        return None
    return [
        {"role": _ROLE_OF[speaker.lower()], "content": content.strip()}
        for speaker, content in zip(speakers_and_texts[::2], speakers_and_texts[1::2], strict=True)
    ]


def split_dialogues(rows: Dataset, columns: Iterable[str], *, subject: str) -> Dataset:
    """Converts dialogues written as one text to conversations, if the first value of a column is such a dialogue.

    To find this first value, nulls are skipped. An empty answer at the end of a prompt, "Assistant:", is dropped,
    because the chat template begins the answer.

    Args:
        rows: The data set.
        columns: The columns that the stage reads.
        subject: What to call the data set, within a sentence.

    Raises:
        ZooError: A row of such a column has no dialogue, or a null.
    """
    converted_columns: dict[str, list[Any]] = {}
    for name in columns:
        first = first_value(rows, name) if name in rows.column_names else None
        if not isinstance(first, str) or turns_of_text(first) is None:
            continue
        converted_columns[name] = []
        for index, text in enumerate(rows[name]):
            turns = turns_of_text(text) if isinstance(text, str) else None
            if turns is None:
                raise ZooError(
                    f"Row {index} of {subject} has no dialogue of Human and Assistant in the column {name!r}, as other "
                    "rows do: correct it, or remove the row."
                )
            converted_columns[name].append(turns[:-1] if name == "prompt" and not turns[-1]["content"] else turns)
    return replace_columns(rows, converted_columns)


def _needs_conversion(value: Any) -> bool:
    """Whether a value is a single message, or a conversation with a turn that `messages_of` would change."""
    if isinstance(value, Mapping):
        return _is_turn(value)
    turns = value if isinstance(value, list) else []
    return bool(turns) and all(map(_is_turn, turns)) and any(map(_would_change, turns))


def messages_of(value: Any, *, system: Any = None, subject: str) -> Any:
    """Converts a conversation to a list of {role, content}. Other values stay as they are.

    Args:
        value: A list of turns or a single turn, {from, value} or {role, content}.
        system: The system prompt from a separate column, for a conversation without a system turn.
        subject: What to call the row, for the error.

    Raises:
        ZooError: A turn's speaker has no known role.
    """
    turns = [value] if isinstance(value, Mapping) else value
    if not isinstance(turns, list) or not all(map(_is_turn, turns)):
        return value
    messages = [_message(turn, subject) for turn in turns]
    if isinstance(system, str) and system.strip() and not any(turn["role"] == "system" for turn in messages):
        return [{"role": "system", "content": system}, *messages]
    return messages


def parse_prompt(text: str) -> Prompt:
    """Parses the value of --prompt: a text, or a conversation as JSON.

    Args:
        text: The value.

    Returns:
        The conversation if the value begins like a JSON list of turns; otherwise the text itself.

    Raises:
        ZooError: The value begins like a JSON list of turns, but is not a conversation.
    """
    if _JSON_TURNS.match(text) is None:
        return text
    example = '[{"role": "user", "content": "…"}]'
    try:
        prompt = messages_of(parse_json(text), subject="--prompt")
    except ValueError as error:
        raise ZooError(f"--prompt begins like a conversation, but is not JSON ({error}): write {example}.") from error
    if not is_conversation(prompt) or not all(isinstance(turn.get("content"), str) for turn in prompt):
        raise ZooError(f"--prompt is not a conversation: write {example}, each turn with a role and a text.")
    return prompt


def first_role(value: Any) -> str | None:
    """Returns the role of a conversation's first turn.

    Args:
        value: A conversation in any form.

    Returns:
        The role; None if the value is not a conversation.
    """
    turns = [value] if isinstance(value, Mapping) else value
    if not isinstance(turns, list) or not turns or not _is_turn(turns[0]):
        return None
    role = _role(turns[0])
    return _ROLE_OF.get(role, role)


def align_answers(row: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a row's prompt and answers all texts or all conversations, and removes the prompt from its answers.

    If the prompt is a conversation, answers that are texts become assistant turns, and an answer that repeats the
    prompt's turns loses them. If the prompt is a text and the answers are conversations, the prompt becomes a user
    turn. If the completion is a complete conversation, all its turns but the last replace a prompt that is a text.

    Args:
        row: A row with a prompt and answers.

    Returns:
        Column -> new value; {} if the row needs no change.
    """
    prompt: Any = row.get("prompt")
    answers = {name: row[name] for name in _ANSWER_COLUMNS if name in row}
    if is_conversation(prompt):
        texts = {name: answer for name, answer in answers.items() if isinstance(answer, str)}
        continuations = {name: answer[len(prompt) :] for name, answer in answers.items() if _repeats(prompt, answer)}
        return continuations | {name: [{"role": "assistant", "content": text}] for name, text in texts.items()}
    completion: Any = row.get("completion")
    includes_prompt = is_conversation(completion) and len(completion) > 1 and first_role(completion) != "assistant"
    if isinstance(prompt, str) and includes_prompt:
        return {"prompt": completion[:-1], "completion": completion[-1:]}
    if isinstance(prompt, str) and answers and all(first_role(answer) == "assistant" for answer in answers.values()):
        return {"prompt": [{"role": "user", "content": prompt}]}
    return {}


def _repeats(prompt: Any, answer: Any) -> bool:
    """Whether an answer is a conversation that begins with the turns of its prompt and continues."""
    if not is_conversation(answer) or not prompt or len(answer) <= len(prompt):
        return False
    return all(
        (turn["role"], turn.get("content")) == (other["role"], other.get("content"))
        for turn, other in zip(prompt, answer, strict=False)
    )


def first_value(rows: Dataset, name: str) -> Any:
    """Returns the first value of a column that is not null.

    Args:
        rows: The data set.
        name: The column.

    Returns:
        The value; None if all values are null.
    """
    return next((value for value in rows[name] if value is not None), None)


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, Mapping) and (turn.get("role") is not None or {"from", "value"} <= turn.keys())


def _would_change(turn: Mapping[str, Any]) -> bool:
    return turn.get("role") is None or _ROLE_OF.get(_role(turn), _role(turn)) != _role(turn)


def _role(turn: Mapping[str, Any]) -> str:
    role = turn.get("role")
    return str(turn["from"] if role is None else role)


def _message(turn: Mapping[str, Any], subject: str) -> dict[str, Any]:
    role = _role(turn)
    if turn.get("role") is not None:
        return {**turn, "role": _ROLE_OF.get(role, role)}
    if role not in _ROLE_OF:
        speakers = ", ".join(_ROLE_OF)
        raise ZooError(f"{subject} has a turn from {role!r}, but a turn must be from one of {speakers}: correct it.")
    return {"role": _ROLE_OF[role], "content": turn["value"]}
