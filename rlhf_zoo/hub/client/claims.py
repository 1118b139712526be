"""Whose a repository is: the id of the run that may move its `main`, its `best` and its step tags.

The id stands in claim.json at the head of the repository, put there by a commit that names its parent, so that of two
runs that find the repository free one is refused. Each later commit names its parent too and is made only while the
claim stands, so that an edit on the website costs one more reading and another run's claim costs the commit.
"""

import json
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...errors import ZooError
from .connect import CLIENT, Hub
from .refusals import status_of

CLAIM_FILE = "claim.json"
RECIPE_FILE = "recipe.json"
CONFLICTS = (409, 412)  # another commit was first
TRIES = 20


def claim_repository(
    repo: str,
    run: str,
    *,
    known: Mapping[str, str],
    overwrite: bool,
    fresh: bool,
    private: bool,
    what: str,
    hub: Hub = CLIENT,
) -> None:
    """Makes `run` the holder of a model repository, which is created if need be, and leaves it without another's tags.

    known: tag -> commit of what this run sent there. overwrite: take it from another run. fresh: the run began again;
    then, too, the tags that are not `known` are dropped. what: of the run, for the commit's message. Raises ZooError
    where another run holds it.
    """
    from huggingface_hub import CommitOperationAdd

    hub.api().create_repo(repo, exist_ok=True, private=private)

    def operations(head: str) -> list[Any] | None:
        holder = _holder(repo, head, hub)
        if holder == run:
            return None
        if not overwrite and (holder is not None or not _free(repo, head, known.values(), hub)):
            raise _held(repo, holder, hub)
        content = json.dumps({"run": run}).encode() + b"\n"
        return [CommitOperationAdd(path_in_repo=CLAIM_FILE, path_or_fileobj=content)]

    commit_on_head(repo, operations, f"{what}: claimed for run {run[:8]}", hub=hub)
    for tag, commit in all_tags(repo, hub=hub).items() if fresh or overwrite else ():
        if known.get(tag) != commit:
            hub.api().delete_tag(repo, tag=tag)


def all_tags(repo: str, *, hub: Hub = CLIENT) -> dict[str, str]:
    """Tag -> commit of a model repository."""
    return {ref.name: ref.target_commit for ref in hub.api().list_repo_refs(repo).tags}


def check_claim(run: str, repo: str, *, commit: str | None = None, hub: Hub = CLIENT) -> None:
    """Raises ZooError where the repository, at a commit (None: now), is not this run's."""
    holder = _holder(repo, commit, hub)
    if holder != run:
        raise _held(repo, holder, hub)


def commit_on_head(
    repo: str,
    operations: Callable[[str], Sequence[Any] | None],
    message: str,
    *,
    revision: str | None = None,
    repo_type: str = "model",
    hub: Hub = CLIENT,
) -> str | None:
    """Commits what `operations` makes of the head, onto that head, and begins again where another commit was first.

    Returns the commit; None where `operations` returns None, as there is nothing to do.
    """
    from huggingface_hub.errors import HfHubHTTPError

    api = hub.api()
    for attempt in range(1, TRIES + 1):
        head = str(api.repo_info(repo, revision=revision, repo_type=repo_type).sha)
        changes = operations(head)
        if changes is None:
            return None
        try:
            return api.create_commit(
                repo, changes, commit_message=message, revision=revision, repo_type=repo_type, parent_commit=head
            ).oid
        except HfHubHTTPError as error:
            if status_of(error) not in CONFLICTS or attempt == TRIES:
                raise
        time.sleep(random.uniform(0, min(0.1 * attempt, 1.0)))  # apart from others that were refused too
    raise AssertionError("unreachable")


def _holder(repo: str, commit: str | None, hub: Hub) -> str | None:
    """The run that claim.json at a commit (None: at the head) names, "" where it names none, None without the file."""
    from huggingface_hub.errors import EntryNotFoundError

    try:
        content = json.loads(hub.file(repo, CLAIM_FILE, revision=commit).read_text(encoding="utf-8"))
    except EntryNotFoundError:
        return None
    except (ValueError, RecursionError):
        return ""
    run = content.get("run") if isinstance(content, dict) else None
    return run if isinstance(run, str) else ""


def _free(repo: str, head: str, known: Iterable[str], hub: Hub) -> bool:
    """Whether a repository without a claim, as before there were any, may be taken: no run filled it, or this one."""
    api = hub.api()
    if not api.file_exists(repo, RECIPE_FILE, revision=head):
        return True
    return any(api.revision_exists(repo, commit) for commit in known)


def _held(repo: str, holder: str | None, hub: Hub) -> ZooError:
    finished = "best" in all_tags(repo, hub=hub)
    which = f"run {holder[:8]}, which is another run" if holder else "another run"
    return ZooError(
        f"{repo} on {hub.name} holds {which}{' and finished' if finished else ''}: go on in that run's own "
        "--output_dir, publish under another --namespace, or give --overwrite_repo to replace it."
    )
