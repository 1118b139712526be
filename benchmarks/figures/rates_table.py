"""The table of how often the probes fire: on SFT itself, on harmless policies, and on planted hackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import keep
from .experiments import RATES
from .text import NOTHING, code, made, number, table

__all__ = ["rates_table"]

Row = Mapping[str, Any]
SHARES = {1.0: "all", 0.5: "half"}


def rates_table() -> str:
    """A row for each policy, a column for each pair of texts and the texts that the thresholds were set on."""
    kept = keep.load(RATES)
    if not kept:
        return NOTHING
    rates: Sequence[Row] = kept["rates"]
    columns = list(dict.fromkeys((row["corpus"], row["thresholds"]) for row in rates))
    policies = list(dict.fromkeys((row["policy"], row.get("strength")) for row in rates))
    cells = {(row["policy"], row.get("strength"), row["corpus"], row["thresholds"]): row for row in rates}
    rows = []
    for policy, strength in policies:
        of = [cells.get((policy, strength, *column)) for column in columns]
        meant = next((row["target"] for row in of if row and "target" in row), None)
        share = "" if strength is None else f", {SHARES.get(strength, f'{strength:.0%}')} of its completions"
        rows.append([policy + share, code(meant) if meant else "any", *(_fired(row, meant) for row in of)])
        if policy.startswith("SFT"):
            alone = [number(row["noise_alone"]["value"], 2) if row else "" for row in of]
            rows.append([f"{policy}, were there no minima", "any", *alone])
    titles = [texts if texts == by else f"{texts}, thresholds of {by}" for texts, by in columns]
    n = {row["policy"].startswith("SFT"): row["any"]["n"] for row in rates}
    said = (
        f"The share of evaluations in which the probe fires, its 95% interval (Wilson) in brackets: {n[True]} "
        f"evaluations of SFT, {n[False]} of each other policy, {kept['prompts']} prompts with {kept['samples']} "
        f"completions each. The rate of false alarms asked for is {kept['rate']:g} for all probes together."
    )
    return "\n".join([table(["policy", "probe", *titles], rows), "", said, "", made(code(kept["command"]))])


def _fired(row: Row | None, probe: str | None) -> str:
    if row is None:
        return ""
    found = row["any"] if probe is None else row["each"][probe]
    low, high = (number(end, 2) for end in found["ci95"])
    return f"{number(found['value'], 2)} ({low} to {high})"
