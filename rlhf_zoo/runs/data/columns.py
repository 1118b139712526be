"""Values of the keys `columns` and `keep_above`: texts filled with a row's values, and bounds on a row's numbers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import ZooError

if TYPE_CHECKING:
    from datasets import Dataset

#: {column}, {column[key]} of a mapping, {column:8 words} or {column:2-8 words}: its first words, as many as a hash of
#: the value decides. {{ and }} are braces, as in str.format.
_PART = re.compile(r"\{\{|\}\}|\{(?P<name>\w+(?:\[\w+\])?)(?::(?P<low>[1-9]\d*)(?:-(?P<high>[1-9]\d*))? words)?\}|[{}]")


def is_text(value: str) -> bool:
    """Whether a value of `columns` is a text with places for values, rather than the name of a column.

    Args:
        value: The value.

    Returns:
        True if it has a brace.
    """
    return "{" in value


def placeholders(text: str) -> list[str]:
    """Returns the columns that a text with places for values names.

    Args:
        text: A value of `columns` for which `is_text` is true.
    """
    return [part["name"].partition("[")[0] for part in _PART.finditer(text) if part["name"] is not None]


def value_of(row: Mapping[str, Any], name: str, *, subject: str) -> Any:
    """Returns a row's `column`, or `column[key]`.

    Args:
        row: The row.
        name: "column" or "column[key]".
        subject: What to call the data set, at the start of a sentence.

    Returns:
        The value.

    Raises:
        ZooError: The row has no such column or key.
    """
    column, _, key = name.removesuffix("]").partition("[")
    if column not in row:
        listed = ", ".join(map(repr, row))
        raise ZooError(f"{subject} has no column {column!r}, only {listed}: correct the stage's key {name!r}.")
    value = row[column]
    if not key:
        return value
    if not isinstance(value, Mapping) or key not in value:
        listed = f"has only {', '.join(map(repr, value))}" if isinstance(value, Mapping) else "is not a mapping"
        raise ZooError(f"{subject} has no {name!r}, as its column {column!r} {listed}: correct the stage's key.")
    return value[key]


def filled(text: str, row: Mapping[str, Any], *, subject: str, place: int) -> str:
    """Fills a text with a row's values. How many words are kept depends only on the value.

    Args:
        text: The text, with places for values. Braces in a value stay as they are.
        row: The values, by column.
        subject: What to call the data set.
        place: The row's number in it.

    Returns:
        The filled text.

    Raises:
        ZooError: A place is malformed, or the row has no value for it.
    """

    def replacement(part: re.Match[str]) -> str:
        if part[0] in ("{{", "}}"):
            return part[0][0]
        if part["name"] is None:
            raise ZooError(
                f"`columns` for {subject} has {text!r}: write a placeholder as {{column}}, {{column[key]}} or "
                "{column:2-8 words}, and a literal brace as {{ or }}."
            )
        value = value_of(row, part["name"], subject=subject)
        if value is None:
            raise ZooError(
                f"Row {place} of {subject[:1].lower() + subject[1:]} has nothing in {part['name']!r}, which `columns` "
                f"puts into {text!r}: write a value there, if only an empty text, or remove the row."
            )
        return str(value) if part["low"] is None else _first_words(str(value), int(part["low"]), part["high"])

    return _PART.sub(replacement, text)


def values_in(text: str, row: Mapping[str, Any], *, subject: str) -> list[str]:
    """Returns the values that `filled` writes into a text.

    Args:
        text: The text, with places for values.
        row: The values, by column.
        subject: What to call the data set.

    Returns:
        The values, uncut and in their order.

    Raises:
        ZooError: The row has no such column or key.
    """
    return [
        str(value_of(row, part["name"], subject=subject)) for part in _PART.finditer(text) if part["name"] is not None
    ]


def _first_words(value: str, low: int, high: str | None) -> str:
    # The hash of the value decides the number of words, so every run cuts a row in the same way, whatever its seed.
    span = max(int(high or low) - low, 0) + 1
    drawn = low + int.from_bytes(hashlib.sha256(value.encode()).digest()[:8], "big") % span
    ends = [word.end() for word in re.finditer(r"\S+", value)]
    return value[: ends[min(drawn, len(ends)) - 1]] if ends else value


def rows_above(rows: Dataset, bounds: Mapping[str, float], *, subject: str) -> Dataset:
    """Keeps the rows whose number in a column exceeds a bound. Rows without a number are dropped.

    Args:
        rows: The rows.
        bounds: `column` or `column[key]` -> the bound.
        subject: What to call the data set.

    Returns:
        The rows that are left.

    Raises:
        ZooError: No row is left.
    """
    for name, bound in bounds.items():
        values = (value_of(row, name, subject=subject) for row in rows)
        keep = [place for place, value in enumerate(values) if isinstance(value, int | float) and value > bound]
        if not keep:
            raise ZooError(f"{subject} has no row whose {name} is above {bound:g}: lower it in keep_above.")
        rows = rows.select(keep)
    return rows
