"""Why an update could not be made, where the updates before it are as good as ever."""

from ..errors import ZooError


class NoUpdate(ZooError):
    """An update could not be made, and nothing has been learned since the one before.

    agreed: whether every process raises it, so that together they can save what was learned before.
    """

    agreed = False


class Unscored(NoUpdate):
    """Completions got no reward."""


class Unsampled(NoUpdate):
    """The engine sampled no completions, or not from the policy's weights."""
