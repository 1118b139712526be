"""Reads the parts of the Xet protocol's xorbs and shards that are needed to rebuild files.

A file is split into chunks of 8 to 128 KiB. A xorb holds chunks, each compressed separately. A shard lists, for each
file, the ranges of xorbs that it consists of. Integers are little-endian. Xet's own hashes are not checked, because
the rebuilt file must have the announced sha256. Every public function raises Fault 400 for data that break the format.

Source: Xet protocol 1.1, huggingface.co/docs/xet.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from .faults import bad_request

#: Largest xorb in bytes: 64 MiB of content, the headers of its chunks, and its footer.
XORB_LIMIT = 65 * 2**20
#: Largest shard in bytes.
SHARD_LIMIT = 64 * 2**20
#: Largest number of chunks in a xorb, as in hf-xet.
MAX_CHUNKS = 8192

_MAX_CHUNK_BYTES = 128 * 2**10
_PLAIN, _LZ4, _GROUPED_LZ4 = range(3)
_CHUNK_HEADER_BYTES = 8
_XORB_FOOTER = b"XETBLOB"
_SHARD_MAGIC = b"HFRepoMetaData\0" + bytes.fromhex("556967456a7b815783a5bdd95ccdd14aa9") + struct.pack("<Q", 2)
#: One record of a shard: a hash and four numbers.
_RECORD = struct.Struct("<32s4I")
# A record with this hash ends a section of the shard.
_BOOKEND = b"\xff" * 32
_HAS_SHA256_AND_RANGE_HASHES = 0b11 << 30


def _hash_hex(hash_bytes: bytes) -> str:
    """Returns the text form of a hash."""
    # The protocol prints a hash as four 64-bit little-endian numbers, so each group of eight bytes is reversed.
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", hash_bytes))


def find_chunk_offsets(xorb: BinaryIO) -> array[int]:
    """Returns the offsets of the headers of a xorb's chunks.

    Args:
        xorb: The open file.

    Raises:
        Fault: 400 for a chunk that is truncated, or for too many chunks.
    """
    size = xorb.seek(0, os.SEEK_END)
    offsets = array("I")
    offset = 0
    while offset < size:
        header = _read_header(xorb, offset)
        if header is None:
            break
        if len(offsets) == MAX_CHUNKS:
            raise bad_request(f"The xorb has more than {MAX_CHUNKS} chunks, which no client sends.")
        offsets.append(offset)
        _, stored_size, _ = header
        offset += _CHUNK_HEADER_BYTES + stored_size
        if offset > size:
            raise bad_request("A chunk of the xorb is cut short.")
    return offsets


def read_chunk(xorb: BinaryIO, offset: int) -> bytes | bytearray:
    """Reads a chunk.

    Args:
        xorb: The open file.
        offset: Offset of the chunk's header.

    Raises:
        Fault: 400 if there is no valid chunk at the offset.
    """
    header = _read_header(xorb, offset)
    if header is None:
        raise bad_request("The xorb ends where the shard names a chunk.")
    scheme, stored_size, length = header
    return unpack(scheme, xorb.read(stored_size), length)


def _read_header(xorb: BinaryIO, offset: int) -> tuple[int, int, int] | None:
    """Returns (compression, stored bytes, content bytes) of the chunk at `offset`; None at the xorb's footer."""
    xorb.seek(offset)
    header = xorb.read(_CHUNK_HEADER_BYTES)
    if header.startswith(_XORB_FOOTER):
        return None
    stored_size, length = int.from_bytes(header[1:4], "little"), int.from_bytes(header[5:8], "little")
    has_valid_sizes = 0 < stored_size <= _MAX_CHUNK_BYTES and 0 < length <= _MAX_CHUNK_BYTES
    if len(header) < _CHUNK_HEADER_BYTES or header[0] != 0 or not has_valid_sizes:  # header[0] is the version
        raise bad_request(f"A chunk of the xorb is cut short, or does not have 1 to {_MAX_CHUNK_BYTES} bytes.")
    return header[4], stored_size, length


