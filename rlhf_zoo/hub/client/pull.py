"""Fetching a checkpoint by its tag: resumed where it stopped, each file held against what the Hub says of it.

huggingface_hub 2.4 begins an interrupted file again (its temporary file has a new name each time) and checks sizes
only. Here a file is filled up by Range requests, and stands in its place once its sha256 (of a regular file: git's
SHA-1, the only one that a Hub tells) is that of the tree at the commit.
"""

import contextlib
import fcntl
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

from ...errors import ZooError
from .connect import CLIENT, Hub
from .downloads import PARTIAL
from .local_paths import CHUNK, Cache, Folder, Wanted, sha256_of
from .publish import tag_name
from .refusals import is_silence, reason, refusals_as, status_of

WORKERS = 4
# Requests in a row without a byte of an answer, after which a file is given up; with 1, 2, 4, … seconds between them.
FRUITLESS = 4
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_STEP = re.compile(r"(?:step-)?(\d{1,12})")


@dataclass(frozen=True)
class PulledFile:
    """A file of a checkpoint. path: in the repository; size: in bytes."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Pulled:
    """A revision of a repository on this machine, each file of it checked.

    revision: the branch, tag or commit that was meant; path: the folder.
    mended: files that stood there with other content, and were fetched again.
    others: files of the output directory that do not belong to the revision, and were left alone.
    left: files of the revision that were not asked for.
    unanswered: why the Hub did not answer, where the copy in the cache had to do; None where it answered.
    """

    repo: str
    revision: str
    commit: str
    path: Path
    files: list[PulledFile]
    mended: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    unanswered: str | None = None

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


def split_revision(repository: str) -> tuple[str, str | None]:
    """NAMESPACE/NAME[@REVISION] -> (id, revision)."""
    repo, _, revision = repository.partition("@")
    return repo, revision or None


def find_revision(wanted: str, names: Iterable[str]) -> str | None:
    """The branch or tag among `names` that is meant: `wanted` itself, else for step-40 and 40 the tag step-000040."""
    known = set(names)
    if wanted in known:
        return wanted
    number = _STEP.fullmatch(wanted)
    tag = tag_name(int(number[1])) if number else None
    return tag if tag in known else None


def fetch(repository: str, output_dir: Path | None = None, *, hub: Hub = CLIENT, but: Sequence[str] = ()) -> Pulled:
    """Fetches NAMESPACE/NAME[@REVISION] into the cache, or into `output_dir`.

    REVISION is a branch, a tag, a commit, or a step: step-40, or 40 unless a branch or tag has that name; main without
    one. but: patterns of files that stay there. What is whole already is not fetched again. Where the Hub does not
    answer, a copy in the cache is checked against the names of its own blobs.

    Raises ZooError when there is no such repository or revision, the Hub does not answer and the cache does not have
    it, or a file comes twice with other content than the Hub says of it.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repo, revision = split_revision(repository)
    if output_dir is not None and output_dir.exists() and not output_dir.is_dir():
        raise ZooError(f"{output_dir} is a file, so nothing can be fetched into it: give another --output_dir.")
    what, mend = f"{repository} cannot be fetched from {hub.name}", f"try again, or check {hub.flag}."
    try:
        with refusals_as(what, mend):
            name, commit = _resolve(hub, repo, revision)
            whole = _tree(hub, repo, commit)
    except ZooError as error:
        cause = error.__cause__
        if isinstance(cause, RevisionNotFoundError):
            raise ZooError(f"{repo} has no revision {revision!r}{_known_revisions(hub, repo, revision)}") from cause
        if isinstance(cause, GatedRepoError):
            raise ZooError(
                f"{repo} on {hub.name} is gated: accept its terms at {hub.address}/{repo}, and set {hub.token_from}."
            ) from cause
        if isinstance(cause, RepositoryNotFoundError):
            raise ZooError(f"There is no repository {repo!r} on {hub.name} that this token may read.") from cause
        if isinstance(cause, HFValidationError):
            raise ZooError(f"{repository!r} is no repository: write NAMESPACE/NAME or NAMESPACE/NAME@TAG.") from cause
        if status_of(cause) == 401:
            raise ZooError(
                f"{hub.address} does not accept the token for {repository}: set HF_TOKEN, or RLHF_ZOO_HUB_TOKEN "
                "for a Hub that --hub names."
            ) from cause
        if cause is None or not is_silence(cause):
            raise
        if output_dir is None and (cached := _from_cache(repo, revision, hub, but, reason(cause))):
            return cached
        raise ZooError(
            f"{repository} is not in the cache, and {hub.name} does not give it ({reason(cause)}): "
            f"check the network, {hub.flag} and the token."
        ) from cause
    files = [file for file in whole if not any(fnmatchcase(file.path, pattern) for pattern in but)]
    place = Cache(repo, commit, hub) if output_dir is None else Folder(repo, commit, output_dir, hub)
    if isinstance(place, Folder):
        place.check(files)
    with refusals_as(what, "the same command goes on where it stopped."):
        place.begin(files)
        done, mended = _fetch_all(files, place, name)
        path = place.settle(files, name, whole=whole)
    left = [file.path for file in whole if file not in files]
    return Pulled(repo, name, commit, path, done, mended, place.others(files), left)


