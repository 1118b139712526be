"""The planner's memory estimate against real processes, over models, critics and LoRA."""

import plan_check
import pytest

pytestmark = [
    pytest.mark.full,
    pytest.mark.xdist_group("memory"),  # one process of these at a time: together they would take 6 GiB and more
]


# Each critic with and without LoRA, on one model or the other; `python benchmarks/plan_check.py` measures all twelve.
NAMES = [name for name in plan_check.TABLE if name.startswith("smollm2") != name.endswith("LoRA")]


@pytest.mark.parametrize("name", NAMES)
def test_process_memory_matches_plan(name: str) -> None:
    """The peak of a child, imports and all, and of the largest below the 10 GiB that a small machine has free."""
    row = {"setting": name, **plan_check.predicted(plan_check.TABLE[name]), **plan_check.measured(name)}
    assert plan_check.within(row), plan_check.line(row)
    assert row["measured_mib"] < 10 * 1024
