"""The planner's memory estimate against real processes, for each critic, with and without LoRA."""

import plan_check
import pytest

pytestmark = [
    pytest.mark.full,
    pytest.mark.xdist_group("memory"),  # one at a time: two take more than 6 GiB
]


# Each critic with and without LoRA, but each on one model only; benchmarks/plan_check.py measures all twelve.
NAMES = [name for name in plan_check.TABLE if name.startswith("smollm2") != name.endswith("LoRA")]


@pytest.mark.parametrize("name", NAMES)
def test_process_memory_matches_plan(name: str) -> None:
    """The peak of a child process matches the plan, and is below the 10 GiB of a small machine."""
    row = {"setting": name, **plan_check.predicted(plan_check.TABLE[name]), **plan_check.measured(name)}
    assert plan_check.is_within_tolerance(row), plan_check.format_row(row)
    assert row["measured_mib"] < 10 * 1024
