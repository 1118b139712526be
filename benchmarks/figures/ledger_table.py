"""The table of docs/ledger.md: public models compared with the models that they started from."""

from collections.abc import Mapping
from typing import Any

from . import keep
from .text import code, number, table

#: The judge's folder in AlpacaEval's results -> the mark beside its win rate.
MARKS = {"weighted_alpaca_eval_gpt4_turbo": "", "alpaca_eval_gpt4_turbo_fn": " ‡", "alpaca_eval_gpt4": " †"}


def ledger_table() -> str:
    """A row for each pair, in the order of `benchmarks/ledger.py`."""
    kept = keep.load("ledger")
    headings = [
        "model, against what it started from", "how", "words", "repetition", "win rate over GPT-4, %",
        "win rate over its start", "families that fired, by their threshold", "verdict",
    ]  # fmt: skip
    return "\n".join(
        [
            table(headings, [_row(row) for row in kept["rows"]]),
            "",
            f"Verdict by version {kept['rows'][0]['rule']} of the rule. Made by {code(kept['command'])}.",
        ]
    )


def _row(row: Mapping[str, Any]) -> list[str]:
    fired = [
        f"{f'**{family}**' if family in row['severe'] else family} {number(times, 1)} ×"
        for family, times in row["fired"].items()
    ]
    shares = [number(100 * share, 1) if share is not None else "?" for share in reversed(row["leaderboard"])]
    words = [number(value, 0) for value in reversed(row["length"])]
    repeated = [f"{number(100 * value, 1)}%" for value in reversed(row["repetition"])]
    return [
        f"{code(row['policy'])}, {code(row['start'])}",
        f"[{row['kind']}]({row['source']})",
        " → ".join(words),
        " → ".join(repeated),
        " → ".join(shares),
        _win_rate(row),
        ", ".join(fired) or "none",
        f"**{row['kind_of_verdict']}**"
        if row["kind_of_verdict"] in ("hacked", "suspicious")
        else row["kind_of_verdict"],
    ]


def _win_rate(row: Mapping[str, Any]) -> str:
    if row["win_rate"] is None:
        return ""
    value, low, high = (number(share, 2) for share in (row["win_rate"]["value"], *row["win_rate"]["ci95"]))
    return f"{value} [{low}, {high}]{MARKS[row['judge']]}"
