"""The table of what the planner says beside what runs took."""

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
            one["setting"],
            f"{one['measured_mib']:,}",
            f"{one['predicted_mib']:,}",
            f"{number(100 * (one['predicted_mib'] / one['measured_mib'] - 1), 0, sign=True)}%",
            one["worst_phase"],
        ]
        for one in kept["settings"]
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
