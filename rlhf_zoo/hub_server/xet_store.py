"""What Xet uploads need on the disk until their files stand in `LargeFiles`, and what later uploads may refer to.

REPO.git/xet/current             the name of the current epoch
REPO.git/xet/EPOCH/xorbs/XORB    a xorb as it arrived, until every chunk of it stands in a big file
                  /index/XORB    for each of its chunks: hash, length, and where it lies now
                  /incomplete/   uploads under way

Nothing is stored twice for long: once a file is rebuilt, the index points into it and the xorb goes. The index, 0.13 %
of the size, stays: clients leave out chunks that they have sent before, and hf-xet remembers those for three weeks by
the address of the store. An epoch is part of that address. When xorbs are left over for a day, because an upload was
given up, a new epoch begins, of which no client remembers anything, and the old one is removed a day later.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from .durable import locked, sync_folder, write_bytes
from .faults import Fault, bad_request
from .large_files import LargeFiles, write_all
from .xet_format import (
    Segment,
    ShardFile,
    XorbParser,
    parse_shard,
    range_hash,
    unpack,
)

__all__ = ["XetStore", "current_epoch", "sweep"]

_STALE_SECONDS = 24 * 3600
# A _Place.
_RECORD = struct.Struct("<32s32sQIIB3x")
_IN_XORB = bytes(32)
_PLAIN = 0
# Chunks whose new place waits to be written down: a few megabytes of memory.
_MOVES_AT_ONCE = 20_000


class _Place(NamedTuple):
    """A chunk in the index: owner is the raw sha256 of a big file, or zeros for the xorb itself; the rest in bytes."""

    name: bytes
    owner: bytes
    offset: int
    stored: int
    length: int
    scheme: int


def current_epoch(repository: Path) -> str:
    """The epoch for new uploads; sweeps as it goes. FileNotFoundError where the repository has gone."""
    base = repository / "xet"
    base.mkdir(exist_ok=True)
    with locked(base / "lock"):
        name = _sweep(base)
        if name is None:
            name = uuid.uuid4().hex
            for folder in ("xorbs", "index", "incomplete"):
                (base / name / folder).mkdir(parents=True)
            sync_folder(base / name)
            sync_folder(base)
            write_bytes(base / "current", name.encode())
    return name


def sweep(repository: Path) -> None:
    """Begin a new epoch where uploads were given up a day ago, and remove what the epochs before it left."""
    base = repository / "xet"
    with locked(base / "lock"):
        _sweep(base)


def _sweep(base: Path) -> str | None:
    """The current epoch, None where there is none, or none any more."""
    limit = time.time() - _STALE_SECONDS
    current = _read_current(base)
    if current is not None and not (base / current / "xorbs").is_dir():  # somebody tidied up by hand
        current = None
    stale = [] if current is None else [p for p in (base / current / "xorbs").iterdir() if _is_older(p, limit)]
    needed = [path for path in stale if _is_needed(path)]
    for path in stale:
        if path not in needed:  # the server ended before it could remove it
            path.unlink(missing_ok=True)
    if needed and current is not None:
        _retire(base, current)
        current = None
    for folder in base.iterdir():
        if folder.is_dir() and folder.name != current and _is_older(folder, limit):
            shutil.rmtree(folder, ignore_errors=True)
    return current


def _is_older(path: Path, limit: float) -> bool:
    try:
        return path.stat().st_mtime < limit
    except FileNotFoundError:  # just removed, see `_remove`
        return False


def _is_needed(xorb: Path) -> bool:
    """True where the index still points into the xorb."""
    try:
        index = (xorb.parent.parent / "index" / xorb.name).read_bytes()
    except FileNotFoundError:  # the server ended while it stored the xorb; nobody was told that it is there
        return False
    return any(_Place(*record).owner == _IN_XORB for record in _RECORD.iter_unpack(index))


def _remove(files: list[Path]) -> None:
    for path in files:
        path.unlink(missing_ok=True)


def _read_current(base: Path) -> str | None:
    try:
        return (base / "current").read_text()
    except FileNotFoundError:
        return None


def _retire(base: Path, epoch: str) -> None:
    (base / "current").unlink()
    sync_folder(base)
    os.utime(base / epoch)  # a day from now it may go: uploads under way can still end


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
        if self._index(xorb).exists():
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
                chunks = parser.finish(xorb)
                os.fsync(file.fileno())
            index = b"".join(
                _RECORD.pack(chunk.name, _IN_XORB, chunk.offset, chunk.stored, chunk.length, chunk.scheme)
                for chunk in chunks
            )
            with locked(self._base / "lock"):
                if self._index(xorb).exists():
                    return False
                target = self._data(xorb)
                os.replace(incomplete, target)
                sync_folder(target.parent)
                write_bytes(self._index(xorb), index, scratch=incomplete.parent)
            return True
        finally:
            incomplete.unlink(missing_ok=True)

    def register(self, shard: bytes, *, require_room: Callable[[int], None]) -> None:
        """Rebuild the files of a shard, check each against its sha256, and store it among the big files.

        Nothing happens before the whole shard was read once. require_room is asked with the bytes of each new file.
        """
        for _ in parse_shard(shard):
            pass
        moves: list[tuple[Segment, bytes, int]] = []
        waiting = 0
        for file in parse_shard(shard):
            if self._large.size(file.sha256) != file.size:
                require_room(file.size)
            self._large.receive(file.sha256, file.size, self._contents(file))
            offset = 0
            for segment in file.segments:
                moves.append((segment, bytes.fromhex(file.sha256), offset))
                offset += segment.length
                waiting += segment.end - segment.start
            if waiting > _MOVES_AT_ONCE:
                self._move(moves)
                moves, waiting = [], 0
        self._move(moves)

    def _contents(self, file: ShardFile) -> Iterator[bytes | bytearray]:
        """The chunks of a file, unpacked."""
        for segment in file.segments:
            owner, fd = None, -1
            try:
                for number, place in enumerate(self._places(segment), segment.start):
                    if place.owner != owner:
                        if fd >= 0:
                            os.close(fd)
                            fd = -1
                        fd, place = self._open(segment.xorb, number, place)
                        owner = place.owner
                    stored = os.pread(fd, place.stored, place.offset)
                    if len(stored) != place.stored:
                        raise self._lost(segment.xorb)
                    yield unpack(place.scheme, stored, place.length)
            finally:
                if fd >= 0:
                    os.close(fd)

    def _places(self, segment: Segment) -> list[_Place]:
        """Where the chunks of a segment lie; Fault 400 where the segment's claims about them are wrong."""
        places = self._read(segment.xorb, segment.start, segment.end)
        if sum(place.length for place in places) != segment.length or not places:
            raise bad_request(f"The shard is wrong about the lengths of chunks of the xorb {segment.xorb}.")
        if range_hash([place.name for place in places]) != segment.proof:
            raise bad_request(f"The shard is wrong about the hashes of chunks of the xorb {segment.xorb}.")
        return places

    def _read(self, xorb: str, start: int, end: int) -> list[_Place]:
        try:
            fd = os.open(self._index(xorb), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise self._lost(xorb) from None
        try:
            chunks = os.fstat(fd).st_size // _RECORD.size
            if not 0 <= start < end <= chunks:
                raise bad_request(f"The shard names chunks {start} to {end} of the xorb {xorb}, which has {chunks}.")
            data = os.pread(fd, (end - start) * _RECORD.size, start * _RECORD.size)
        finally:
            os.close(fd)
        return [_Place(*record) for record in _RECORD.iter_unpack(data)]

    def _open(self, xorb: str, number: int, place: _Place) -> tuple[int, _Place]:
        """A descriptor of what holds a chunk; the place is read again where the xorb went in the meantime."""
        for _ in range(3):
            path = self._data(xorb) if place.owner == _IN_XORB else self._large.path(place.owner.hex())
            try:
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC), place
            except FileNotFoundError:
                [place] = self._read(xorb, number, number + 1)
        raise self._lost(xorb)

    def _move(self, moves: list[tuple[Segment, bytes, int]]) -> None:
        """Point the index into big files that are stored; a xorb that nothing points to any more goes."""
        by_xorb: dict[str, list[tuple[Segment, bytes, int]]] = {}
        done = []
        for move in moves:
            by_xorb.setdefault(move[0].xorb, []).append(move)
        with locked(self._base / "lock"):
            for xorb, segments in by_xorb.items():
                places = [_Place(*record) for record in _RECORD.iter_unpack(self._index(xorb).read_bytes())]
                changed = False
                for segment, owner, start in segments:
                    offset = start
                    for number in range(segment.start, segment.end):
                        name, old, _, _, length, _ = places[number]
                        if old == _IN_XORB:
                            places[number] = _Place(name, owner, offset, length, length, _PLAIN)
                            changed = True
                        offset += length
                if changed:
                    index = b"".join(_RECORD.pack(*place) for place in places)
                    write_bytes(self._index(xorb), index, scratch=self._folder / "incomplete")
                if all(place.owner != _IN_XORB for place in places):
                    done.append(self._data(xorb))
        # To free the blocks of a gigabyte takes a second, for which the client need not wait.
        threading.Thread(target=_remove, args=(done,), daemon=True).start()

    def _data(self, xorb: str) -> Path:
        return self._folder / "xorbs" / xorb

    def _index(self, xorb: str) -> Path:
        return self._folder / "index" / xorb

    def _lost(self, xorb: str) -> Fault:
        """A client refers to what this store never had, or has no more: let the next attempt start afresh."""
        with locked(self._base / "lock"):
            if _read_current(self._base) == self._folder.name:
                _retire(self._base, self._folder.name)
        return bad_request(
            f"The shard refers to chunks of the xorb {xorb} that are not stored; start the upload again."
        )