def unpack(scheme: int, stored_bytes: bytes, length: int) -> bytes | bytearray:
    """Unpacks a chunk.

    Args:
        scheme: The compression scheme in the chunk's header.
        stored_bytes: The bytes in the xorb.
        length: The number of bytes of content, from the chunk's header.

    Raises:
        Fault: 400 for an unknown scheme, content of another length, or bytes that cannot be decompressed.
    """
    if scheme == _PLAIN:
        content: bytes | bytearray = stored_bytes
    elif scheme in (_LZ4, _GROUPED_LZ4):
        from lz4.frame import LZ4FrameDecompressor

        try:
            # A single byte more than announced is enough to detect a frame with too much content (a zip bomb).
            content = LZ4FrameDecompressor().decompress(stored_bytes, max_length=length + 1)
        except RuntimeError as error:
            raise bad_request("A chunk of the xorb is not an LZ4 frame.") from error
        if scheme == _GROUPED_LZ4:
            content = _ungroup(content)
    else:
        raise bad_request(f"A chunk of the xorb is compressed by the unknown scheme {scheme}.")
    if len(content) != length:
        raise bad_request("A chunk of the xorb does not have the length that its header gives.")
    return content


def _ungroup(grouped_bytes: bytes | bytearray) -> bytearray:
    """Undoes byte grouping: of each four bytes, all first bytes are stored first, then all second bytes, and so on."""
    # Grouping puts the exponents of floating-point numbers next to each other, where they compress better.
    content = bytearray(len(grouped_bytes))
    start = 0
    for position in range(4):
        count = len(range(position, len(grouped_bytes), 4))
        content[position::4] = grouped_bytes[start : start + count]
        start += count
    return content


@dataclass(frozen=True)
class Segment:
    """Chunks [start, end) of a xorb, with `length` bytes of content."""

    xorb: str
    start: int
    end: int
    length: int


@dataclass(frozen=True)
class ShardFile:
    """A file of a shard.

    Args:
        sha256: The sha256 in hexadecimal digits.
        size: Bytes.
        records: The records of the file's segments, as bytes.
    """

    sha256: str
    size: int
    records: memoryview

    def segments(self) -> Iterator[Segment]:
        """Yields the segments in order."""
        # Do not build a list: a shard may hold more than a million segments.
        for xorb, _, length, start, end in _RECORD.iter_unpack(self.records):
            yield Segment(_hash_hex(xorb), start, end, length)


def parse_shard(shard: bytes) -> Iterator[ShardFile]:
    """Yields the files of a shard.

    Args:
        shard: The content of the shard.

    Raises:
        Fault: 400 for data that are not a shard or, once its files are read, for a shard that is truncated.
    """
    if not shard.startswith(_SHARD_MAGIC):
        raise bad_request("The body is not a Xet shard of version 2.")
    view, offset = memoryview(shard), _RECORD.size  # the shard's header is as long as a record

    def take(count: int) -> memoryview:
        """Returns the next records, as bytes."""
        nonlocal offset
        start, offset = offset, offset + count * _RECORD.size
        if offset > len(shard):
            raise bad_request("The shard is cut short.")
        return view[start:offset]

    def next_record() -> tuple[bytes, int, int]:
        """Returns the hash and the first two numbers of the next record."""
        hash_bytes, first, second, *_ = _RECORD.unpack(take(1))
        return hash_bytes, first, second

    while (record := next_record())[0] != _BOOKEND:
        _, flags, count = record
        if flags & _HAS_SHA256_AND_RANGE_HASHES != _HAS_SHA256_AND_RANGE_HASHES:
            raise bad_request("A file of the shard lacks its sha256 or the hashes of its ranges.")
        records = take(count)
        take(count)  # the hashes of the ranges
        size = sum(length for _, _, length, _, _ in _RECORD.iter_unpack(records))
        yield ShardFile(_hash_hex(next_record()[0]), size, records)
    # The next section describes the new xorbs, as their own headers do. Read it only to detect truncation.
    while (record := next_record())[0] != _BOOKEND:
        take(record[2])
