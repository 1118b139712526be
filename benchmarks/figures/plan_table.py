"""The table of the planner's memory beside the memory of real runs."""

from . import keep
from .experiments import PLAN
from .text import NOTHING, code, number, table


def plan_table() -> str:
    """A row for each setting."""
    kept = keep.load(PLAN)
    if not kept:
        return NOTHING
    rows = [
        [
            row["setting"],
            f"{row['measured_mib']:,}",
            f"{row['predicted_mib']:,}",
            f"{number(100 * (row['predicted_mib'] / row['measured_mib'] - 1), 0, sign=True)}%",
            row["worst_phase"],
        ]
        for row in kept["settings"]
    ]
    versions = ", ".join(f"{name} {version}" for name, version in kept["versions"].items())
    return "\n".join(
        [
            table(["setting", "measured, MiB", "planned, MiB", "apart", "worst phase"], rows),
            "",
            f"{kept['machine']}; {versions}. Made by {code(kept['command'])}; "
            f"{code('benchmarks/plan_check.py')} has each setting's keys.",
        ]
    )
