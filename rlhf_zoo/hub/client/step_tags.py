"""Formats and parses the tags of checkpoints, such as step-000040. No other module depends on their format."""

import re
from collections.abc import Iterable

#: At most twelve digits: no run needs more, and int() refuses very long numbers.
_TAG = re.compile(r"step-([0-9]{6,12})")
_STEP = re.compile(r"(?:step-)?([0-9]{1,12})")


def tag_name(step: int) -> str:
    """Returns the tag of a step, such as step-000040. Zeros pad the number, so that tags sort in the order of steps.

    Args:
        step: The training step.
    """
    return f"step-{step:06d}"


def step_of_tag(tag: str) -> int | None:
    """Returns the step of a checkpoint's tag; None for any other tag.

    Args:
        tag: The tag's name.
    """
    match = _TAG.fullmatch(tag)
    return int(match[1]) if match and tag == tag_name(int(match[1])) else None


def tagged_steps(tags: Iterable[str]) -> dict[int, str]:
    """Returns the checkpoints' tags among a repository's tags: step -> tag.

    Args:
        tags: The tags' names.
    """
    return {step: tag for tag in tags if (step := step_of_tag(tag)) is not None}


def step_of_revision(revision: str) -> int | None:
    """Returns the step that a user means by a revision: 40 for both step-40 and 40. None for any other revision.

    Args:
        revision: The revision, as a user wrote it.
    """
    match = _STEP.fullmatch(revision)
    return int(match[1]) if match else None
