"""Records which run may move a repository's `main`, its `best` and its step tags.

The id of the run is in claim.json on `main`. The commit that writes it names its parent commit, so if two runs claim a
free repository at once, the Hub refuses one of them. Every later commit names its parent too, after a check that the
run still holds the claim. If somebody edits the repository on the website meanwhile, the commit is prepared again. If
another run has claimed the repository, the commit fails.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ...errors import ZooError
from ...fileio import read_json
from .connect import DEFAULT_HUB, Hub
from .refusals import status_of

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    Operation = CommitOperationAdd | CommitOperationDelete

CLAIM_FILE = "claim.json"
RECIPE_FILE = "recipe.json"
CONFLICT_STATUSES = (409, 412)  # another commit came first
MAX_ATTEMPTS = 20  # per commit


def claim_repository(
    repo: str,
    run_id: str,
    *,
    sent_tags: Mapping[str, str],
    overwrite: bool,
    drop_old_tags: bool,
    private: bool,
    run_name: str,
    hub: Hub = DEFAULT_HUB,
) -> None:
    """Claims a model repository for a run. Creates the repository if it does not exist.

    Args:
        repo: NAMESPACE/NAME.
        run_id: Id of the run.
        sent_tags: Tag -> commit, for the checkpoints that this run sent there.
        overwrite: Whether to take the repository from another run, and to delete the tags that are not in `sent_tags`.
        drop_old_tags: Whether to delete those tags even without `overwrite`, because the run started over.
        private: Whether a new repository is private.
        run_name: Name of the run, for the commit message.
        hub: The Hub to publish to.

    Raises:
        ZooError: Another run has claimed the repository and `overwrite` is False.
    """
    from huggingface_hub import CommitOperationAdd

    hub.api().create_repo(repo, exist_ok=True, private=private)

    def make_operations(head: str) -> list[Operation] | None:
        claimant = _read_claimant(repo, head, hub)
        if claimant == run_id:
            return None
        if not overwrite and (claimant is not None or not _is_free(repo, head, sent_tags.values(), hub)):
            raise _claim_error(repo, claimant, hub)
        content = json.dumps({"run": run_id}).encode() + b"\n"
        return [CommitOperationAdd(path_in_repo=CLAIM_FILE, path_or_fileobj=content)]

    commit_on_head(repo, make_operations, f"{run_name}: claimed for run {run_id[:8]}", hub=hub)
    # Delete tags only after the claim: until then, they may belong to another run.
    if drop_old_tags or overwrite:
        for tag, _ in sorted(all_tags(repo, hub=hub).items() - sent_tags.items()):
            hub.api().delete_tag(repo, tag=tag)


def all_tags(repo: str, *, hub: Hub = DEFAULT_HUB) -> dict[str, str]:
    """Returns the tags of a model repository: name -> commit.

    Args:
        repo: NAMESPACE/NAME.
        hub: The Hub to ask.
    """
    return {ref.name: ref.target_commit for ref in hub.api().list_repo_refs(repo).tags}


def check_claim(repo: str, run_id: str, *, commit: str | None = None, hub: Hub = DEFAULT_HUB) -> None:
    """Checks that a run holds the claim to a repository.

    Args:
        repo: NAMESPACE/NAME.
        run_id: Id of the run.
        commit: The commit to read the claim at; None for the head of `main`.
        hub: The Hub to ask.

    Raises:
        ZooError: Another run has claimed the repository, or none has.
    """
    claimant = _read_claimant(repo, commit, hub)
    if claimant != run_id:
        raise _claim_error(repo, claimant, hub)


def commit_on_head(
    repo: str,
    make_operations: Callable[[str], Sequence[Operation] | None],
    message: str,
    *,
    revision: str | None = None,
    repo_type: str = "model",
    hub: Hub = DEFAULT_HUB,
) -> str | None:
    """Makes a commit on top of a branch's head. Starts over if another commit came first.

    Args:
        repo: NAMESPACE/NAME.
        make_operations: Takes the id of the head commit and returns the operations, or None if there is nothing to do.
            Called once for each attempt.
        message: The commit message.
        revision: The branch; None for main.
        repo_type: model, dataset or space.
        hub: The Hub to publish to.

    Returns:
        The commit, or None if `make_operations` returned None.

    Raises:
        HfHubHTTPError: The Hub refused the commit, or another commit came first in each of MAX_ATTEMPTS attempts.
    """
    from huggingface_hub.errors import HfHubHTTPError

    api = hub.api()
    for attempt in range(1, MAX_ATTEMPTS + 1):
        head = str(api.repo_info(repo, revision=revision, repo_type=repo_type).sha)
        operations = make_operations(head)
        if operations is None:
            return None
        try:
            return api.create_commit(
                repo, operations, commit_message=message, revision=revision, repo_type=repo_type, parent_commit=head
            ).oid
        except HfHubHTTPError as error:
            if status_of(error) not in CONFLICT_STATUSES or attempt == MAX_ATTEMPTS:
                raise
        # A random pause, so that two writers that conflict once do not conflict again.
        time.sleep(random.uniform(0, min(0.1 * attempt, 1.0)))
    raise AssertionError("unreachable")


def _read_claimant(repo: str, commit: str | None, hub: Hub) -> str | None:
    """Returns the run in claim.json at a commit (None: at the head); "" if the file has none, None if it is missing."""
    from huggingface_hub.errors import EntryNotFoundError

    try:
        content = read_json(hub.file(repo, CLAIM_FILE, revision=commit))
    except EntryNotFoundError:
        return None
    except ZooError:  # an unreadable claim counts as another run's
        return ""
    run_id = content.get("run") if isinstance(content, dict) else None
    return run_id if isinstance(run_id, str) else ""


def _is_free(repo: str, head: str, sent_commits: Iterable[str], hub: Hub) -> bool:
    """Whether a repository without claim.json may be claimed: no run has published there, or this run has."""
    # Versions of rlhf-zoo that had no claim.json published a recipe.json.
    api = hub.api()
    if not api.file_exists(repo, RECIPE_FILE, revision=head):
        return True
    return any(api.revision_exists(repo, commit) for commit in sent_commits)


def _claim_error(repo: str, claimant: str | None, hub: Hub) -> ZooError:
    run = f"another run ({claimant[:8]})" if claimant else "another run"
    is_finished = "best" in all_tags(repo, hub=hub)
    return ZooError(
        f"{repo} on {hub.name} belongs to {run}{', which has finished' if is_finished else ''}: continue in that run's "
        "own --output_dir, publish under another --namespace, or pass --overwrite_repo to replace it."
    )
