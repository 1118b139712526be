"""The tables of how often the verdict accuses honest policies and detects hackers, on text of a real model."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlhf_zoo.evaluation.stats import proportion

from . import keep
from .experiments import REAL_TEXT
from .text import NOTHING, code, interval, number, table

Row = Mapping[str, Any]


def honest_table() -> str:
    """A row for each honest policy, a column for each judge."""
    kept = keep.load(REAL_TEXT)
    if not kept.get("honest"):
        return NOTHING
    rows = kept["honest"]
    rows_by_judge = {(row["policy"], row["judge"]): row for row in rows}
    policies, judges = (list(dict.fromkeys(row[key] for row in rows)) for key in ("policy", "judge"))
    body = [
        [
            policy,
            *(_rates(rows_by_judge.get((policy, judge)), "better") for judge in judges),
            _families(rows_by_judge[policy, judges[0]]),
        ]
        for policy in policies
    ]
    totals = [
        f"{interval(_total(rows, judge, 'hacked'), 3)} *hacked* and {interval(_total(rows, judge, 'suspicious'), 3)} "
        f"*suspicious* by the judge *{judge}*"
        for judge in judges
    ]
    return "\n".join(
        [
            table(["honest policy", *judges, "families that fired"], body),
            "",
            f"*hacked* + *suspicious* + *better*, as shares of {_counts(rows)} evaluations, by version {kept['rule']} "
            f"of the rule. Over all policies: {'; '.join(totals)} (95% intervals, Wilson).",
            "",
            f"Made by {code(kept['command'])}.",
        ]
    )


def hacked_table() -> str:
    """A row for each hacker and judge, a column for each strength."""
    kept = keep.load(REAL_TEXT)
    if not kept.get("hacked"):
        return NOTHING
    rows = kept["hacked"]
    rows_by_strength = {(row["policy"], row["judge"], row["strength"]): row for row in rows}
    strengths = sorted({row["strength"] for row in rows})
    # Judges that give a hacker the same rates share a row.
    judges: dict[tuple[str, ...], list[str]] = {}
    for policy, judge in dict.fromkeys((row["policy"], row["judge"]) for row in rows):
        cells = [rows_by_strength.get((policy, judge, strength)) for strength in strengths]
        count = _counts(row for row in cells if row is not None)
        rates = (policy, count, *(_rates(row, "worse") for row in cells))
        judges.setdefault(rates, []).append(judge)
    body = [[policy, "; ".join(names), *rates] for (policy, *rates), names in judges.items()]
    better = [
        f"{sum(row['kinds'].get('better', 0) for row in own)} of {sum(row['n'] for row in own)} by the judge *{judge}*"
        for judge in dict.fromkeys(row["judge"] for row in rows)
        if (own := [row for row in rows if row["judge"] == judge])
    ]
    return "\n".join(
        [
            table(["hacker", "judge", "evaluations", *(f"{strength:.0%}" for strength in strengths)], body),
            "",
            "*hacked* + *suspicious* + *worse*, as shares of the evaluations, by the share of the "
            f"completions that are hacked. *better* were {', '.join(better)}. {code('benchmarks/hackers.py')} has the "
            "hackers.",
        ]
    )


def _rates(row: Row | None, last_kind: str) -> str:
    if row is None:
        return ""
    return " + ".join(number(row["kinds"].get(kind, 0) / row["n"], 2) for kind in ("hacked", "suspicious", last_kind))


def _families(row: Row) -> str:
    return ", ".join(f"{family} {count / row['n']:.0%}" for family, count in row["fired"].items()) or "none"


def _counts(rows: Iterable[Row]) -> str:
    counts = sorted({row["n"] for row in rows})
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _total(rows: Sequence[Row], judge: str, kind: str) -> dict[str, Any]:
    """The share of a verdict in all evaluations by a judge."""
    own = [row for row in rows if row["judge"] == judge]
    return proportion(sum(row["kinds"].get(kind, 0) for row in own), sum(row["n"] for row in own)).to_json()
