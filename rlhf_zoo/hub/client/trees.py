"""Lists a commit's files, and refuses names, sizes and digests that are unsafe to use on this machine."""

import re
import unicodedata
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from ...errors import ZooError
from ...fileio import int_or_none
from .connect import Hub
from .downloads import PARTIAL_FOLDER
from .local_paths import Cache, FileToFetch

# Limits for a revision. Checkpoints have about ten files and a single folder.
MAX_FILES = 10_000
MAX_DEPTH = 32  # folders above a file
COMMIT_ID = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def list_files(
    hub: Hub, repo: str, commit: str, *, repo_type: str = "model", patterns: Sequence[str] = ("*",)
) -> list[FileToFetch]:
    """Returns the files of a commit, after a check of each.

    Args:
        hub: The Hub to ask.
        repo: NAMESPACE/NAME.
        commit: The commit id, 40 hex digits.
        repo_type: model or dataset.
        patterns: Patterns of the files to list and check; by default all files.

    Raises:
        ZooError: The commit has too many files, or a file's name, size or digest is unsafe to use on this machine.
    """
    from huggingface_hub import RepoFolder

    from ..server.faults import Fault
    from ..server.names import check_path

    files: list[FileToFetch] = []
    for entry in hub.api().list_repo_tree(repo, recursive=True, revision=commit, repo_type=repo_type):
        if isinstance(entry, RepoFolder) or not any(fnmatch(str(entry.path), pattern) for pattern in patterns):
            continue
        try:
            path = check_path(entry.path)
        except Fault as fault:
            raise ZooError(f"{repo} has a file {entry.path!r:.160} that cannot be fetched: {fault}") from fault
        if not path.isprintable() or path.partition("/")[0].casefold() == PARTIAL_FOLDER:
            raise ZooError(f"{repo} has a file with the unsafe name {path!r:.160}: download it by hand.")
        if path.count("/") > MAX_DEPTH:
            raise ZooError(
                f"{repo} has a file {path!r:.160}, which is over {MAX_DEPTH} folders deep: download it by hand."
            )
        if len(files) == MAX_FILES:
            raise ZooError(f"{repo} has over {MAX_FILES:,} files: download it with `hf download`.")
        etag = entry.lfs.sha256 if entry.lfs else entry.blob_id
        size = int_or_none(entry.size)
        if not isinstance(etag, str) or not _DIGEST.fullmatch(etag) or size is None or size < 0:
            raise ZooError(
                f"{hub.name} lists {path} in {repo} with {entry.size!r:.40} bytes and the digest "
                f"{etag!r:.80}: check {hub.flag}."
            )
        files.append(FileToFetch(path, size, etag, str(entry.blob_id)))
    _check_distinct(repo, files)
    return files


def fetch_dataset(hub: Hub, repo: str, *, revision: str | None, patterns: Sequence[str] = ("*",)) -> Path:
    """Downloads a revision of a data set into the client's cache, after the same checks as for a model's files.

    Args:
        hub: The Hub. If it is offline, only the cache is read.
        repo: NAMESPACE/NAME.
        revision: A branch, tag or commit; None for main.
        patterns: Patterns of the files to download; by default all files.

    Raises:
        ZooError: There are too many files, they do not fit on the disk, a name is unsafe, or the commit is invalid.
        Exception: Errors of the Hub's client are not translated.
    """
    if hub.offline:
        return hub.snapshot(repo, repo_type="dataset", revision=revision, allow_patterns=[*patterns])
    commit = hub.api().dataset_info(repo, revision=revision).sha
    # The commit becomes a folder's name, so it must not be something like "../..".
    if not isinstance(commit, str) or not COMMIT_ID.fullmatch(commit):
        raise ZooError(f"{hub.name} names {commit!r:.80} as the commit of the data set {repo}: check {hub.flag}.")
    files = list_files(hub, repo, commit, repo_type="dataset", patterns=patterns)
    Cache(repo, commit, hub, repo_type="dataset").check_free_space(files)
    return hub.snapshot(repo, repo_type="dataset", revision=commit, allow_patterns=[*patterns])


def _check_distinct(repo: str, files: list[FileToFetch]) -> None:
    """Raises ZooError if a path collides with another on a file system that ignores case or Unicode normalization."""
    path_by_folded_name: dict[str, str] = {}
    for file in files:
        existing_path = path_by_folded_name.setdefault(_fold_name(file.path), file.path)
        if existing_path is not file.path:  # `is`, because the Hub may list one path twice
            raise ZooError(
                f"{repo} has files {existing_path!r:.160} and {file.path!r:.160}, which are the same on some file "
                "systems: rename one of them in the repository."
            )
    for file in files:
        for folder in Path(file.path).parents:
            colliding_path = path_by_folded_name.get(_fold_name(folder.as_posix()))
            if colliding_path is not None:
                raise ZooError(
                    f"{repo} has a file {colliding_path!r:.160} and a folder of that name: rename one of them there."
                )


def _fold_name(path: str) -> str:
    """Maps names that differ only in case or Unicode normalization to the same text."""
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", path).casefold())
