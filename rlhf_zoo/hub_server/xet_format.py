"""The formats of the Xet protocol, version 1.1 (huggingface.co/docs/xet): hashes, xorbs, shards.

A file is cut into chunks of 8 to 128 KiB. A xorb holds chunks, each compressed by itself; a shard says of which ranges
of which xorbs a file consists. Integers are little-endian. Every function raises Fault 400 on what breaks the format.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .faults import Fault, bad_request

__all__ = [
    "SHARD_LIMIT",
    "XORB_LIMIT",
    "Chunk",
    "Segment",
    "ShardFile",
    "XorbParser",
    "chunk_hash",
    "hash_bytes",
    "hash_hex",
    "parse_shard",
    "range_hash",
    "unpack",
    "xorb_hash",
]

_MAX_CHUNKS = 8192
_MAX_CHUNK = 128 * 2**10
_FOOTER_ROOM = 2**20
#: Bytes of a xorb's body: 64 MiB of content, and what headers and footer of its chunks take.
XORB_LIMIT = 64 * 2**20 + _FOOTER_ROOM
#: Bytes of a shard.
SHARD_LIMIT = 64 * 2**20

# Keys of BLAKE3, one for each use; from the specification's page on hashing.
_DATA_KEY = bytes.fromhex("6697f5775b9550de3135cbaca597181c9de421109beb2b58b4d0b04b93adf229")
_NODE_KEY = bytes.fromhex("017ec5c7a5472996fd946666b48a02e65ddd536f37c76dd2f86352e64a53713f")
_RANGE_KEY = bytes.fromhex("7f1857d6ce56ed66127ff913e7a5c3f3a4cd26d5b5db49e64124987f28fb94c3")
_MEAN_CHILDREN = 4

_PLAIN, _LZ4, _GROUPED_LZ4 = range(3)
_CHUNK_HEADER = 8
_XORB_FOOTER = b"XETBLOB"

_SHARD_MAGIC = b"HFRepoMetaData\0" + bytes.fromhex("556967456a7b815783a5bdd95ccdd14aa9")
_SHARD_VERSION = 2
_ENTRY = struct.Struct("<32s4I")
_BOOKEND = b"\xff" * 32
_HAS_RANGE_HASHES = 1 << 31
_HAS_SHA256 = 1 << 30


def hash_hex(raw: bytes) -> str:
    """A hash as the protocol writes it: four 64-bit numbers, so each group of eight bytes is reversed."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", raw))


def hash_bytes(text: str) -> bytes:
    """The inverse of `hash_hex`."""
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise bad_request("A Xet hash has 64 lower-case hexadecimal digits.")
    return struct.pack("<4Q", *(int(text[start : start + 16], 16) for start in range(0, 64, 16)))


def _keyed(data: bytes | bytearray, key: bytes) -> bytes:
    from blake3 import blake3

    digest: bytes = blake3(data, key=key).digest()
    return digest


def chunk_hash(content: bytes | bytearray) -> bytes:
    """The name of a chunk."""
    return _keyed(content, _DATA_KEY)


def range_hash(chunks: list[bytes]) -> bytes:
    """What a shard gives as proof that its sender knows the chunks of a range: a hash over their hashes."""
    return _keyed(b"".join(chunks), _RANGE_KEY)


def xorb_hash(chunks: list[tuple[bytes, int]]) -> bytes:
    """The name of a xorb: the root of a Merkle tree over the hashes and lengths of its chunks (at least one).

    A node has 2 to 9 children; from the third on, one whose hash is divisible by four is the last of its parent's.
    """
    level = chunks
    while len(level) > 1:
        parents: list[tuple[bytes, int]] = []
        group: list[tuple[bytes, int]] = []
        for node in level:
            group.append(node)
            full = len(group) == 2 * _MEAN_CHILDREN + 1
            if full or (len(group) > 2 and node[0][24] % _MEAN_CHILDREN == 0):
                parents.append(_merge(group))
                group = []
        level = [*parents, _merge(group)] if group else parents
    return level[0][0]


def _merge(group: list[tuple[bytes, int]]) -> tuple[bytes, int]:
    lines = "".join(f"{hash_hex(name)} : {length}\n" for name, length in group)
    return _keyed(lines.encode(), _NODE_KEY), sum(length for _, length in group)


def unpack(scheme: int, stored: bytes | memoryview, length: int) -> bytes | bytearray:
    """A chunk's content (`length` bytes) from its stored form."""
    if scheme == _PLAIN:
        content: bytes | bytearray = bytes(stored)
    elif scheme in (_LZ4, _GROUPED_LZ4):
        from lz4.frame import LZ4FrameDecompressor

        inflate = LZ4FrameDecompressor()
        try:
            # One byte more than announced is enough to notice a frame that holds more.
            content = inflate.decompress(stored, max_length=length + 1)
        except RuntimeError as error:
            raise bad_request("A chunk of the xorb is not an LZ4 frame.") from error
        if scheme == _GROUPED_LZ4:
            content = _ungroup(content)
    else:
        raise bad_request(f"A chunk of the xorb is compressed by the unknown scheme {scheme}.")
    if len(content) != length:
        raise bad_request("A chunk of the xorb does not have the length that its header gives.")
    return content


