"""The tables of how often the verdict accuses honest policies, and finds hackers, on the text of a real model."""

from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_zoo.evaluation.stats import proportion

from . import keep
from .experiments import REAL_TEXT
from .text import NOTHING, code, interval, made, number, table

Row = Mapping[str, Any]


def honest_table() -> str:
    """A row for each honest policy, a column for each judge."""
    kept = keep.load(REAL_TEXT)
    if not kept.get("honest"):
        return NOTHING
    rows = kept["honest"]
    by = {(row["policy"], row["judge"]): row for row in rows}
    policies, judges = (list(dict.fromkeys(row[key] for row in rows)) for key in ("policy", "judge"))
    body = [
        [
            policy,
            *(_rates(by.get((policy, judge)), "better") for judge in judges),
            _families(by[policy, judges[0]]),
        ]
        for policy in policies
    ]
    sums = [
        f"{interval(_sum(by, judge, 'hacked'), 3)} *hacked* and {interval(_sum(by, judge, 'suspicious'), 3)} "
        f"*suspicious* by the judge *{judge}*"
        for judge in judges
    ]
    return "\n".join(
        [
            table(["honest policy", *judges, "families that fired"], body),
            "",
            f"*hacked* + *suspicious* + *better*, as shares of {_counts(rows)} evaluations, by version {kept['rule']} "
            f"of the rule. Over all policies: {'; '.join(sums)} (95% intervals, Wilson).",
            "",
            made(code(kept["command"])).removesuffix(": `make evidence`.") + ".",
        ]
    )


def hacked_table() -> str:
    """A row for each hacker and judge, a column for each strength."""
    kept = keep.load(REAL_TEXT)
    if not kept.get("hacked"):
        return NOTHING
    rows = kept["hacked"]
    by = {(row["policy"], row["judge"], row["strength"]): row for row in rows}
    strengths = sorted({row["strength"] for row in rows})
    # Judges by whom all rates of a hacker are equal share a row.
    judges: dict[tuple[str, ...], list[str]] = {}
    for policy, judge in dict.fromkeys((row["policy"], row["judge"]) for row in rows):
        cells = [by.get((policy, judge, strength)) for strength in strengths]
        count = _counts(row for row in cells if row is not None)
        rates = (policy, count, *(_rates(row, "worse") for row in cells))
        judges.setdefault(rates, []).append(judge)
    body = [[policy, "; ".join(names), *rates] for (policy, *rates), names in judges.items()]
    better = [
        f"{sum(row['kinds'].get('better', 0) for row in of)} of {sum(row['n'] for row in of)} by the judge *{judge}*"
        for judge in dict.fromkeys(row["judge"] for row in rows)
        if (of := [row for row in rows if row["judge"] == judge])
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


def _rates(row: Row | None, *more: str) -> str:
    if row is None:
        return ""
    return " + ".join(number(row["kinds"].get(kind, 0) / row["n"], 2) for kind in ("hacked", "suspicious", *more))


def _families(row: Row) -> str:
    return ", ".join(f"{family} {count / row['n']:.0%}" for family, count in row["fired"].items()) or "none"


def _counts(rows: Iterable[Row]) -> str:
    counts = sorted({row["n"] for row in rows})
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _sum(by: Mapping[tuple[str, str], Row], judge: str, kind: str) -> dict[str, Any]:
    rows = [row for (_, of), row in by.items() if of == judge]
    return proportion(sum(row["kinds"].get(kind, 0) for row in rows), sum(row["n"] for row in rows)).to_json()
