"""Fetches a revision of a model repository, resumes an interrupted fetch, and verifies files by the Hub's digests.

huggingface_hub 2.4 downloads an interrupted file again from its start (the temporary file has a new name each time) and
checks only the file's size. Here, Range requests complete a partial file. The file moves to its destination once its
digest equals that in the Hub's listing of the commit: the sha256 of a large file, git's SHA-1 of any other file.
"""

import contextlib
import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

from ...errors import ZooError
from .connect import DEFAULT_HUB, HF_URL, Hub
from .local_paths import CHUNK_BYTES, Cache, FileToFetch, Folder, sha256_if_intact
from .refusals import is_outage, reason, status_of, translate_hub_errors, unreachable_error
from .step_tags import step_of_revision, tag_name, tagged_steps
from .trees import COMMIT_ID, list_files

WORKERS = 4
# After a request that yielded no bytes, up to this many more requests follow. The pauses are 1, 2, 4, … seconds.
MAX_EMPTY_ATTEMPTS = 4


@dataclass(frozen=True)
class PulledFile:
    """A file of a fetched revision.

    Args:
        path: Path in the repository.
        size: Bytes.
        sha256: The content's sha256.
    """

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class PulledRevision:
    """A revision of a repository on this machine, with every file verified.

    Args:
        repo: NAMESPACE/NAME.
        revision: The branch, tag or commit that the user meant.
        commit: The commit of the revision.
        path: The folder on this machine.
        files: The revision's files, whether they were fetched now or before.
        refetched: Files that existed with other content and were fetched again.
        unrelated: Files in the output directory that do not belong to the revision. They were left unchanged.
        excluded: Files of the revision that `ignore` left on the Hub. If the copy in the cache was used, they are known
            from the listing that the client keeps with it.
        outage: Why the Hub did not answer, if the copy in the cache was used instead; None if it answered.
    """

    repo: str
    revision: str
    commit: str
    path: Path
    files: list[PulledFile]
    refetched: list[str] = field(default_factory=list)
    unrelated: list[str] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)
    outage: str | None = None

    @property
    def bytes(self) -> int:
        """Total size of the files in bytes."""
        return sum(file.size for file in self.files)


def split_revision(repository: str) -> tuple[str, str | None]:
    """Splits NAMESPACE/NAME[@REVISION] into (NAMESPACE/NAME, REVISION). A missing revision becomes None.

    Args:
        repository: NAMESPACE/NAME[@REVISION].
    """
    repo, _, revision = repository.partition("@")
    return repo, revision or None


def find_revision(revision: str, names: Iterable[str]) -> str | None:
    """Finds the branch or tag that a user means.

    Args:
        revision: A name, or a step: both step-40 and 40 stand for the tag step-000040. A name takes precedence.
        names: The branches and tags of the repository.

    Returns:
        The branch or tag; None if there is none.
    """
    available_names = set(names)
    if revision in available_names:
        return revision
    step = step_of_revision(revision)
    tag = None if step is None else tag_name(step)
    return tag if tag in available_names else None


def full_revision(repo: str, revision: str | None, hub: Hub) -> str | None:
    """Expands a short step to its tag, such as step-40 to step-000040. Returns any other revision unchanged.

    Args:
        repo: NAMESPACE/NAME.
        revision: The revision, as a user wrote it; None is returned unchanged.
        hub: The Hub that has the repository. If it is offline, a short step is expanded without a look-up.
    """
    if revision is None or (step := step_of_revision(revision)) is None:
        return revision
    if hub.offline:
        return tag_name(step)
    refs = hub.api().list_repo_refs(repo)
    return find_revision(revision, [ref.name for ref in (*refs.branches, *refs.tags)]) or revision