# What the Hub says


def _resolve(hub: Hub, repo: str, revision: str | None) -> tuple[str, str]:
    """(branch, tag or commit that is meant, commit). The client's errors pass."""
    from ..server.faults import Fault
    from ..server.names import check_ref

    name = revision or "main"
    if not _COMMIT.fullmatch(name):
        try:
            check_ref(name, what="revision")  # it becomes a file's name in the cache, and a card may have named it
        except Fault as fault:
            raise ZooError(f"{repo} has no revision {name!r:.80}: {fault}") from fault
        refs = hub.api().list_repo_refs(repo)
        name = find_revision(name, [ref.name for ref in (*refs.branches, *refs.tags)]) or name
    commit = hub.api().model_info(repo, revision=name).sha
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise ZooError(f"{hub.name} names no commit for {repo}@{name} but {commit!r:.80}: check {hub.flag}.")
    return name, commit


def _tree(hub: Hub, repo: str, commit: str) -> list[Wanted]:
    """Raises ZooError for a file that has a name, a size or a digest of which something else than a file would come."""
    from ..server.faults import Fault
    from ..server.names import check_path

    files = []
    for entry in hub.api().list_repo_tree(repo, recursive=True, revision=commit):
        if not hasattr(entry, "blob_id"):
            continue
        try:
            path = check_path(entry.path)
        except Fault as fault:
            raise ZooError(f"{repo} has a file {entry.path!r:.160} that nobody could fetch: {fault}") from fault
        if not path.isprintable() or path.partition("/")[0].casefold() == PARTIAL:
            raise ZooError(f"{repo} has a file {path!r:.160}, whose name leads out of a folder: fetch it by hand.")
        etag = entry.lfs.sha256 if entry.lfs else entry.blob_id
        if not isinstance(etag, str) or not _DIGEST.fullmatch(etag) or type(entry.size) is not int or entry.size < 0:
            raise ZooError(
                f"{hub.name} says of {path} in {repo} that it has {entry.size!r:.40} bytes and the digest "
                f"{etag!r:.80}: check {hub.flag}."
            )
        files.append(Wanted(path, entry.size, etag, str(entry.blob_id)))
    return files


def _known_revisions(hub: Hub, repo: str, revision: str | None) -> str:
    """A sentence's tail: the nearest step where a step was meant, else the tag that is nearest, else all of them."""
    from ...plugins import did_you_mean

    tags = [ref.name for ref in hub.api().list_repo_refs(repo).tags]
    wanted = _STEP.fullmatch(revision or "")
    steps = [int(tag[5:]) for tag in tags if tag.startswith("step-") and tag[5:].isdecimal()]
    if wanted and steps:
        nearest = min(steps, key=lambda step: abs(step - int(wanted[1])))
        return f", did you mean {tag_name(nearest)!r}?"
    return did_you_mean(revision or "", tags) or f": it has {', '.join(tags) or 'no tags'}."


# From the cache alone


