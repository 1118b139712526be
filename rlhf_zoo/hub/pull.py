"""Fetching a checkpoint by its tag."""

from __future__ import annotations

from pathlib import Path

from ..errors import ZooError

__all__ = ["pull", "split_revision"]


def split_revision(repository: str) -> tuple[str, str | None]:
    """NAMESPACE/NAME[@REVISION] -> (id, revision)."""
    repo, _, revision = repository.partition("@")
    return repo, revision or None


def pull(repository: str, output_dir: Path | None = None) -> Path:
    """Fetches NAMESPACE/NAME[@REVISION] into the cache, or into `output_dir`. Returns the folder.

    Raises ZooError when there is no such repository or revision, or the Hub does not answer.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import (
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    from ..plugins import did_you_mean
    from .refusals import reason, refusals_as

    repo, revision = split_revision(repository)
    with refusals_as(f"{repository} cannot be fetched from {constants.ENDPOINT}", "try again, or check --hub."):
        try:
            return Path(snapshot_download(repo, revision=revision, local_dir=output_dir))
        except RevisionNotFoundError as error:
            tags = [ref.name for ref in HfApi().list_repo_refs(repo).tags]
            near = did_you_mean(revision or "", tags) or f": it has {', '.join(tags) or 'no tags'}."
            raise ZooError(f"{repo} has no revision {revision!r}{near}") from error
        except RepositoryNotFoundError as error:
            raise ZooError(
                f"There is no repository {repo!r} on {constants.ENDPOINT} that this token may read."
            ) from error
        except HFValidationError as error:
            raise ZooError(f"{repository!r} is no repository: write NAMESPACE/NAME or NAMESPACE/NAME@TAG.") from error
        except LocalEntryNotFoundError as error:
            raise ZooError(
                f"{repository} is not in the cache, and {constants.ENDPOINT} does not give it "
                f"({reason(error.__cause__ or error)}): check --hub and the token."
            ) from error
