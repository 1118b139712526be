"""Big files of one repository, kept by sha256 in git-lfs's own layout and never held in memory."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_zoo.hub.server.durable import sync_folder
from rlhf_zoo.hub.server.faults import Fault, bad_request

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = ["LargeFiles", "PartialUploads", "Pointer", "parse_pointer"]

_POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\n(?:ext-[^\n]*\n)*oid sha256:([0-9a-f]{64})\nsize (\d{1,18})\n"
)
# Written data are pushed to the disk as they arrive, so that the last fsync stays far below the client's time limit.
_SYNC_EVERY = 64 * 2**20


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

    def receive(self, oid: str, size: int, chunks: Iterable[bytes | memoryview]) -> None:
        """Store a file as it streams in; Fault 400 when it is not the file that was announced."""
        if self.size(oid) == size:  # another upload of the same file was quicker
            for _ in chunks:
                pass
            return
        incomplete = self.incomplete(oid)
        try:
            digest, written = hashlib.sha256(), 0
            with open(incomplete, "xb", buffering=0) as file:
                unsynced = 0
                for chunk in chunks:
                    written += len(chunk)
                    if written > size:
                        raise bad_request(f"More than the announced {size} bytes arrived for LFS object {oid}.")
                    digest.update(chunk)
                    _write(file.fileno(), chunk)
                    unsynced += len(chunk)
                    if unsynced >= _SYNC_EVERY:
                        os.fdatasync(file.fileno())
                        unsynced = 0
                os.fsync(file.fileno())
            self.accept(incomplete, oid, size, digest.hexdigest())
        finally:
            incomplete.unlink(missing_ok=True)

    def incomplete(self, oid: str) -> Path:
        """A fresh name for a file under way."""
        folder = self.folder / "incomplete"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{oid}.{secrets.token_hex(8)}"

    def accept(self, incomplete: Path, oid: str, size: int, digest: str) -> None:
        """Move a finished upload to its place, once its length and its hash are right."""
        written = incomplete.stat().st_size
        if written != size or digest != oid:
            raise bad_request(
                f"LFS object {oid} arrived damaged ({written} of {size} bytes, sha256 {digest}); upload it again."
            )
        target = self.path(oid)
        created = [folder for folder in (target.parent, target.parent.parent) if not folder.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(incomplete, target)
        for folder in (target.parent, *(folder.parent for folder in created)):
            sync_folder(folder)


def _write(fd: int, data: bytes | memoryview, offset: int | None = None) -> None:
    view = memoryview(data)
    while view:
        count = os.write(fd, view) if offset is None else os.pwrite(fd, view, offset)
        view = view[count:]
        offset = None if offset is None else offset + count


class PartialUploads:
    """Multipart uploads under way.

    Parts are written at their offset into one incomplete file. The hash runs along while parts come in order, as
    huggingface_hub sends them: reading a very large file again at the end would outlast the client's patience.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._hashes: dict[Path, tuple[int, _Hash]] = {}

    def receive(self, path: Path, offset: int, size: int, chunks: Iterable[bytes | memoryview]) -> str:
        """Store one part (offset and size in bytes) and return its sha256."""
        with self._mutex:
            done, whole = self._hashes.pop(path, (0, hashlib.sha256()))
        running = whole.copy() if done == offset else None
        digest, written = hashlib.sha256(), 0
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            unsynced = 0
            for chunk in chunks:
                if written + len(chunk) > size:
                    raise bad_request(f"More than the announced {size} bytes arrived for a part.")
                _write(fd, chunk, offset + written)
                written += len(chunk)
                digest.update(chunk)
                if running is not None:
                    running.update(chunk)
                unsynced += len(chunk)
                if unsynced >= _SYNC_EVERY:
                    os.fdatasync(fd)
                    unsynced = 0
            if written != size:
                raise bad_request(f"A part arrived cut short ({written} of {size} bytes); upload it again.")
            os.fsync(fd)
        finally:
            os.close(fd)
        if running is not None:
            with self._mutex:
                self._hashes[path] = (offset + size, running)
        return digest.hexdigest()

    def finish(self, store: LargeFiles, path: Path, oid: str, size: int) -> None:
        """Check the whole file and move it to its place; safe to ask twice."""
        with self._mutex:
            done, whole = self._hashes.pop(path, (0, hashlib.sha256()))
        try:
            if done != size:
                whole = hashlib.sha256()
                with open(path, "rb", buffering=0) as file:
                    while chunk := file.read(2**20):
                        whole.update(chunk)
            store.accept(path, oid, size, whole.hexdigest())
        except FileNotFoundError:
            if store.size(oid) != size:
                raise Fault(404, f"No upload of LFS object {oid} is under way; start it again.") from None
        finally:
            path.unlink(missing_ok=True)
