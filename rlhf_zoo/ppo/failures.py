"""Errors of an update that leave the earlier updates intact."""

from ..errors import ZooError


class UpdateFailed(ZooError):
    """An update could not be made. The weights are those from before the update.

    Attributes:
        agreed: Whether all processes raise it, so that they can save a checkpoint together.
    """

    agreed = False


class ScoringFailed(UpdateFailed):
    """Completions could not be scored."""


class SamplingFailed(UpdateFailed):
    """The engine sampled no completions, or did not have the policy's weights."""
