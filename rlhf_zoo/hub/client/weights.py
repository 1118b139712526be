"""Whether two commits hold one model: the weights decide, as a card that changed makes another commit of the same."""

import logging
from functools import cache

from .connect import CLIENT, Hub
from .publish import expected_id
from .refusals import client_errors, reason

log = logging.getLogger(__name__)

#: The repository and the commit of a model.
Origin = tuple[str, str]


def equal_weights(a: Origin | None, b: Origin | None, *, hub: Hub = CLIENT) -> bool:
    """Whether two published models are one policy; None, one that was not published, equals only None.

    Where the Hub does not answer it is False, and the log says why.
    """
    if a == b or a is None or b is None:
        return a == b
    try:
        return bool(_weights(a, hub)) and _weights(a, hub) == _weights(b, hub)
    except client_errors() as error:
        log.info("The weights of %s and %s cannot be compared (%s).", _short(a), _short(b), reason(error))
        return False


@cache
def _weights(origin: Origin, hub: Hub) -> frozenset[tuple[str, str]]:
    """(name, content) of each file with weights; a commit's never change."""
    listed = hub.api().list_repo_tree(origin[0], revision=origin[1])
    files = [one for one in listed if one.path.endswith(".safetensors")]
    return frozenset((one.path, expected_id(one)) for one in files)


def _short(origin: Origin) -> str:
    return f"{origin[0]}@{origin[1][:8]}"
