"""What little bytes that were pushed cost the embedded Hub: memory for Xet, processor time for cards."""

import io
import json
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rlhf_zoo.hub_server import cards
from rlhf_zoo.hub_server.digested import Digested
from rlhf_zoo.hub_server.faults import Fault
from rlhf_zoo.hub_server.xet_format import _SHARD_MAGIC, MAX_CHUNKS, chunks_of, parse_shard, read_chunk

ENTRY = struct.Struct("<32s4I")
TINY = b"\0\1\0\0\0\1\0\0x"


@contextmanager
def at_most(mebibytes: float) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < mebibytes * 2**20
    finally:
        tracemalloc.stop()


def test_a_xorb_of_the_smallest_chunks() -> None:
    """65 MiB of chunks of 9 bytes are 7.5 million; hf-xet makes 8,192 at most."""
    with io.BytesIO(TINY * (65 * 2**20 // len(TINY))) as xorb, at_most(1):
        with pytest.raises(Fault, match="8192 chunks") as caught:
            chunks_of(xorb)
        assert caught.value.status == 400
        xorb.truncate(len(TINY) * MAX_CHUNKS)
        found = chunks_of(xorb)
        assert len(found) == MAX_CHUNKS
        assert read_chunk(xorb, found[-1]) == b"x"


def test_a_file_of_very_many_segments() -> None:
    count = 2**15
    body = ENTRY.pack(bytes(32), 3 << 30, count, 0, 0) + ENTRY.pack(b"\1" * 32, 0, 7, 0, 1) * count
    shard = _SHARD_MAGIC.ljust(48, b"\0") + body + bytes(48 * count) + ENTRY.pack(bytes(32), 0, 0, 0, 0)
    shard += ENTRY.pack(b"\xff" * 32, 0, 0, 0, 0) * 2
    with at_most(1):
        (file,) = parse_shard(shard)
        assert file.size == 7 * count
        assert sum(segment.length for segment in file.segments()) == file.size


def long_card(entries: int) -> bytes:
    rows = "\n".join(f"- task: {{type: text-generation}}\n  value: {number}" for number in range(entries))
    return f"---\nlicense: mit\nmodel-index:\n{rows}\n---\ntext".encode()


def test_a_card_is_parsed_once_and_read_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    content = long_card(4000)
    loaded = []

    def load() -> bytes:
        loaded.append(1)
        return content

    first = cards.card_of("a" * 40, load)
    began = time.process_time()
    for _ in range(10):
        assert cards.card_of("a" * 40, load) == first
    each = (time.process_time() - began) / 10
    began = time.process_time()
    assert cards.parse_card(content) == first
    assert len(loaded) == 1
    assert each < (time.process_time() - began) / 5
    assert first[0] is not None
    first[0]["license"] = "changed"
    assert cards.read_card(content, "a" * 40)[0]["license"] == "mit"  # type: ignore[index]


def test_many_who_ask_for_the_same_wait_for_one() -> None:
    known, calls = Digested(1000), []

    def read() -> list[int]:
        calls.append(1)
        time.sleep(0.1)
        return [1]

    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(known.get("a", read))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (found, len(calls)) == ([[1]] * 8, 1)


def test_what_is_kept_is_bounded() -> None:
    known, calls = Digested(100), []

    def reader(text: str) -> Callable[[], str]:
        return lambda: (calls.append(text), text)[1]

    for text in ("a" * 40, "b" * 40, "a" * 40, "c" * 40, "a" * 40, "b" * 40, "d" * 500, "d" * 500):
        assert known.get(text, reader(text)) == text
    assert [text[0] for text in calls] == ["a", "b", "c", "b", "d", "d"]
    assert known._size == sum(map(len, known._known.values())) <= 100


@pytest.mark.parametrize(
    ("readme", "card"),
    [
        (b"---\na: 1\n---\n", {"a": 1}),
        (b"\xef\xbb\xbf\n ---  \r\na: 1\r\n---\r\nx", {"a": 1}),
        (b"---\na: 1\n--- \t\nx\n---\n", {"a": 1}),
        (b"---\n---\nx", None),
        (b"---\na: 1\n", None),
        (b"x\n---\na: 1\n---\n", None),
        (b"---\na: 1\n----\n---\n", None),
    ],
)
def test_where_a_card_ends(readme: bytes, card: dict[str, int] | None) -> None:
    found, error = cards.parse_card(readme)
    assert found == card if error is None else readme.count(b"----")


@pytest.mark.parametrize("head", [b"---\n", b"\n" * 2**20, b"---" + b" " * 2**20, b"---\n" + b"---" * 2**20])
def test_a_readme_of_any_kind_takes_a_moment(head: bytes) -> None:
    began = time.process_time()
    cards.parse_card(head + b"--- x\n" * 2**20 + b"---" + b" " * 2**20 + b"x")
    assert time.process_time() - began < 3


def test_no_alias_makes_an_answer_of_gigabytes() -> None:
    _, error = cards.parse_card(f"---\na: &a {'x' * 500_000}\nb: [{'*a,' * 90_000}]\n---\n".encode())
    assert error is not None and "written out" in error
    json.dumps(error)
