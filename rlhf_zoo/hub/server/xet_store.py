"""Stores Xet uploads on the disk until their files are in `LargeFiles`.

REPO.git/xet/EPOCH/xorbs/XORB     a xorb as it arrived
                  /incomplete/    uploads in progress

For three weeks, hf-xet remembers which chunks it has sent to a store's address, and does not send them again. Each
address contains an epoch, so that xorbs can be removed without breaking a later upload. An epoch accepts new uploads
for an hour. It is removed when nothing has arrived for two hours. By then, its files are ordinary large files.
"""

import os
import re
import secrets
import shutil
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ...fileio import sync_folder
from .durable import is_in_use, locked, mark_in_use
from .faults import Fault, bad_request
from .large_files import LargeFiles, write_all
from .xet_format import ShardFile, find_chunk_offsets, parse_shard, read_chunk

_CURRENT_SECONDS = 3600
_IDLE_SECONDS = 2 * 3600


def current_epoch(repository: Path, now: float) -> str:
    """Returns the name of the epoch for new uploads, created if necessary. Removes idle epochs.

    Args:
        repository: The repository's folder.
        now: The time by the storage's clock.

    Raises:
        FileNotFoundError: The repository was deleted.
    """
    xet_folder = repository / "xet"
    xet_folder.mkdir(exist_ok=True)
    with locked(xet_folder / "lock"):
        _sweep(xet_folder, now)
        for folder in _list_epochs(xet_folder):
            if folder.stat().st_mtime > now - _CURRENT_SECONDS:
                return folder.name
        epoch = xet_folder / uuid.uuid4().hex
        for name in ("xorbs", "incomplete"):
            (epoch / name).mkdir(parents=True)
        return epoch.name


def sweep(repository: Path, now: float) -> None:
    """Removes idle epochs.

    Args:
        repository: The repository's folder.
        now: The time by the storage's clock.
    """
    xet_folder = repository / "xet"
    with locked(xet_folder / "lock"):
        _sweep(xet_folder, now)


def _sweep(xet_folder: Path, now: float) -> None:
    cutoff = now - _IDLE_SECONDS
    for folder in _list_epochs(xet_folder):
        # A folder's mtime is the time at which a file was last added to or removed from it.
        xorbs = folder / "xorbs"
        is_idle = folder.stat().st_mtime < cutoff and (not xorbs.is_dir() or xorbs.stat().st_mtime < cutoff)
        if is_idle and not is_in_use(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _list_epochs(xet_folder: Path) -> list[Path]:
    return [folder for folder in xet_folder.iterdir() if folder.is_dir()]


class XetStore:
    """An epoch of a repository.

    Args:
        repository: The repository's folder.
        epoch: Name of the epoch, from the address of the request.

    Raises:
        Fault: 404 if there is no such epoch.
    """

    def __init__(self, repository: Path, epoch: str) -> None:
        self._folder = repository / "xet" / epoch
        if not re.fullmatch(r"[0-9a-f]{32}", epoch) or not self._folder.is_dir():
            raise Fault(404, "This upload began too long ago; start it again.")
        self._large_files = LargeFiles(repository)

    def receive(self, xorb: str, pieces: Iterable[memoryview]) -> bool:
        """Stores a xorb as it arrives.

        Args:
            xorb: The hash of the xorb.
            pieces: The content.

        Returns:
            False if the xorb was already stored.

        Raises:
            Fault: 400 if the xorb is empty.
        """
        target = self._folder / "xorbs" / xorb
        if target.exists():
            return False
        part_file = self._folder / "incomplete" / f"{xorb}.{secrets.token_hex(8)}"
        try:
            with open(part_file, "xb", buffering=0) as file, mark_in_use(self._folder), mark_in_use(part_file):
                for piece in pieces:
                    write_all(file.fileno(), piece)
                if not file.tell():
                    raise bad_request("The xorb is empty.")
                os.fsync(file.fileno())
            os.replace(part_file, target)
            sync_folder(target.parent)
        finally:
            part_file.unlink(missing_ok=True)
        return True

    def rebuild_files(self, shard: bytes, *, require_room: Callable[[int], None]) -> None:
        """Rebuilds the files of a shard, checks each against its sha256, and stores them as large files.

        Args:
            shard: The shard.
            require_room: Called with the size of each new file in bytes. Raises Fault if there is not enough room.

        Raises:
            Fault: 400 if the shard is damaged, a xorb is missing, or a file does not have its sha256.
        """
        # Read all of the shard first, so that nothing from a damaged shard is stored.
        for _ in parse_shard(shard):
            pass
        with mark_in_use(self._folder):
            self._store_files(shard, require_room)

    def _store_files(self, shard: bytes, require_room: Callable[[int], None]) -> None:
        try:
            for file in parse_shard(shard):
                if self._large_files.size(file.sha256) != file.size:
                    require_room(file.size)
                self._large_files.receive(file.sha256, file.size, self._read_content(file))
        except Fault as fault:
            # The client relies on xorbs that are not stored here. An epoch that looks old gets no new uploads, so the
            # client's next attempt sends everything to a new epoch.
            if fault.status == 400:
                os.utime(self._folder, (0, 0))
            raise

    def _read_content(self, file: ShardFile) -> Iterator[bytes | bytearray]:
        offsets_by_xorb: dict[str, array[int]] = {}
        for segment in file.segments():
            path = self._folder / "xorbs" / segment.xorb
            if not path.exists():
                raise bad_request(f"The xorb {segment.xorb} of the shard is not stored; start the upload again.")
            with open(path, "rb") as xorb:
                if segment.xorb not in offsets_by_xorb:
                    offsets_by_xorb[segment.xorb] = find_chunk_offsets(xorb)
                offsets = offsets_by_xorb[segment.xorb]
                if not segment.start < segment.end <= len(offsets):
                    raise bad_request(f"The xorb {segment.xorb} does not have the chunks that the shard names.")
                for offset in offsets[segment.start : segment.end]:
                    yield read_chunk(xorb, offset)
