"""Formats numbers and tables for the docs."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NOTHING = "Nothing of it is kept yet: `make evidence` makes it."


def number(value: float, digits: int) -> str:
    """Formats a number with a real minus sign. A number that rounds to zero has no sign."""
    text = f"{value:.{digits}f}"
    return (text if float(text) else text.lstrip("-")).replace("-", "−")


def interval(estimate: Mapping[str, Any], digits: int) -> str:
    """Formats a value and the ends of its 95% interval."""
    value, low, high = (number(bound, digits) for bound in (estimate["value"], *estimate["ci95"]))
    return f"{value} ({low} to {high})"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Formats the mean over seeds, and the range if they differ."""
    mean, low, high = (number(value, digits) for value in (statistics.mean(values), min(values), max(values)))
    return mean if low == high else f"{mean} ({low} to {high})"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def name_seeds(seeds: Iterable[int]) -> str:
    """Formats seeds as "seed 1", "seeds 1, 3" or "seeds 1 to 10"."""
    ordered = list(seeds)
    if len(ordered) > 3 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"seeds {ordered[0]} to {ordered[-1]}"
    return f"seed{'s' if len(ordered) > 1 else ''} {', '.join(map(str, ordered))}"


def code(command: str) -> str:
    return f"`{command}`"
