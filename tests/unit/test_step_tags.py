"""The form of a checkpoint's tag."""

import pytest

from rlhf_zoo.hub.client.step_tags import step_in, step_of, tag_name, tagged_steps


def test_a_tag_is_read_as_it_was_written_and_sorts_by_step():
    steps = [0, 7, 40, 999_999, 1_000_000]
    tags = [tag_name(step) for step in steps]
    assert tags[2] == "step-000040" and [step_of(tag) for tag in tags] == steps and sorted(tags[:4]) == tags[:4]
    assert tagged_steps(["best", *tags[1:3], "main"]) == {7: "step-000007", 40: "step-000040"}


@pytest.mark.parametrize(
    "tag", ["step-40", "step-0000040", "step-٠٠٠٠٤٠", "step-", "best", "xstep-000040", "step-" + "9" * 5000]
)
def test_any_other_form_is_no_checkpoint(tag):
    assert step_of(tag) is None


def test_users_may_leave_out_zeros_and_the_prefix():
    assert [step_in(text) for text in ("40", "step-40", "step-000040")] == [40, 40, 40]
    assert step_in("best") is None and step_in("9" * 5000) is None and step_in("") is None
