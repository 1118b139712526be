"""The card of a published checkpoint and its plots, without the weights beside them."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ...errors import ZooError
from .connect import CLIENT, Hub
from .pull import split_revision
from .refusals import refusals_as

#: Bytes of one of those files, beyond which it is no part of a card.
LARGEST = 2**22


def fetch_card_files(name: str, *, hub: Hub = CLIENT) -> Path:
    """The folder with README.md and plots/*.png of NAMESPACE/NAME[@REVISION], in the client's cache.

    Raises ZooError where the Hub does not give them.
    """
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    repo, revision = split_revision(name)
    api = hub.api()
    what = f"The card of {name} cannot be had from {hub.name}"
    with disable_progress_bars(), refusals_as(what, "try again."):
        try:
            commit = api.model_info(repo, revision=revision).sha
        except (RepositoryNotFoundError, RevisionNotFoundError) as error:
            raise ZooError(f"{name} is not on {hub.name}, or this token may not read it.") from error
        listed = api.list_repo_tree(repo, recursive=True, revision=commit)
        wanted = [one.path for one in listed if _is_of_a_card(one)]
        return hub.snapshot(repo, revision=commit, allow_patterns=wanted or ["README.md"])


def _is_of_a_card(entry: Any) -> bool:
    named = entry.path == "README.md" or fnmatchcase(entry.path, "plots/*.png")
    return named and getattr(entry, "size", LARGEST + 1) <= LARGEST