def fetch(
    repository: str, output_dir: Path | None = None, *, hub: Hub = DEFAULT_HUB, ignore: Sequence[str] = ()
) -> PulledRevision:
    """Fetches a revision of a model repository. Complete files are not fetched again.

    If the Hub does not answer and there is no output directory, a copy in the cache is used. Its files are checked
    against the digests in their names.

    Args:
        repository: NAMESPACE/NAME[@REVISION]. REVISION is a branch, tag, commit or step (see `find_revision`), by
            default main.
        output_dir: The folder to fetch into; None for the client's cache.
        hub: The Hub to fetch from.
        ignore: Patterns of files to leave out.

    Raises:
        ZooError: There is no such repository or revision; the Hub does not answer and the cache lacks the revision; the
            disk lacks room, or `output_dir` holds other files; or a file arrived twice with a wrong digest.
    """
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    repo, revision = split_revision(repository)
    if output_dir is not None and output_dir.exists() and not output_dir.is_dir():
        raise ZooError(f"{output_dir} is a file: pass a folder as --output_dir.")
    failure, remedy = f"Cannot fetch {repository} from {hub.name}", f"try again, or check {hub.flag}."
    try:
        with translate_hub_errors(failure, remedy):
            revision_name, commit = _resolve_revision(hub, repo, revision)
            all_files = list_files(hub, repo, commit)
    except ZooError as error:
        cause = error.__cause__
        # Some causes allow a more specific remedy.
        if isinstance(cause, RevisionNotFoundError):
            raise ZooError(
                f"{repo} has no revision {revision or 'main'!r}{_suggest_revisions(hub, repo, revision)}"
            ) from cause
        if isinstance(cause, GatedRepoError):
            raise ZooError(
                f"{repo} on {hub.name} is gated: accept its terms at {hub.address}/{repo}, and set "
                f"{hub.token_variable}."
            ) from cause
        if isinstance(cause, RepositoryNotFoundError):
            advice = f"pass {hub.flag} {HF_URL}" if hub.kind == "local" else "check the token"
            raise ZooError(
                f"There is no repository {repo!r} on {hub.name} that this token may read: check its name, or {advice}."
            ) from cause
        if isinstance(cause, HFValidationError):
            raise ZooError(f"{repository!r} is not a repository: write NAMESPACE/NAME[@TAG].") from cause
        # If the token is bad, never fall back to the cache: the user should learn about the token.
        if status_of(cause) == 401:
            raise ZooError(
                f"{hub.address} does not accept the token for {repository}: set {hub.token_variable}."
            ) from cause
        if cause is None or not is_outage(cause):
            raise
        if output_dir is not None:
            raise unreachable_error(hub, cause, f"so {repository} cannot be fetched") from cause
        cached_revision = _load_from_cache(repo, revision, hub, ignore, reason(cause))
        if cached_revision is None:
            raise unreachable_error(hub, cause, f"and {repository} is not in the cache") from cause
        return cached_revision
    files = [file for file in all_files if not any(fnmatchcase(file.path, pattern) for pattern in ignore)]
    destination = Cache(repo, commit, hub) if output_dir is None else Folder(repo, commit, output_dir, hub)
    if isinstance(destination, Folder):
        destination.check(files)  # before the first byte is written
    destination.check_free_space(files)
    with translate_hub_errors(failure, "run the same command again to continue."):
        destination.begin(files)
        pulled_files, refetched = _fetch_all(files, destination, f"{repo}@{revision_name}")
        path = destination.finish(files, revision_name, all_files=all_files)
    excluded = sorted({file.path for file in all_files} - {file.path for file in files})
    unrelated = destination.unrelated_files(files)
    return PulledRevision(repo, revision_name, commit, path, pulled_files, refetched, unrelated, excluded)


def _resolve_revision(hub: Hub, repo: str, revision: str | None) -> tuple[str, str]:
    """Returns (the branch, tag or commit that the user means, its commit). Does not translate the client's errors."""
    from ..server.faults import Fault
    from ..server.names import check_ref

    name = revision or "main"
    if not COMMIT_ID.fullmatch(name):
        try:
            # The name may come from an untrusted card, and becomes a file name in the cache.
            check_ref(name, kind="revision")
        except Fault as fault:
            raise ZooError(f"{repo} has no revision {name!r:.80}: {fault}") from fault
        refs = hub.api().list_repo_refs(repo)
        branches, tags = {ref.name for ref in refs.branches}, {ref.name for ref in refs.tags}
        name = find_revision(name, branches | tags) or name
        if name in branches & tags:
            raise ZooError(
                f"{repo} has both a branch and a tag named {name!r}: name the commit instead, or rename the branch."
            )
    commit = hub.api().model_info(repo, revision=name).sha
    # The commit becomes a folder's name. A Hub that answers "../.." must not choose where files are written.
    if not isinstance(commit, str) or not COMMIT_ID.fullmatch(commit):
        raise ZooError(f"{hub.name} names {commit!r:.80} as the commit of {repo}@{name}: check {hub.flag}.")
    return name, commit


def _suggest_revisions(hub: Hub, repo: str, revision: str | None) -> str:
    """Suggests the nearest step if the user named a step, else a similar tag or all tags, to complete a message."""
    from ...plugins import did_you_mean

    tags = [ref.name for ref in hub.api().list_repo_refs(repo).tags]
    requested_step, tag_by_step = step_of_revision(revision or ""), tagged_steps(tags)
    if requested_step is not None and tag_by_step:
        nearest_step = min(tag_by_step, key=lambda step: abs(step - requested_step))
        return f", did you mean {tag_by_step[nearest_step]!r}?"
    return did_you_mean(revision or "", tags) or f": it has {', '.join(tags) or 'no tags'}."


