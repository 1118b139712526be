"""What Xet uploads need on the disk until their files stand in `LargeFiles`.

REPO.git/xet/EPOCH/xorbs/XORB     a xorb as it arrived
                  /chunks/XORB    for each of its chunks: its hash, and where in the xorb it lies
                  /incomplete/    uploads under way

An epoch is part of the store's address, by which hf-xet remembers for three weeks what it need not send again. So an
epoch takes new uploads for an hour and keeps all its xorbs meanwhile. Once nothing has arrived in it for two hours it
is removed: its files stand among the big files by then.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import struct
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from .durable import locked, sync_folder, write_bytes
from .faults import Fault, bad_request
from .large_files import LargeFiles, write_all
from .xet_format import Chunk, Segment, ShardFile, XorbParser, parse_shard, range_hash, unpack

__all__ = ["XetStore", "current_epoch", "sweep"]

_CURRENT_SECONDS = 3600
_IDLE_SECONDS = 2 * 3600
#: A Chunk.
_RECORD = struct.Struct("<32sQIIB3x")


def current_epoch(repository: Path) -> str:
    """The epoch for new uploads; sweeps as it goes. FileNotFoundError where the repository has gone."""
    base = repository / "xet"
    base.mkdir(exist_ok=True)
    with locked(base / "lock"):
        _sweep(base)
        for folder in _epochs(base):
            if folder.stat().st_mtime > time.time() - _CURRENT_SECONDS:
                return folder.name
        epoch = base / uuid.uuid4().hex
        for name in ("xorbs", "chunks", "incomplete"):
            (epoch / name).mkdir(parents=True)
        return epoch.name


def sweep(repository: Path) -> None:
    """Remove the epochs in which nothing is under way any more."""
    base = repository / "xet"
    with locked(base / "lock"):
        _sweep(base)


def _sweep(base: Path) -> None:
    limit = time.time() - _IDLE_SECONDS
    for folder in _epochs(base):
        xorbs = folder / "xorbs"
        if folder.stat().st_mtime < limit and (not xorbs.is_dir() or xorbs.stat().st_mtime < limit):
            shutil.rmtree(folder, ignore_errors=True)


def _epochs(base: Path) -> list[Path]:
    return [folder for folder in base.iterdir() if folder.is_dir()]


class XetStore:
    """One epoch of one repository; Fault 404 where there is no such epoch."""

    def __init__(self, repository: Path, epoch: str) -> None:
        self._base = repository / "xet"
        self._folder = self._base / epoch
        if not re.fullmatch(r"[0-9a-f]{32}", epoch) or not self._folder.is_dir():
            raise Fault(404, "This upload was begun too long ago; start it again.")
        self._large = LargeFiles(repository)

    def receive(self, xorb: str, pieces: Iterable[memoryview]) -> bool:
        """Store a xorb as it streams in, checked; False where it was stored already."""
        chunks = self._folder / "chunks" / xorb
        if chunks.exists():
            for _ in pieces:
                pass
            return False
        incomplete = self._folder / "incomplete" / f"{xorb}.{secrets.token_hex(8)}"
        parser = XorbParser()
        try:
            with open(incomplete, "xb", buffering=0) as file:
                for piece in pieces:
                    parser.feed(piece)
                    write_all(file.fileno(), piece)
                records = b"".join(_RECORD.pack(*chunk) for chunk in parser.finish(xorb))
                os.fsync(file.fileno())
            with locked(self._base / "lock"):
                if chunks.exists():
                    return False
                os.replace(incomplete, self._folder / "xorbs" / xorb)
                sync_folder(self._folder / "xorbs")
                write_bytes(chunks, records, scratch=incomplete.parent)
            return True
        finally:
            incomplete.unlink(missing_ok=True)

    def register(self, shard: bytes, *, require_room: Callable[[int], None]) -> None:
        """Rebuild the files of a shard, check each against its sha256, and store it among the big files.

        Nothing happens before the whole shard was read once. require_room is asked with the bytes of each new file.
        """
        for _ in parse_shard(shard):
            pass
        for file in parse_shard(shard):
            if self._large.size(file.sha256) != file.size:
                require_room(file.size)
            self._large.receive(file.sha256, file.size, self._contents(file))

    def _contents(self, file: ShardFile) -> Iterator[bytes | bytearray]:
        """The chunks of a file, unpacked."""
        for segment in file.segments:
            chunks = self._chunks(segment)
            with open(self._folder / "xorbs" / segment.xorb, "rb", buffering=0) as xorb:
                for chunk in chunks:
                    stored = os.pread(xorb.fileno(), chunk.stored, chunk.offset)
                    if len(stored) != chunk.stored:
                        raise self._lost(segment.xorb)
                    yield unpack(chunk.scheme, stored, chunk.length)

    def _chunks(self, segment: Segment) -> list[Chunk]:
        """The chunks of a segment; Fault 400 where what the segment says of them is wrong."""
        try:
            with open(self._folder / "chunks" / segment.xorb, "rb", buffering=0) as file:
                count = os.fstat(file.fileno()).st_size // _RECORD.size
                if not 0 <= segment.start < segment.end <= count:
                    raise bad_request(
                        f"The shard names chunks {segment.start} to {segment.end} of the xorb {segment.xorb}, "
                        f"which has {count}."
                    )
                size = (segment.end - segment.start) * _RECORD.size
                records = os.pread(file.fileno(), size, segment.start * _RECORD.size)
        except FileNotFoundError:
            raise self._lost(segment.xorb) from None
        chunks = [Chunk(*record) for record in _RECORD.iter_unpack(records)]
        if sum(chunk.length for chunk in chunks) != segment.length:
            raise bad_request(f"The shard is wrong about the lengths of chunks of the xorb {segment.xorb}.")
        if range_hash([chunk.name for chunk in chunks]) != segment.proof:
            raise bad_request(f"The shard is wrong about the hashes of chunks of the xorb {segment.xorb}.")
        return chunks

    def _lost(self, xorb: str) -> Fault:
        """A client refers to what this store does not have: let the next attempt go to a new epoch."""
        os.utime(self._folder, (0, 0))
        return bad_request(
            f"The shard refers to chunks of the xorb {xorb} that are not stored; start the upload again."
        )
