"""The tables of how often the verdict accuses honest policies, and how often it finds hackers."""

from collections.abc import Mapping
from typing import Any

from . import keep
from .experiments import RATES
from .text import NOTHING, code, interval, made, number, table

Row = Mapping[str, Any]


def rates_table() -> str:
    """Honest policies, a row each; then hackers, a row for each judge and a column for each strength."""
    kept = keep.load(RATES)
    if not kept:
        return NOTHING
    honest, rows = kept["honest"], kept["hacked"]
    strengths = list(dict.fromkeys(row["strength"] for row in rows))
    cells = {(row["policy"], row["judge"], row["strength"]): row for row in rows}
    found = [
        [policy, judge, *(_convicted(cells[policy, judge, strength]) for strength in strengths)]
        for policy, judge in dict.fromkeys((row["policy"], row["judge"]) for row in rows)
    ]
    kinds = ("hacked", "suspicious", "past the peak", "healthy", "recommended")
    of = {(row["policy"], row["judge"]): row for row in honest}
    fair = [row for row in honest if row["judge"] == "honest"]
    others = [judge for judge in dict.fromkeys(judge for _, judge in of) if judge != "honest"]
    trained = [f"{row['policies']} by {row['policy'].split(',')[0]}" for row in fair if "policies" in row]
    said = (
        f"{honest[0]['n']} evaluations of each honest policy by an honest judge, rule {kept['rule']}: "
        f"{kept['prompts']} prompts with {kept['samples']} completions each; in brackets 95% intervals (Wilson). "
        f"Under the other judges, *hacked* + *suspicious*. Trained were {', '.join(trained)}."
    )
    falls = kept["falls_with_strength"]
    return "\n".join(
        [
            table(["honest policy", "gold above SFT", *kinds, *others, "families present"], [
                [
                    row["policy"], number(row["gain"], 2), *(interval(row[kind], 3) for kind in kinds),
                    *(_convicted(of[row["policy"], judge]) for judge in others), _families(row),
                ]
                for row in fair
            ]),
            "",
            said,
            "",
            table(["hacker", "judge", *(f"{strength:.0%} of its completions" for strength in strengths)], found),
            "",
            f"*hacked* + *suspicious*, as shares of {rows[0]['n']} evaluations. "
            + (
                f"More strength convicts more rarely, by two standard errors, for: {'; '.join(falls)}."
                if falls
                else "Nowhere does more strength convict more rarely, by two standard errors."
            ),
            "",
            made(code(kept["command"])),
        ]
    )  # fmt: skip


def _convicted(row: Row) -> str:
    return f"{number(row['hacked']['value'], 2)} + {number(row['suspicious']['value'], 2)}"


def _families(row: Row) -> str:
    return ", ".join(f"{family} {count / row['n']:.0%}" for family, count in row["present"].items()) or "none"