def _load_from_cache(
    repo: str, revision: str | None, hub: Hub, ignore: Sequence[str], outage: str
) -> PulledRevision | None:
    """Loads a revision from the cache alone; returns None if the cache lacks a part of it.

    Raises ZooError if a file is damaged. `outage` says why the Hub does not answer.
    """
    from huggingface_hub._tree_cache import read_tree_cache
    from huggingface_hub.errors import LocalEntryNotFoundError

    step = step_of_revision(revision or "")
    for name in [revision or "main", *([] if step is None else [tag_name(step)])]:
        try:
            folder = replace(hub, offline=True).snapshot(repo, revision=name, ignore_patterns=[*ignore])
        except LocalEntryNotFoundError:
            continue
        files = []
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            # A snapshot links to blobs/ETAG, so the blob's name is the expected digest. For a copy, it is unknown.
            etag = Path(os.readlink(path)).name if path.is_symlink() else ""
            file = FileToFetch(path.relative_to(folder).as_posix(), path.stat().st_size, etag)
            digest = sha256_if_intact(path, file)
            if digest is None:
                raise ZooError(
                    f"{file.path} of {repo}@{name} is damaged in the cache, and {hub.name} does not answer "
                    f"({outage}): try again when it does."
                )
            files.append(PulledFile(file.path, file.size, digest))
        listed_paths = read_tree_cache(str(folder.parents[1]), folder.name) or ()
        excluded = sorted(set(listed_paths) - {file.path for file in files})
        return PulledRevision(repo, name, folder.name, folder, files, excluded=excluded, outage=outage)
    return None


class _Stopped(Exception):
    """Ends a thread because another thread's file failed, or because the user pressed Ctrl-C."""


class _Progress:
    """A progress bar on stderr, shown if stderr is a terminal. Setting `stop` ends all threads that report progress."""

    def __init__(self, title: str, files: list[FileToFetch]) -> None:
        from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

        self.stop = threading.Event()
        self._lock = threading.Lock()
        self._completed, self._total = 0, len(files)
        self._bar = tqdm(
            total=sum(file.size for file in files),
            desc=title,
            unit="B",
            unit_scale=True,
            disable=None,
            name="rlhf_zoo.pull",
            postfix=f"0/{len(files)} files",
        )

    def check(self) -> None:
        """Raises _Stopped if `stop` is set. Every progress report calls this, so no thread continues for long."""
        if self.stop.is_set():
            raise _Stopped

    def pause(self, seconds: float) -> None:
        self.stop.wait(seconds)
        self.check()

    def update(self, byte_count: int) -> None:
        self.check()
        with self._lock:
            self._bar.update(byte_count)

    def count_file(self) -> None:
        self.check()
        with self._lock:
            self._completed += 1
            self._bar.set_postfix_str(f"{self._completed}/{self._total} files")

    def close(self) -> None:
        self._bar.close()


