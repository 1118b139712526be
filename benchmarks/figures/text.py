"""Numbers and tables as the docs write them."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NOTHING = "Nothing of it is kept yet: `make evidence` makes it."


def number(value: float, digits: int, *, sign: bool = False, zero_sign: bool = False) -> str:
    """With a minus sign. A zero has none, but with `zero_sign`: the end of an interval lies above or below 0."""
    text = f"{value:{'+' if sign else ''}.{digits}f}"
    if not zero_sign and not float(text):
        text = text.lstrip("+-")
    return text.replace("-", "−")


def interval(found: Mapping[str, Any], digits: int, *, sign: bool = False, brackets: bool = False) -> str:
    """A value and the ends of its 95% interval."""
    value, low, high = (number(one, digits, sign=sign) for one in (found["value"], *found["ci95"]))
    return f"{value} [{low}, {high}]" if brackets else f"{value} ({low} to {high})"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean, and the range over seeds where they differ."""
    mean, low, high = (number(value, digits) for value in (statistics.mean(values), min(values), max(values)))
    return mean if low == high else f"{mean} ({low} to {high})"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def seeds(values: Iterable[int]) -> str:
    result = list(values)
    if len(result) > 3 and result == list(range(result[0], result[-1] + 1)):
        return f"seeds {result[0]} to {result[-1]}"
    return f"seed{'s' if len(result) > 1 else ''} {listed(result)}"


def made(*commands: str) -> str:
    """The line under a table: which commands made it."""
    return f"Made by {' and '.join(commands)}: `make evidence`."


def code(command: str) -> str:
    return f"`{command}`"
