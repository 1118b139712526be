"""Checks by their weights whether two commits hold the same model: a new card makes a new commit, but no new model."""

import logging
from functools import cache

from .connect import DEFAULT_HUB, Hub
from .publish import expected_id
from .refusals import client_errors, reason

log = logging.getLogger(__name__)

#: The repository and the commit of a model.
Origin = tuple[str, str]


def equal_weights(a: Origin | None, b: Origin | None, *, hub: Hub = DEFAULT_HUB) -> bool:
    """Whether two published models have the same weights.

    Args:
        a: (repository, commit) of a model; None for a model that was not published, which equals only None.
        b: (repository, commit) of the other model, or None.
        hub: The Hub that has both.

    Returns:
        True for equal weights. False if they differ or the Hub does not answer; the log then says why.
    """
    if a == b or a is None or b is None:
        return a == b
    try:
        # Two commits without weights do not hold the same model.
        return bool(_weights(a, hub)) and _weights(a, hub) == _weights(b, hub)
    except client_errors() as error:
        log.info("Cannot compare the weights of %s and %s (%s).", _short(a), _short(b), reason(error))
        return False


@cache
def _weights(origin: Origin, hub: Hub) -> frozenset[tuple[str, str]]:
    """(path, content id) of each file of weights. Cached without expiry, because a commit never changes."""
    from huggingface_hub import RepoFile

    entries = hub.api().list_repo_tree(origin[0], revision=origin[1])
    files = [entry for entry in entries if isinstance(entry, RepoFile) and entry.path.endswith(".safetensors")]
    return frozenset((entry.path, expected_id(entry)) for entry in files)


def _short(origin: Origin) -> str:
    return f"{origin[0]}@{origin[1][:8]}"
