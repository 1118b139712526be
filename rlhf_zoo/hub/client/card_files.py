"""Fetches the card and the plots of a published checkpoint, without its weights."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ZooError
from .connect import DEFAULT_HUB
from .pull import full_revision, split_revision
from .refusals import translate_hub_errors

if TYPE_CHECKING:
    from huggingface_hub import RepoFile, RepoFolder

#: Maximum size of a file. rlhf-zoo publishes no card with a larger file.
MAX_FILE_BYTES = 2**22


def fetch_card_files(name: str) -> Path:
    """Fetches README.md and plots/*.png from a repository on DEFAULT_HUB into the client's cache.

    Files above MAX_FILE_BYTES are left out.

    Args:
        name: NAMESPACE/NAME[@REVISION].

    Returns:
        The folder in the cache that holds the files.

    Raises:
        ZooError: The repository does not exist, or the Hub does not deliver the files.
    """
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    repo, revision = split_revision(name)
    api = DEFAULT_HUB.api()
    failure = f"Cannot fetch the card of {name} from {DEFAULT_HUB.name}"
    with disable_progress_bars(), translate_hub_errors(failure, "try again."):
        try:
            commit = api.model_info(repo, revision=full_revision(repo, revision, DEFAULT_HUB)).sha
        except (RepositoryNotFoundError, RevisionNotFoundError) as error:
            raise ZooError(f"{name} is not on {DEFAULT_HUB.name}, or this token may not read it.") from error
        # Read the sizes from the listing, so that an oversized file is never requested. All calls name the same commit:
        # otherwise, a push between them could mix two versions of the card.
        entries = api.list_repo_tree(repo, recursive=True, revision=commit)
        paths = [entry.path for entry in entries if _is_card_file(entry)]
        # An empty list of patterns would match every file.
        return DEFAULT_HUB.snapshot(repo, revision=commit, allow_patterns=paths or ["README.md"])


def _is_card_file(entry: RepoFile | RepoFolder) -> bool:
    is_part_of_card = entry.path == "README.md" or fnmatchcase(entry.path, "plots/*.png")
    return is_part_of_card and getattr(entry, "size", MAX_FILE_BYTES + 1) <= MAX_FILE_BYTES  # a folder has no size