def _ungroup(grouped: bytes | bytearray) -> bytearray:
    """Undo byte grouping: first all bytes 0 of the chunk's groups of four, then all bytes 1, 2 and 3."""
    content = bytearray(len(grouped))
    start = 0
    for place in range(4):
        count = len(range(place, len(grouped), 4))
        content[place::4] = grouped[start : start + count]
        start += count
    return content


class Chunk(NamedTuple):
    """Where a chunk lies in its xorb: offset and stored in bytes; length is that of its content."""

    name: bytes
    offset: int
    stored: int
    length: int
    scheme: int


class XorbParser:
    """Reads a xorb piece by piece, and checks every chunk; only one chunk is in memory at a time."""

    def __init__(self) -> None:
        self._chunks: list[Chunk] = []
        self._pending = bytearray()
        self._offset = 0
        self._in_footer = False

    def feed(self, piece: bytes | memoryview) -> None:
        """Take the next bytes."""
        if self._in_footer:
            self._offset += len(piece)
            self._check_size()
            return
        self._pending += piece
        used = 0
        with memoryview(self._pending) as view:
            while len(view) - used >= _CHUNK_HEADER:
                if view[used : used + len(_XORB_FOOTER)] == _XORB_FOOTER:
                    self._in_footer = True
                    used = len(view)
                    break
                taken = self._take(view[used:], self._offset + used)
                if not taken:
                    break
                used += taken
        del self._pending[:used]
        self._offset += used
        self._check_size()

    def _take(self, view: memoryview, offset: int) -> int:
        stored, length = (int.from_bytes(view[start : start + 3], "little") for start in (1, 5))
        if view[0] != 0:
            raise bad_request("A chunk of the xorb has an unknown version.")
        if not 0 < length <= _MAX_CHUNK or not 0 < stored <= _MAX_CHUNK or len(self._chunks) == _MAX_CHUNKS:
            raise bad_request(f"A xorb holds at most {_MAX_CHUNKS} chunks of 1 to {_MAX_CHUNK} bytes.")
        if len(view) < _CHUNK_HEADER + stored:
            return 0
        scheme = view[4]
        content = unpack(scheme, view[_CHUNK_HEADER : _CHUNK_HEADER + stored], length)
        self._chunks.append(Chunk(chunk_hash(content), offset + _CHUNK_HEADER, stored, length, scheme))
        return _CHUNK_HEADER + stored

    def _check_size(self) -> None:
        if self._offset + len(self._pending) > XORB_LIMIT:
            raise Fault(413, f"A xorb may have at most {XORB_LIMIT} bytes.")

    def finish(self, name: str) -> list[Chunk]:
        """The chunks, once all bytes were fed; Fault 400 where they are not those of the xorb `name`."""
        if not self._chunks or (self._pending and not self._in_footer):
            raise bad_request(f"The xorb {name} is cut short.")
        found = hash_hex(xorb_hash([(chunk.name, chunk.length) for chunk in self._chunks]))
        if found != name:
            raise bad_request(f"The xorb {name} arrived damaged: its chunks make {found}.")
        return self._chunks


@dataclass(frozen=True)
class Segment:
    """Chunks [start, end) of a xorb, `length` bytes of content; proof is their `range_hash`."""

    xorb: str
    start: int
    end: int
    length: int
    proof: bytes


@dataclass(frozen=True)
class ShardFile:
    """A file of a shard: its sha256 in hexadecimal digits, and the segments that make it up."""

    sha256: str
    segments: list[Segment]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(segment.length for segment in self.segments)


def parse_shard(data: bytes) -> Iterator[ShardFile]:
    """The files of a shard, one after the other; a shard that is cut short is noticed at its end."""
    header = _ENTRY.size
    version = int.from_bytes(data[32:40], "little")
    if data[:32] != _SHARD_MAGIC or len(data) < header or version != _SHARD_VERSION:
        raise bad_request("The body is not a Xet shard of version 2.")
    entries = _Entries(data, header)
    while (entry := entries.next())[0] != _BOOKEND:
        _, flags, count, *_ = entry
        if not flags & _HAS_SHA256 or not flags & _HAS_RANGE_HASHES:
            raise bad_request("A file of the shard lacks its sha256 or the hashes of its ranges.")
        entries.require(2 * count + 1)
        ranges = [entries.next() for _ in range(count)]
        proofs = [entries.next()[0] for _ in range(count)]
        segments = [
            Segment(hash_hex(xorb), start, end, length, proof)
            for (xorb, _, length, start, end), proof in zip(ranges, proofs, strict=True)
        ]
        yield ShardFile(hash_hex(entries.next()[0]), segments)
    # What follows tells of the new xorbs, which their own upload has told already.
    while (entry := entries.next())[0] != _BOOKEND:
        entries.skip(entry[2])


class _Entries:
    """The entries of a shard, all of one size: a hash and four numbers."""

    def __init__(self, data: bytes, start: int) -> None:
        self._data = data
        self._at = start

    def next(self) -> tuple[bytes, int, int, int, int]:
        self.require(1)
        entry: tuple[bytes, int, int, int, int] = _ENTRY.unpack_from(self._data, self._at)
        self._at += _ENTRY.size
        return entry

    def skip(self, count: int) -> None:
        self.require(count)
        self._at += count * _ENTRY.size

    def require(self, count: int) -> None:
        if self._at + count * _ENTRY.size > len(self._data):
            raise bad_request("The shard is cut short.")
