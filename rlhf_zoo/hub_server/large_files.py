"""Big files of one repository, kept by sha256 in git-lfs's own layout and never held in memory."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .durable import sync_folder
from .faults import Damaged, Fault, bad_request

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = ["LargeFiles", "PartialUploads", "Pointer", "parse_pointer", "write_all"]

_POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\n(?:ext-[^\n]*\n)*oid sha256:([0-9a-f]{64})\nsize (\d{1,18})\n"
)
# Written data are pushed to the disk as they arrive, so that the last fsync stays far below the client's time limit.
_SYNC_EVERY = 64 * 2**20
_BLOCK = 2**20
# Blocks that are received but not hashed yet; the pieces of a request's body stay valid for that long.
_BLOCKS_AHEAD = 2


@dataclass(frozen=True)
class Pointer:
    """What git stores in place of a big file. size: bytes of the file itself."""

    oid: str
    size: int

    def content(self) -> bytes:
        """The pointer file (git-lfs specification, version 1)."""
        return f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.oid}\nsize {self.size}\n".encode()


def parse_pointer(content: bytes) -> Pointer | None:
    """The pointer in a blob, or None for ordinary content."""
    match = _POINTER.fullmatch(content) if len(content) < 1024 else None
    return Pointer(match[1].decode(), int(match[2])) if match else None


class LargeFiles:
    """The store `REPO.git/lfs`: `objects/ab/cd/OID` is whole, `incomplete/` is not."""

    def __init__(self, repository: Path) -> None:
        self.folder = repository / "lfs"

    def path(self, oid: str) -> Path:
        """Where the file of that sha256 lies, or would lie."""
        return self.folder / "objects" / oid[:2] / oid[2:4] / oid

    def size(self, oid: str) -> int | None:
        """Its bytes; None when it was never uploaded."""
        try:
            return self.path(oid).stat().st_size
        except FileNotFoundError:
            return None

    def whole(self, pointer: Pointer, path: str) -> Path:
        """The file that stands at `path` of a commit; Damaged where it is lost, or has another size."""
        size = self.size(pointer.oid)
        if size != pointer.size:
            folder = self.folder.parent
            what = "lost" if size is None else f"cut: {size} of {pointer.size} bytes"
            raise Damaged(
                f"Repository '{folder.parent.name}/{folder.name.removesuffix('.git')}'",
                f"the content of '{path}' is {what}; another push of it mends that",
            )
        return self.path(pointer.oid)

    def receive(self, oid: str, size: int, chunks: Iterable[bytes | bytearray | memoryview]) -> None:
        """Store a file as it streams in; Fault 400 when it is not the file that was announced."""
        if self.size(oid) == size:  # another upload of the same file was quicker
            digest, written = hashlib.sha256(), 0
            for chunk in chunks:
                digest.update(chunk)
                written += len(chunk)
            _check(oid, size, written, digest.hexdigest())
            return
        incomplete = self.incomplete(oid)
        try:
            digest = hashlib.sha256()
            with open(incomplete, "xb", buffering=0) as file:
                _store(file.fileno(), 0, size, chunks, digest)
                os.fsync(file.fileno())
            self.accept(incomplete, oid, size, digest.hexdigest())
        finally:
            incomplete.unlink(missing_ok=True)

    def incomplete(self, oid: str) -> Path:
        """A fresh name for a file under way."""
        folder = self.folder / "incomplete"
        folder.mkdir(exist_ok=True)  # its own parents stay away: the repository may have been deleted meanwhile
        return folder / f"{oid}.{secrets.token_hex(8)}"

    def accept(self, incomplete: Path, oid: str, size: int, digest: str) -> None:
        """Move a finished upload to its place, once its length and its hash are right."""
        _check(oid, size, incomplete.stat().st_size, digest)
        target = self.path(oid)
        created = [folder for folder in (target.parent.parent, target.parent) if not folder.exists()]
        for folder in created:
            folder.mkdir(exist_ok=True)
        os.replace(incomplete, target)
        for folder in (target.parent, *(folder.parent for folder in created)):
            sync_folder(folder)


def _check(oid: str, size: int, written: int, digest: str) -> None:
    if written != size or digest != oid:
        raise bad_request(
            f"LFS object {oid} arrived damaged ({written} of {size} bytes, sha256 {digest}); upload it again."
        )


def write_all(fd: int, data: bytes | bytearray | memoryview, offset: int | None = None) -> None:
    """Write all of `data`, at `offset` or where the file stands."""
    view = memoryview(data)
    while view:
        count = os.write(fd, view) if offset is None else os.pwrite(fd, view, offset)
        view = view[count:]
        offset = None if offset is None else offset + count


def _store(
    fd: int, offset: int, size: int, chunks: Iterable[bytes | bytearray | memoryview], digest: _Hash | None
) -> int:
    """Write `size` bytes at `offset`, hash them, push them to the disk; Fault 400 for more. Returns how many came.

    Hashing and pushing run in threads beside the one that receives: each of the three takes about as long as another.
    """
    written = unsynced = 0
    with _Behind(_BLOCKS_AHEAD) as hashing, _Behind(1) as syncing:
        for block in _blocks(chunks):
            if written + len(block) > size:
                raise bad_request(f"More than the announced {size} bytes arrived.")
            if digest is not None and size > _BLOCK:
                hashing.call(digest.update, block)
            elif digest is not None:  # not worth a thread
                digest.update(block)
            write_all(fd, block, offset + written)
            written += len(block)
            unsynced += len(block)
            if unsynced >= _SYNC_EVERY:
                syncing.call(os.fdatasync, fd)
                unsynced = 0
    return written


def _blocks(chunks: Iterable[bytes | bytearray | memoryview]) -> Iterator[bytes | bytearray | memoryview]:
    """The same bytes in pieces of at least 1 MiB, but for the last one; large pieces pass as they are."""
    pending: list[bytes] = []
    size = 0
    for chunk in chunks:
        if not pending and len(chunk) >= _BLOCK:
            yield chunk
            continue
        pending.append(bytes(chunk))
        size += len(chunk)
        if size >= _BLOCK:
            yield b"".join(pending)
            pending, size = [], 0
    if pending:
        yield b"".join(pending)


class _Behind:
    """Calls in a thread of its own, one after the other; the caller waits when more than `ahead` are not done.

    What a call raises is raised by a later call, or at the end of the context, which waits for all of them.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._pool = ThreadPoolExecutor(1)
        self._pending: deque[Future[object]] = deque()

    def __enter__(self) -> _Behind:
        return self

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call it soon."""
        self._pending.append(self._pool.submit(function, *arguments))
        while len(self._pending) > self._ahead:
            self._pending.popleft().result()

    def __exit__(self, kind: object, *_: object) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        if kind is None:
            while self._pending:
                self._pending.popleft().result()


class PartialUploads:
    """Multipart uploads under way.

    Parts are written at their offset into one incomplete file. The hash runs along while parts come in order, as
    huggingface_hub sends them: reading a very large file again at the end would outlast the client's patience.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._hashes: dict[Path, tuple[int, _Hash]] = {}

    def receive(self, path: Path, offset: int, size: int, chunks: Iterable[bytes | memoryview]) -> None:
        """Store one part (offset and size in bytes)."""
        with self._mutex:
            done, whole = self._hashes.pop(path, (0, hashlib.sha256()))
        running = whole.copy() if done == offset else None
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            written = _store(fd, offset, size, chunks, running)
        finally:
            os.close(fd)
        if written != size:
            raise bad_request(f"A part arrived cut short ({written} of {size} bytes); upload it again.")
        if running is not None:
            with self._mutex:
                self._hashes[path] = (offset + size, running)

    def finish(self, store: LargeFiles, path: Path, oid: str, size: int) -> None:
        """Check the whole file and move it to its place; safe to ask twice."""
        with self._mutex:
            done, whole = self._hashes.pop(path, (0, hashlib.sha256()))
        try:
            with open(path, "rb", buffering=0) as file:
                if done != size:
                    whole = hashlib.sha256()
                    while block := file.read(_BLOCK):
                        whole.update(block)
                os.fsync(file.fileno())
            store.accept(path, oid, size, whole.hexdigest())
        except FileNotFoundError:
            if store.size(oid) != size:
                raise Fault(404, f"No upload of LFS object {oid} is under way; start it again.") from None
        finally:
            path.unlink(missing_ok=True)
