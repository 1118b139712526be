"""Compares the weights of two commits: after an edit of the card, a new commit still holds the same model."""

import logging
from functools import cache

from .connect import DEFAULT_HUB, Hub
from .publish import hub_content_id
from .refusals import client_errors, reason

log = logging.getLogger(__name__)

#: The repository and the commit of a model.
Origin = tuple[str, str]


def commits_have_same_weights(first: Origin | None, second: Origin | None, *, hub: Hub = DEFAULT_HUB) -> bool:
    """Whether two published models have the same weights: the safetensors files at the root of their repositories.

    Args:
        first: (repository, commit) of a model; None for a model that was not published, which equals only another None.
        second: (repository, commit) of the other model, or None.
        hub: The Hub that has both.

    Returns:
        True for equal weights. False if they differ, if both commits lack weights, or if the Hub does not answer (the
        log then says why).
    """
    if first == second or first is None or second is None:
        return first == second
    try:
        # Two commits without weights do not count as equal.
        return bool(_weight_ids(first, hub)) and _weight_ids(first, hub) == _weight_ids(second, hub)
    except client_errors() as error:
        names = _short_name(first), _short_name(second)
        log.info("Cannot compare the weights of %s and %s (%s).", *names, reason(error))
        return False


@cache
def _weight_ids(origin: Origin, hub: Hub) -> frozenset[tuple[str, str]]:
    """Returns (path, content id) of each weight file at the root. Cached forever, because commits never change."""
    from huggingface_hub import RepoFile

    entries = hub.api().list_repo_tree(origin[0], revision=origin[1])
    files = [entry for entry in entries if isinstance(entry, RepoFile) and entry.path.endswith(".safetensors")]
    return frozenset((entry.path, hub_content_id(entry)) for entry in files)


def _short_name(origin: Origin) -> str:
    return f"{origin[0]}@{origin[1][:8]}"
