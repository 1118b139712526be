"""Stores a repository's large files by sha256, in git-lfs's own layout, without holding them in memory."""

import hashlib
import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...fileio import sync_folder
from .durable import link_file, mark_in_use
from .faults import Damaged, bad_request

_POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\n(?:ext-[^\n]*\n)*oid sha256:([0-9a-f]{64})\nsize (\d{1,18})\n"
)
# Bytes between two syncs to the disk. A single sync at the end could take longer than the client waits.
_SYNC_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Pointer:
    """The small file that git stores in place of a large file.

    Args:
        oid: The sha256 of the large file.
        size: Bytes of the large file.
    """

    oid: str
    size: int

    def content(self) -> bytes:
        """Returns the pointer file (git-lfs specification, version 1)."""
        return f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.oid}\nsize {self.size}\n".encode()


def parse_pointer(content: bytes) -> Pointer | None:
    """Parses a blob as a pointer. Returns None for ordinary content.

    Args:
        content: The content of a blob.
    """
    # The specification limits pointers to less than 1024 bytes.
    match = _POINTER.fullmatch(content) if len(content) < 1024 else None
    return Pointer(match[1].decode(), int(match[2])) if match else None


class LargeFiles:
    """The store `REPO.git/lfs`. Files in `objects/ab/cd/OID` are complete; files in `incomplete/` are not."""

    def __init__(self, repository: Path) -> None:
        self.folder = repository / "lfs"

    def path(self, oid: str) -> Path:
        """Returns the path for a file with this sha256, whether or not the file exists.

        Args:
            oid: The file's sha256.
        """
        return self.folder / "objects" / oid[:2] / oid[2:4] / oid

    def size(self, oid: str) -> int | None:
        """Returns the size of a file in bytes; None if it is not stored.

        Args:
            oid: The file's sha256.
        """
        try:
            return self.path(oid).stat().st_size
        except FileNotFoundError:
            return None

    def checked_path(self, pointer: Pointer, path: str) -> Path:
        """Returns the path of a large file, after a check of its size.

        Args:
            pointer: The file's pointer.
            path: The file's path in the repository, for messages.

        Raises:
            Damaged: The file is lost or has another size.
        """
        # `receive` verified the sha256. Hashing gigabytes again for each read would take too long.
        size = self.size(pointer.oid)
        if size != pointer.size:
            state = "lost" if size is None else f"truncated: {size} of {pointer.size} bytes"
            reason = f"the content of '{path}' is {state}; push the file again to restore it"
            raise Damaged(self.folder.parent, reason)
        return self.path(pointer.oid)

    def receive(self, oid: str, size: int, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
        """Stores a file as it arrives.

        Args:
            oid: The announced sha256.
            size: The announced size in bytes.
            pieces: The content, in pieces of any size.

        Raises:
            Fault: 400 if the content does not have the announced size and sha256.
            FileNotFoundError: The repository was deleted meanwhile.
        """
        folder = self.folder / "incomplete"
        folder.mkdir(exist_ok=True)  # without parents: they must not reappear if the repository was deleted
        part_file = folder / f"{oid}.{secrets.token_hex(8)}"
        digest = hashlib.sha256()
        received_bytes = unsynced_bytes = 0
        try:
            with open(part_file, "xb", buffering=0) as file, mark_in_use(part_file):
                for piece in pieces:
                    received_bytes += len(piece)
                    unsynced_bytes += len(piece)
                    if received_bytes > size:
                        raise bad_request(f"More than the announced {size} bytes arrived.")
                    digest.update(piece)
                    write_all(file.fileno(), piece)
                    if unsynced_bytes >= _SYNC_BYTES:
                        os.fdatasync(file.fileno())
                        unsynced_bytes = 0
                os.fsync(file.fileno())
            if received_bytes != size or digest.hexdigest() != oid:
                raise bad_request(
                    f"LFS object {oid} arrived damaged ({received_bytes} of {size} bytes, sha256 "
                    f"{digest.hexdigest()}); upload it again."
                )
            self._place(part_file, self.path(oid))
        finally:
            part_file.unlink(missing_ok=True)

    def copy_from(self, other: "LargeFiles", oid: str) -> None:
        """Stores a file that another repository has, as a hard link if possible.

        Args:
            other: The other repository's store.
            oid: The file's sha256.

        Raises:
            FileNotFoundError: The other repository does not have the file.
        """
        part_file = self.folder / "incomplete" / f"{oid}.{secrets.token_hex(8)}"
        try:
            link_file(other.path(oid), part_file)
            self._place(part_file, self.path(oid))
        finally:
            part_file.unlink(missing_ok=True)

    @staticmethod
    def _place(part_file: Path, target: Path) -> None:
        # The file's content has been synced. Now sync its name, and the name of each new folder.
        new_folders = [folder for folder in (target.parent.parent, target.parent) if not folder.exists()]
        for folder in new_folders:
            folder.mkdir(exist_ok=True)
        os.replace(part_file, target)
        for folder in (target.parent, *(folder.parent for folder in new_folders)):
            sync_folder(folder)


def write_all(fd: int, content: bytes | bytearray | memoryview) -> None:
    """Writes all of the content to a file descriptor. A single os.write may write only a part.

    Args:
        fd: The file descriptor.
        content: The content.
    """
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
