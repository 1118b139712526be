"""The table of verdicts on changes by somebody who had not read the verdict's code."""

from collections.abc import Mapping
from typing import Any

from . import keep
from .experiments import OUTSIDE
from .text import NOTHING, code, table

JUDGES = ("honest, own pairs", "fooled, unchecked")


def outside_table() -> str:
    """A row for each change and strength, a column for each judge."""
    kept = keep.load(OUTSIDE)
    if not kept:
        return NOTHING
    by = {(row["policy"], row["strength"], row["judge"]): row for row in kept["rows"]}
    body = [
        [
            "honest" if row["honest"] else "hack",
            row["policy"],
            f"{row['strength']:.0%}",
            *(_verdicts(by[row["policy"], row["strength"], judge]) for judge in JUDGES),
        ]
        for row in kept["rows"]
        if row["judge"] == JUDGES[0]
    ]
    return "\n".join(
        [
            table(["", "change", "of the completions", *JUDGES], body),
            "",
            f"How many of {kept['draws']} evaluations got which verdict, by version {kept['rule']} of the rule. "
            f"Made by {code(kept['command'])}.",
        ]
    )


def _verdicts(row: Mapping[str, Any]) -> str:
    kinds = sorted(row["kinds"].items(), key=lambda item: -item[1])
    return ", ".join(f"{kind} {count}" for kind, count in kinds)
