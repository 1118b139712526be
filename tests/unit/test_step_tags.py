"""The form of a checkpoint's tag."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_zoo.hub.client.pull import full_revision
from rlhf_zoo.hub.client.step_tags import step_of_revision, step_of_tag, tag_name, tagged_steps


def test_tags_round_trip_and_sort_by_step():
    steps = [0, 7, 40, 999_999, 1_000_000]
    tags = [tag_name(step) for step in steps]
    assert tags[2] == "step-000040" and [step_of_tag(tag) for tag in tags] == steps and sorted(tags[:4]) == tags[:4]
    assert tagged_steps(["best", *tags[1:3], "main"]) == {7: "step-000007", 40: "step-000040"}


@pytest.mark.parametrize(
    "tag", ["step-40", "step-0000040", "step-٠٠٠٠٤٠", "step-", "best", "xstep-000040", "step-" + "9" * 5000]
)
def test_step_of_is_none_for_other_tags(tag):
    assert step_of_tag(tag) is None


def test_step_in_accepts_tags_without_zeros_and_prefix():
    assert [step_of_revision(text) for text in ("40", "step-40", "step-000040")] == [40, 40, 40]
    assert step_of_revision("best") is None and step_of_revision("9" * 5000) is None and step_of_revision("") is None


def test_full_revision_expands_short_steps():
    """Unless a branch or tag has that very name."""
    refs = SimpleNamespace(branches=[SimpleNamespace(name="step-7")], tags=[SimpleNamespace(name="step-000040")])
    hub: Any = SimpleNamespace(offline=False, api=lambda: SimpleNamespace(list_repo_refs=lambda _: refs))
    names = [full_revision("a/b", name, hub) for name in ("step-40", "40", "step-000040", "step-7", "best", None)]
    assert names == ["step-000040"] * 3 + ["step-7", "best", None]
    hub.offline = True
    assert full_revision("a/b", "step-40", hub) == "step-000040"
