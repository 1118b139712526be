"""Checks the values of the columns that a stage reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import ZooError
from ...fileio import is_finite
from ...modeling.chat_template import is_conversation

if TYPE_CHECKING:
    from datasets import Dataset

TEXT, CONVERSATION = "text", "conversation"
LIST_OF_TEXTS = "list of texts"
_TEXT_DTYPES = ("string", "large_string", "null")


def check_values(rows: Dataset, form: str, *, text_column: str, subject: str) -> None:
    """Checks that every row has a readable value in each column that a stage reads.

    Args:
        rows: The data set, its conversations as lists of {role, content}.
        form: "texts", "pairs", "prompts" or "labeled".
        text_column: The column of plain texts.
        subject: What to call the data set, within a sentence.

    Raises:
        ZooError: A value is null, has no turns, or has a turn without content (an empty text passes); a value is
            neither a text nor a conversation; `messages` has no conversation; or the `margin` of a pair is not a
            number.
    """
    from datasets import Json

    names = set(rows.column_names)
    for name in _columns_to_read(names, form, text_column):
        kinds = {text_column: [TEXT], "messages": [CONVERSATION]}.get(name, [TEXT, CONVERSATION])
        _check_kind(rows, name, kinds, subject=subject)
        # Arrow checks the whole column at once, so values are read one by one only if one of them may be empty.
        if isinstance(rows.features[name], Json) or _may_lack_text(rows.data.column(name)):
            empty_index = next((index for index, value in enumerate(rows[name]) if not _has_content(value)), None)
            if empty_index is not None:
                raise ZooError(
                    f"Row {empty_index} of {subject} has nothing in the column {name!r}: correct it, or remove the row."
                )
    if form == "pairs" and "margin" in names:
        _check_margins(rows["margin"], subject=subject)


def _columns_to_read(names: set[str], form: str, text_column: str) -> list[str]:
    prompt_column = ["prompt"] if "prompt" in names else []
    if form == "pairs":
        return [*prompt_column, "chosen", "rejected"]
    if form == "prompts":
        return prompt_column or (["messages"] if "messages" in names else ["chosen", "rejected"])
    if form == "labeled":
        return ["text"]
    if "messages" in names:
        return ["messages"]
    return ["prompt", "completion"] if {"prompt", "completion"} <= names else [text_column]


def _check_kind(rows: Dataset, name: str, kinds: Sequence[str], *, subject: str) -> None:
    """Raises ZooError unless all values of a column are of a single kind, and `kinds` allows it."""
    from datasets import Value

    feature = rows.features[name]
    expected_kinds = " or ".join(f"{kind}s" for kind in kinds)
    if isinstance(feature, Value) and feature.dtype not in _TEXT_DTYPES:
        raise ZooError(f"The column {name!r} of {subject} has {feature.dtype} instead of {expected_kinds}: convert it.")
    # The column's type may guarantee a kind, so that no value needs to be read.
    if (TEXT in kinds and isinstance(feature, Value)) or (CONVERSATION in kinds and _has_conversation_type(rows, name)):
        return
    first_index, first_kind = 0, ""
    for index, value in enumerate(rows[name]):
        if value is None:
            continue
        kind = _kind_of(value)
        if kind not in kinds:
            raise ZooError(
                f"Row {index} of {subject} has a {kind} in the column {name!r}, which may have {expected_kinds}: "
                f"{_fix(name, kind)}."
            )
        if not first_kind:
            first_index, first_kind = index, kind
        if kind != first_kind:
            raise ZooError(
                f"Row {index} of {subject} has a {kind}, and row {first_index} a {first_kind}, in the column {name!r}: "
                "correct it, or remove the row."
            )


def _kind_of(value: Any) -> str:
    if isinstance(value, str):
        return TEXT
    if is_conversation(value):
        return CONVERSATION
    if isinstance(value, list):
        return LIST_OF_TEXTS if all(isinstance(item, str) for item in value) else "list that is not a conversation"
    return "mapping" if isinstance(value, Mapping) else "number"


def _has_conversation_type(rows: Dataset, name: str) -> bool:
    """Whether a column's type guarantees that all its values are conversations."""
    import pyarrow as pa

    arrow_type = rows.data.column(name).type
    is_list = pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type)
    return is_list and pa.types.is_struct(arrow_type.value_type) and arrow_type.value_type.get_field_index("role") >= 0


def _fix(name: str, kind: str) -> str:
    if name == "messages" and kind == TEXT:
        return "write it as a list of {role, content}, not as a text with JSON, or call the column 'text'"
    if kind == LIST_OF_TEXTS:
        return "write one row per text"
    return "correct it, or remove the row"


def _check_margins(margins: Sequence[Any], *, subject: str) -> None:
    for index, margin in enumerate(margins):
        if not is_finite(margin):
            content = "nothing" if margin is None else f"{margin!r:.60}"
            raise ZooError(
                f"Row {index} of {subject} has {content} in the column 'margin', but the reward model's loss subtracts "
                "a number from there: add one, or rename the column, as in `columns: {given_margin: margin}`."
            )


def _may_lack_text(column: Any) -> bool:
    """Whether a row of an Arrow column may lack its text, its turns, or the content of a turn."""
    import pyarrow as pa
    from pyarrow import compute

    if column.null_count or not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        return bool(column.null_count)
    turns = compute.list_flatten(column)
    if compute.min(compute.list_value_length(column)).as_py() == 0 or turns.null_count:
        return True
    has_content_field = pa.types.is_struct(turns.type) and turns.type.get_field_index("content") >= 0
    return has_content_field and bool(compute.struct_field(turns, "content").null_count)


def _has_content(value: Any) -> bool:
    """Whether a value is a text, or a conversation whose turns all have content or call a tool."""
    if not isinstance(value, list):
        return value is not None
    return bool(value) and all(
        turn is not None and (not isinstance(turn, dict) or turn.get("content") is not None or _calls_tool(turn))
        for turn in value
    )


def _calls_tool(turn: Mapping[str, Any]) -> bool:
    return bool(turn.get("tool_calls") or turn.get("function_call"))
