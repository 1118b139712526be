"""Checks by their weights whether two commits hold the same model: a new card makes a new commit, but no new model."""

import logging
from functools import cache

from .connect import DEFAULT_HUB, Hub
from .publish import expected_id
from .refusals import client_errors, reason

log = logging.getLogger(__name__)

#: The repository and the commit of a model.
Origin = tuple[str, str]


def equal_weights(first: Origin | None, second: Origin | None, *, hub: Hub = DEFAULT_HUB) -> bool:
    """Whether two published models have the same weights.

    Args:
        first: (repository, commit) of a model; None for a model that was not published, which equals only None.
        second: (repository, commit) of the other model, or None.
        hub: The Hub that has both.

    Returns:
        True for equal weights. False if they differ or the Hub does not answer; the log then says why.
    """
    if first == second or first is None or second is None:
        return first == second
    try:
        # Two commits without weights do not hold the same model.
        return bool(_weights(first, hub)) and _weights(first, hub) == _weights(second, hub)
    except client_errors() as error:
        names = _short_name(first), _short_name(second)
        log.info("Cannot compare the weights of %s and %s (%s).", *names, reason(error))
        return False


@cache
def _weights(origin: Origin, hub: Hub) -> frozenset[tuple[str, str]]:
    """(path, content id) of each file of weights. Cached without expiry, because a commit never changes."""
    from huggingface_hub import RepoFile

    entries = hub.api().list_repo_tree(origin[0], revision=origin[1])
    files = [entry for entry in entries if isinstance(entry, RepoFile) and entry.path.endswith(".safetensors")]
    return frozenset((entry.path, expected_id(entry)) for entry in files)


def _short_name(origin: Origin) -> str:
    return f"{origin[0]}@{origin[1][:8]}"
