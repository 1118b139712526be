"""Small pushes cost the embedded Hub bounded memory (Xet) and bounded processor time (cards, history)."""

import io
import json
import struct
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from rlhf_zoo.hub.server import cards
from rlhf_zoo.hub.server import git as git_module
from rlhf_zoo.hub.server.digest_cache import DigestCache
from rlhf_zoo.hub.server.faults import Fault
from rlhf_zoo.hub.server.git import GitRepository
from rlhf_zoo.hub.server.git_writes import Quarantine, TreeEdit
from rlhf_zoo.hub.server.names import RepoId
from rlhf_zoo.hub.server.storage import Storage
from rlhf_zoo.hub.server.xet_format import _SHARD_MAGIC, MAX_CHUNKS, find_chunk_offsets, parse_shard, read_chunk

ENTRY = struct.Struct("<32s4I")
TINY = b"\0\1\0\0\0\1\0\0x"


@contextmanager
def assert_peak_memory(mebibytes: float) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < mebibytes * 2**20
    finally:
        tracemalloc.stop()


def test_xorb_chunk_count_is_bounded() -> None:
    """65 MiB of chunks of 9 bytes are 7.5 million; hf-xet makes 8,192 at most."""
    with io.BytesIO(TINY * (65 * 2**20 // len(TINY))) as xorb, assert_peak_memory(1):
        with pytest.raises(Fault, match="8192 chunks") as caught:
            find_chunk_offsets(xorb)
        assert caught.value.status == 400
        xorb.truncate(len(TINY) * MAX_CHUNKS)
        chunks = find_chunk_offsets(xorb)
        assert len(chunks) == MAX_CHUNKS
        assert read_chunk(xorb, chunks[-1]) == b"x"


def test_shard_with_many_segments_uses_little_memory() -> None:
    count = 2**15
    body = ENTRY.pack(bytes(32), 3 << 30, count, 0, 0) + ENTRY.pack(b"\1" * 32, 0, 7, 0, 1) * count
    shard = _SHARD_MAGIC.ljust(48, b"\0") + body + bytes(48 * count) + ENTRY.pack(bytes(32), 0, 0, 0, 0)
    shard += ENTRY.pack(b"\xff" * 32, 0, 0, 0, 0) * 2
    with assert_peak_memory(1):
        (file,) = parse_shard(shard)
        assert file.size == 7 * count
        assert sum(segment.length for segment in file.segments()) == file.size


def long_card(entries: int) -> bytes:
    rows = "\n".join(f"- task: {{type: text-generation}}\n  value: {number}" for number in range(entries))
    return f"---\nlicense: mit\nmodel-index:\n{rows}\n---\ntext".encode()


def test_card_blob_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    content = long_card(4000)
    loaded = []

    def load() -> bytes:
        loaded.append(1)
        return content

    first = cards.read_card("a" * 40, load)
    began = time.process_time()
    for _ in range(10):
        assert cards.read_card("a" * 40, load) == first
    each = (time.process_time() - began) / 10
    began = time.process_time()
    assert cards.parse_card(content) == first
    assert len(loaded) == 1
    assert each < (time.process_time() - began) / 5
    assert first[0] is not None
    first[0]["license"] = "changed"
    assert cards.read_card("a" * 40, load)[0]["license"] == "mit"  # type: ignore[index]


def test_digest_cache_computes_once_for_concurrent_requests() -> None:
    known, calls = DigestCache(1000), []

    def read() -> list[int]:
        calls.append(1)
        time.sleep(0.1)
        return [1]

    results: list[object] = []
    threads = [threading.Thread(target=lambda: results.append(known.get("a", read))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (results, len(calls)) == ([[1]] * 8, 1)


def test_digest_cache_size_is_bounded() -> None:
    known, calls = DigestCache(100), []

    def reader(text: str) -> Callable[[], str]:
        return lambda: (calls.append(text), text)[1]

    for text in ("a" * 40, "b" * 40, "a" * 40, "c" * 40, "a" * 40, "b" * 40, "d" * 500, "d" * 500):
        assert known.get(text, reader(text)) == text
    assert [text[0] for text in calls] == ["a", "b", "c", "b", "d", "d"]
    assert known._size == sum(map(len, known._entries.values())) <= 100


def test_last_commits_match_git_log_with_few_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As git tells it, and each commit of the history is read a few times, however many paths are asked for."""
    storage, repo = Storage(tmp_path), RepoId("model", "local", "m")
    storage.create(repo, private=False, sdk=None, variables={})
    random, folder = Random(0), storage.path(repo)
    with storage.git(repo) as git, Quarantine(folder) as quarantine:
        edit, parent = TreeEdit(git, git.root_tree(git.head())), git.head()
        for number in range(40):
            for _ in range(3):
                path = random.choice(["a", "b", "d/a", "d/b", "d/e/a", "f/g/h/a"])
                if random.random() < 0.3:
                    edit.remove(path, is_folder=False)
                else:
                    edit.put(path, quarantine.add_blob(b"%d" % random.randrange(3)))
            parent = quarantine.add_commit(edit.write(quarantine), [parent], str(number))
        quarantine.migrate()
        git.write_ref("refs/heads/main", parent)
    reads = []
    real = GitRepository.commit
    monkeypatch.setattr(GitRepository, "commit", lambda git, oid: (reads.append(oid), real(git, oid))[1])
    for most in (10**6, 3):  # trees that are kept
        monkeypatch.setattr(git_module, "_MAX_CACHED_ENTRIES", most)
        with storage.git(repo) as git:
            paths = [entry.path for entry in git.walk(git.root_tree(parent))]
            commits = git.last_commits(parent, paths)
        for path in paths:
            command = [
                "git",
                "-c",
                "safe.directory=*",
                "-C",
                str(folder),
                "log",
                "-1",
                "--format=%H",
                "main",
                "--",
                path,
            ]
            assert commits[path] == subprocess.run(command, capture_output=True, text=True).stdout.strip(), path
    assert len(paths) > 5 and len(reads) < 2 * 3 * 42


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
def test_parse_card_finds_front_matter(readme: bytes, card: dict[str, int] | None) -> None:
    parsed, error = cards.parse_card(readme)
    assert parsed == card if error is None else readme.count(b"----")


@pytest.mark.parametrize("head", [b"---\n", b"\n" * 2**20, b"---" + b" " * 2**20, b"---\n" + b"---" * 2**20])
def test_parse_card_is_fast_for_any_readme(head: bytes) -> None:
    began = time.process_time()
    cards.parse_card(head + b"--- x\n" * 2**20 + b"---" + b" " * 2**20 + b"x")
    assert time.process_time() - began < 3


def test_parse_card_rejects_yaml_alias_expansion() -> None:
    _, error = cards.parse_card(f"---\na: &a {'x' * 500_000}\nb: [{'*a,' * 90_000}]\n---\n".encode())
    assert error is not None and "aliases are expanded" in error
    json.dumps(error)
