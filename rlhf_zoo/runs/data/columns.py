"""Applies the keys `columns` and `keep_above`: fills texts with a row's values, and drops rows by their numbers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import ZooError

if TYPE_CHECKING:
    from datasets import Dataset

#: {column}; {column[key]} for a column of mappings; {column:8 words} for the first words; or {column:2-8 words}, for
#: which a hash of the value decides the number of words. {{ and }} are braces, as in str.format.
_PLACEHOLDER = re.compile(
    r"\{\{|\}\}|\{(?P<name>\w+(?:\[\w+\])?)(?::(?P<low>[1-9]\d*)(?:-(?P<high>[1-9]\d*))? words)?\}|[{}]"
)


def has_placeholders(value: str) -> bool:
    """Whether a value of `columns` is a text with placeholders, rather than the name of a column.

    Args:
        value: A value of `columns`.
    """
    return "{" in value


def placeholder_columns(text: str) -> list[str]:
    """Returns the columns that the placeholders of a text name.

    Args:
        text: A value of `columns` for which `has_placeholders` is true.
    """
    return [match["name"].partition("[")[0] for match in _PLACEHOLDER.finditer(text) if match["name"] is not None]


def row_value(row: Mapping[str, Any], name: str, *, subject: str) -> Any:
    """Returns a row's value in `column`, or at `column[key]`.

    Args:
        row: The values, by column.
        name: "column" or "column[key]".
        subject: What to call the data set, at the start of a sentence.

    Raises:
        ZooError: The row has no such column or key.
    """
    column, _, key = name.removesuffix("]").partition("[")
    if column not in row:
        column_list = ", ".join(map(repr, row))
        raise ZooError(f"{subject} has no column {column!r}, only {column_list}: correct the stage's key {name!r}.")
    value = row[column]
    if not key:
        return value
    if not isinstance(value, Mapping) or key not in value:
        reason = f"has only {', '.join(map(repr, value))}" if isinstance(value, Mapping) else "is not a mapping"
        raise ZooError(f"{subject} has no {name!r}, because its column {column!r} {reason}: correct the stage's key.")
    return value[key]


def fill_placeholders(text: str, row: Mapping[str, Any], *, subject: str, index: int) -> str:
    """Replaces the placeholders of a text by a row's values.

    Args:
        text: The text with placeholders. Braces in a value stay as they are.
        row: The values, by column.
        subject: What to call the data set, at the start of a sentence.
        index: Index of the row in the data set, for messages.

    Raises:
        ZooError: A placeholder is malformed, or the row has no value for it.
    """

    def replacement(match: re.Match[str]) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        if match["name"] is None:
            raise ZooError(
                f"`columns` for {subject} has {text!r}: write a placeholder as {{column}}, {{column[key]}} or "
                "{column:2-8 words}, and a literal brace as {{ or }}."
            )
        value = row_value(row, match["name"], subject=subject)
        if value is None:
            raise ZooError(
                f"Row {index} of {subject[:1].lower() + subject[1:]} has nothing in {match['name']!r}, which `columns` "
                f"puts into {text!r}: write a value there, which may be an empty text, or remove the row."
            )
        return str(value) if match["low"] is None else _first_words(str(value), int(match["low"]), match["high"])

    return _PLACEHOLDER.sub(replacement, text)


def placeholder_values(text: str, row: Mapping[str, Any], *, subject: str) -> list[str]:
    """Returns the complete values for the placeholders of a text, in the order of the placeholders.

    Args:
        text: The text with placeholders.
        row: The values, by column.
        subject: What to call the data set, at the start of a sentence.

    Raises:
        ZooError: The row has no such column or key.
    """
    names = [match["name"] for match in _PLACEHOLDER.finditer(text) if match["name"] is not None]
    return [str(row_value(row, name, subject=subject)) for name in names]


def _first_words(value: str, low: int, high: str | None) -> str:
    # A hash of the value decides the number of words, so that every run cuts a row in the same way.
    span = max(int(high or low) - low, 0) + 1
    count = low + int.from_bytes(hashlib.sha256(value.encode()).digest()[:8], "big") % span
    ends = [word.end() for word in re.finditer(r"\S+", value)]
    return value[: ends[min(count, len(ends)) - 1]] if ends else value


def keep_rows_above(rows: Dataset, bounds: Mapping[str, float], *, subject: str) -> Dataset:
    """Keeps the rows whose number in a column exceeds a bound. Rows without a number are dropped.

    Args:
        rows: The rows of a data set, before they are converted.
        bounds: `column` or `column[key]` -> the bound.
        subject: What to call the data set, at the start of a sentence.

    Raises:
        ZooError: No row is left.
    """
    for name, bound in bounds.items():
        values = (row_value(row, name, subject=subject) for row in rows)
        indices = [index for index, value in enumerate(values) if isinstance(value, int | float) and value > bound]
        if not indices:
            raise ZooError(f"{subject} has no row whose {name} is above {bound:g}: lower the bound in keep_above.")
        rows = rows.select(indices)
    return rows