def _fetch_all(files: list[FileToFetch], destination: Cache | Folder, title: str) -> tuple[list[PulledFile], list[str]]:
    """Fetches files in WORKERS threads. Returns the files in order, and the paths that had other content before."""
    progress = _Progress(title, files)
    pending_files: SimpleQueue[FileToFetch] = SimpleQueue()
    for file in files:
        pending_files.put(file)
    results: dict[str, tuple[PulledFile, bool]] = {}
    failures: list[BaseException] = []

    def fetch_pending() -> None:
        try:
            while True:
                file = pending_files.get_nowait()
                results[file.path] = _fetch_file(file, destination, progress)
        except (Empty, _Stopped):
            return
        except BaseException as error:
            failures.append(error)
            progress.stop.set()

    # Use daemon threads: otherwise Ctrl-C would wait for a connection that hangs.
    threads = [threading.Thread(target=fetch_pending, daemon=True) for _ in range(WORKERS)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        progress.stop.set()
        progress.close()
    if failures:
        raise failures[0]
    return [results[file.path][0] for file in files], [file.path for file in files if results[file.path][1]]


def _fetch_file(file: FileToFetch, destination: Cache | Folder, progress: _Progress) -> tuple[PulledFile, bool]:
    """Fetches a file, unless it is complete. Returns the file, and whether it replaced other content."""
    from huggingface_hub import constants, hf_hub_url

    progress.check()
    target, partial = destination.target(file), destination.partial(file)
    had_other_content = os.path.lexists(target)
    digest = sha256_if_intact(target, file)
    if digest is not None:
        progress.update(file.size)
        progress.count_file()
        return PulledFile(file.path, file.size, digest), False
    # The Hub serves larger files only by Xet, not in a plain HTTP response.
    if file.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
        raise ZooError(f"{file.path} of {destination.repo} has {file.size} bytes: fetch it with `hf download`.")
    target.parent.mkdir(parents=True, exist_ok=True)
    url = hf_hub_url(destination.repo, file.path, revision=destination.commit, endpoint=destination.hub.endpoint)
    with _open_locked(partial, progress.pause) as output:
        if (digest := sha256_if_intact(target, file)) is not None:  # another process was faster
            progress.update(file.size)
            partial.unlink()
        elif (copy := destination.find_copy(file)) is not None and sha256_if_intact(copy, file) is not None:
            shutil.copyfile(copy, partial)
        # The second attempt is from the start, because the first may have resumed a damaged partial file.
        attempts = 0 if digest else 2
        for _ in range(attempts):
            _download_missing(output, file, url, destination.hub, progress)
            if (digest := sha256_if_intact(partial, file)) is not None:
                os.replace(partial, target)
                break
            progress.update(-file.size)
            output.truncate(0)
        if digest is None:
            partial.unlink()
            raise ZooError(
                f"{file.path} of {destination.repo} at commit {destination.commit} arrived twice with a digest other "
                f"than the one that {destination.hub.name} lists ({file.etag}); it was not kept. Try again later, or "
                f"check {destination.hub.flag}."
            )
    progress.count_file()
    return PulledFile(file.path, file.size, digest), had_other_content


def _open_locked(path: Path, pause: Callable[[float], None]) -> IO[bytes]:
    """Opens a file for appending and locks it. While another process has the lock, calls `pause`, which may raise."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        # FileNotFoundError: another process removed the folder. BlockingIOError: another process has the lock.
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            file = path.open("ab")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The previous owner of the lock may have moved the file to its target. Then this lock protects nothing:
                # try again.
                if _is_at(path, file):
                    return file
            except BaseException:
                file.close()
                raise
            file.close()
        pause(0.1)


def _is_at(path: Path, file: IO[bytes]) -> bool:
    """Whether a path still leads to this open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _download_missing(output: IO[bytes], file: FileToFetch, url: str, hub: Hub, progress: _Progress) -> None:
    """Appends the missing bytes of the file to `output`. Repeats the request after a lost connection."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    if os.fstat(output.fileno()).st_size > file.size:  # then it is not the beginning of this file
        output.truncate(0)
    size = os.fstat(output.fileno()).st_size
    progress.update(size)
    empty_attempts = 0
    while size < file.size:
        previous_size = size
        try:
            _append_response(output, file, url, hub, progress)
        except HfHubHTTPError:  # the Hub refused, and will again
            raise
        except HTTPError:
            if empty_attempts == MAX_EMPTY_ATTEMPTS:
                raise
            progress.pause(2**empty_attempts)
        size = os.fstat(output.fileno()).st_size
        empty_attempts = 0 if size > previous_size else empty_attempts + 1
        if empty_attempts > MAX_EMPTY_ATTEMPTS:
            return  # the responses were empty without an error; the caller detects this by the digest


def _append_response(output: IO[bytes], file: FileToFetch, url: str, hub: Hub, progress: _Progress) -> None:
    """Makes one request for the bytes missing from `output`. Reads at most one chunk past the file's size."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff  # type: ignore[attr-defined]

    size = os.fstat(output.fileno()).st_size
    # Forbid compression: with it, Range would count compressed bytes.
    headers = build_hf_headers(token=hub.token) | {"Accept-Encoding": "identity"}
    if size:
        headers["Range"] = f"bytes={size}-"
    options: dict[str, Any] = {"headers": headers, "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT}
    # Disable the client's retries: it would mistake an error in the middle of a response for a failure to connect.
    with http_stream_backoff("GET", url, retry_on_exceptions=(), **options) as response:
        hf_raise_for_status(response)
        if size and response.status_code != 206:  # the server ignored Range and sends the file from its start
            output.truncate(0)
            progress.update(-size)
            size = 0
        for chunk in response.iter_bytes(CHUNK_BYTES):
            output.write(chunk)
            output.flush()
            size += len(chunk)
            progress.update(len(chunk))
            if size > file.size:
                break