def _from_cache(repo: str, revision: str | None, hub: Hub, but: Sequence[str], why: str) -> Pulled | None:
    """What the cache has of a revision, checked against the blobs' names, which are the etags; None if it has not all.

    Raises ZooError for a file that is damaged.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError

    number = _STEP.fullmatch(revision or "")
    for name in filter(None, [revision or "main", number and tag_name(int(number[1]))]):
        try:
            folder = replace(hub, offline=True).snapshot(repo, revision=name, ignore_patterns=[*but])
        except LocalEntryNotFoundError:
            continue
        done = []
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            etag = Path(os.readlink(path)).name if path.is_symlink() else ""
            file = Wanted(path.relative_to(folder).as_posix(), path.stat().st_size, etag)
            digest = sha256_of(path, file)
            if digest is None:
                raise ZooError(
                    f"{file.path} of {repo}@{name} is damaged in the cache, and {hub.name} does not answer "
                    f"({why}): try again when it does."
                )
            done.append(PulledFile(file.path, file.size, digest))
        return Pulled(repo, name, folder.name, folder, done, unanswered=why)
    return None


# Fetching


class _Stopped(Exception):
    """Another file failed, or the user pressed Ctrl-C."""


class _Progress:
    """A bar on stderr, of bytes and files; only on a terminal. Stops the threads that report to it."""

    def __init__(self, title: str, files: list[Wanted]) -> None:
        from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

        self.stop = threading.Event()
        self._lock = threading.Lock()
        self._done, self._files = 0, len(files)
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
        if self.stop.is_set():
            raise _Stopped

    def pause(self, seconds: float) -> None:
        self.stop.wait(seconds)
        self.check()

    def update(self, size: int) -> None:
        self.check()
        with self._lock:
            self._bar.update(size)

    def file_done(self) -> None:
        self.check()
        with self._lock:
            self._done += 1
            self._bar.set_postfix_str(f"{self._done}/{self._files} files")

    def close(self) -> None:
        self._bar.close()


def _fetch_all(files: list[Wanted], place: Cache | Folder, name: str) -> tuple[list[PulledFile], list[str]]:
    """(the files in their order, paths of those that replaced other content)."""
    progress = _Progress(f"{place.repo}@{name}", files)
    pending: SimpleQueue[Wanted] = SimpleQueue()
    for file in files:
        pending.put(file)
    done: dict[str, tuple[PulledFile, bool]] = {}
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                file = pending.get_nowait()
                done[file.path] = _fetch_one(file, place, progress)
        except (Empty, _Stopped):
            return
        except BaseException as error:
            failures.append(error)
            progress.stop.set()

    # Daemons, so that Ctrl-C need not wait for a connection that hangs.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(WORKERS)]
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
    return [done[file.path][0] for file in files], [file.path for file in files if done[file.path][1]]


def _fetch_one(file: Wanted, place: Cache | Folder, progress: _Progress) -> tuple[PulledFile, bool]:
    """The file in its place, and whether it replaced other content."""
    from huggingface_hub import constants, hf_hub_url

    progress.check()
    target, partial = place.target(file), place.partial(file)
    replaced = os.path.lexists(target)
    digest = sha256_of(target, file)
    if digest is not None:
        progress.update(file.size)
        progress.file_done()
        return PulledFile(file.path, file.size, digest), False
    if file.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
        raise ZooError(f"{file.path} of {place.repo} has {file.size} bytes: `hf download` fetches files of that size.")
    target.parent.mkdir(parents=True, exist_ok=True)
    url = hf_hub_url(place.repo, file.path, revision=place.commit, endpoint=place.hub.endpoint)
    with _open_locked(partial, progress.pause) as sink:
        if (digest := sha256_of(target, file)) is not None:  # another process was faster
            progress.update(file.size)
            partial.unlink()
        elif (copy := place.copy(file)) is not None and sha256_of(copy, file) is not None:
            shutil.copyfile(copy, partial)
        for _ in range(0 if digest else 2):
            _fill(sink, file, url, place.hub, progress)
            if (digest := sha256_of(partial, file)) is not None:
                os.replace(partial, target)
                break
            progress.update(-file.size)
            sink.truncate(0)
        if digest is None:
            partial.unlink()
            raise ZooError(
                f"{file.path} of {place.repo} at commit {place.commit} came twice with other content than "
                f"{place.hub.name} says of it ({file.etag}): nothing of it was kept, so try again later or check "
                f"{place.hub.flag}."
            )
    progress.file_done()
    return PulledFile(file.path, file.size, digest), replaced


def _open_locked(path: Path, pause: Callable[[float], None]) -> IO[bytes]:
    """The file at `path`, opened to append, for one process at a time. Waiting ends with whatever `pause` raises."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError, BlockingIOError):  # another process cleared the folder, or has it
            file = path.open("ab")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _stands_at(path, file):  # who held it before may have moved it to its place
                    return file
            except BaseException:
                file.close()
                raise
            file.close()
        pause(0.1)


def _stands_at(path: Path, file: IO[bytes]) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _fill(sink: IO[bytes], file: Wanted, url: str, hub: Hub, progress: _Progress) -> None:
    """Appends to `sink` what it lacks of the file."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    if os.fstat(sink.fileno()).st_size > file.size:
        sink.truncate(0)
    have = os.fstat(sink.fileno()).st_size
    progress.update(have)
    fruitless = 0
    while have < file.size:
        before = have
        try:
            _append(sink, file, url, hub, progress)
        except HfHubHTTPError:
            raise
        except HTTPError:
            if fruitless == FRUITLESS:
                raise
            progress.pause(2**fruitless)
        have = os.fstat(sink.fileno()).st_size
        fruitless = 0 if have > before else fruitless + 1
        if fruitless > FRUITLESS:
            return  # an answer without what was asked for; the digest will not be right


def _append(sink: IO[bytes], file: Wanted, url: str, hub: Hub, progress: _Progress) -> None:
    """One request for what lies behind the end of `sink`; at most a chunk more than is due."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff  # type: ignore[attr-defined]

    have = os.fstat(sink.fileno()).st_size
    headers = build_hf_headers(token=hub.token) | {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    options: dict[str, Any] = {"headers": headers, "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT}
    # It would also take what is raised while the answer is read for a failure to connect, and ask again by itself.
    with http_stream_backoff("GET", url, retry_on_exceptions=(), **options) as response:
        hf_raise_for_status(response)
        if have and response.status_code != 206:  # from the beginning, against what was asked
            sink.truncate(0)
            progress.update(-have)
            have = 0
        for chunk in response.iter_bytes(CHUNK):
            sink.write(chunk)
            sink.flush()
            have += len(chunk)
            progress.update(len(chunk))
            if have > file.size:
                break
