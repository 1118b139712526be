"""Big files of one repository, kept by sha256 in git-lfs's own layout and never held in memory."""

import hashlib
import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...fileio import sync_folder
from .durable import in_use, link_file
from .faults import Damaged, bad_request

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

    def whole(self, pointer: Pointer, path: str) -> Path:
        """The file that stands at `path` of a commit; Damaged where it is lost, or has another size."""
        size = self.size(pointer.oid)
        if size != pointer.size:
            what = "lost" if size is None else f"cut: {size} of {pointer.size} bytes"
            reason = f"the content of '{path}' is {what}; another push of it mends that"
            raise Damaged(self.folder.parent, reason)
        return self.path(pointer.oid)

    def receive(self, oid: str, size: int, chunks: Iterable[bytes | bytearray | memoryview]) -> None:
        """Store a file as it streams in; Fault 400 when it is not the file that was announced."""
        folder = self.folder / "incomplete"
        folder.mkdir(exist_ok=True)  # its own parents stay away: the repository may have been deleted meanwhile
        incomplete = folder / f"{oid}.{secrets.token_hex(8)}"
        digest = hashlib.sha256()
        written = unsynced = 0
        try:
            with open(incomplete, "xb", buffering=0) as file, in_use(incomplete):
                for block in chunks:
                    written += len(block)
                    unsynced += len(block)
                    if written > size:
                        raise bad_request(f"More than the announced {size} bytes arrived.")
                    digest.update(block)
                    write_all(file.fileno(), block)
                    if unsynced >= _SYNC_EVERY:
                        os.fdatasync(file.fileno())
                        unsynced = 0
                os.fsync(file.fileno())
            if written != size or digest.hexdigest() != oid:
                raise bad_request(
                    f"LFS object {oid} arrived damaged ({written} of {size} bytes, sha256 {digest.hexdigest()}); "
                    "upload it again."
                )
            self._place(incomplete, self.path(oid))
        finally:
            incomplete.unlink(missing_ok=True)

    def adopt(self, other: "LargeFiles", oid: str) -> None:
        """Store a file that another repository has; FileNotFoundError where it has none."""
        incomplete = self.folder / "incomplete" / f"{oid}.{secrets.token_hex(8)}"
        try:
            link_file(other.path(oid), incomplete)
            self._place(incomplete, self.path(oid))
        finally:
            incomplete.unlink(missing_ok=True)

    @staticmethod
    def _place(incomplete: Path, target: Path) -> None:
        created = [folder for folder in (target.parent.parent, target.parent) if not folder.exists()]
        for folder in created:
            folder.mkdir(exist_ok=True)
        os.replace(incomplete, target)
        for folder in (target.parent, *(folder.parent for folder in created)):
            sync_folder(folder)


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
