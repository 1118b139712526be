"""Errors that stop an update before it changes the weights."""

from ..errors import ZooError


class UpdateFailed(ZooError):
    """An update could not be made. The weights have not changed.

    Attributes:
        raised_on_all_processes: Whether all processes raise the error, so that they can save a checkpoint together.
    """

    raised_on_all_processes = False


class ScoringFailed(UpdateFailed):
    """Completions could not be scored."""


class SamplingFailed(UpdateFailed):
    """The engine sampled no completions, or did not have the policy's weights."""
