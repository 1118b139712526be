"""The embedded Hub's storage when clients race, processes die and disks fill up."""

import hashlib
import os
import random
import resource
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError
from zoo_process import wait_until

from rlhf_zoo.hub.server.storage import Storage

REPO = "local/m"
BINARY = random.Random(1).randbytes(3_000_000)
OID = hashlib.sha256(BINARY).hexdigest()


@pytest.fixture
def in_process_hub(in_process_hub):
    in_process_hub.api().create_repo(REPO)
    return in_process_hub


def client(hub) -> HfApi:
    """A client for one thread."""
    return HfApi(endpoint=hub.url, token=hub.token)


def put(api, path: str, content: bytes, **options) -> str:
    return api.upload_file(path_or_fileobj=content, path_in_repo=path, repo_id=REPO, **options).oid


def incomplete(hub) -> list[Path]:
    return list((hub.git_dir(REPO) / "lfs" / "incomplete").iterdir())


def rss_mib(pid: int) -> tuple[float, float]:
    """Resident memory of a process in MiB: now, and at its peak."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) / 1024, int(lines["VmHWM"].split()[0]) / 1024


def test_concurrent_commits_are_all_kept(in_process_hub):
    threads, commits = 6, 4

    def work(thread: int) -> list[str]:
        api = client(in_process_hub)
        return [put(api, f"{thread}/{number}.bin", bytes([0, thread, number])) for number in range(commits)]

    with ThreadPoolExecutor(threads) as pool:
        oids = [oid for part in pool.map(work, range(threads)) for oid in part]
    history = [c.commit_id for c in in_process_hub.api().list_repo_commits(REPO)]
    assert len(set(oids)) == threads * commits
    assert set(oids) | {history[-1]} == set(history)
    expected = {f"{thread}/{number}.bin" for thread in range(threads) for number in range(commits)}
    assert set(in_process_hub.api().list_repo_files(REPO)) == expected | {".gitattributes"}
    assert in_process_hub.git(REPO, "fsck", "--full", "--strict") == ""
    assert in_process_hub.git(REPO, "log", "--format=%H").split() == history


def test_only_one_of_concurrent_commits_on_same_parent_succeeds(in_process_hub):
    parent = in_process_hub.api().model_info(REPO).sha

    def work(thread: int) -> int:
        try:
            put(client(in_process_hub), "a.txt", b"%d" % thread, parent_commit=parent)
        except HfHubHTTPError as error:
            return error.response.status_code
        return 200

    with ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(work, range(6))) == [200, 412, 412, 412, 412, 412]


def test_concurrent_uploads_of_same_file_are_stored_once(in_process_hub):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: put(client(in_process_hub), f"{n}.bin", BINARY), range(4)))
    stored = [path for path in (in_process_hub.git_dir(REPO) / "lfs" / "objects").rglob("*") if path.is_file()]
    assert [path.name for path in stored] == [OID]
    assert incomplete(in_process_hub) == []


def test_two_servers_share_one_root(hubs):
    first = hubs("first")
    second = hubs("second", root=first.root)
    first.api().create_repo(REPO)
    apis = [HfApi(endpoint=h.url, token=first.token) for h in (first, second)]

    def work(number: int) -> str:
        return put(apis[number % 2], f"{number}.txt", b"%d" % number)

    with ThreadPoolExecutor(4) as pool:
        oids = set(pool.map(work, range(16)))
    for api in apis:
        assert len(oids & {c.commit_id for c in api.list_repo_commits(REPO)}) == 16
        assert len(api.list_repo_files(REPO)) == 17
    assert first.git(REPO, "fsck", "--full", "--strict") == ""
    # Both servers accept a token that was created later.
    assert HfApi(endpoint=first.url, token=second.token).whoami()["name"] == "local"


def test_sweep_removes_leftovers_after_a_day(in_process_hub):
    repo = in_process_hub.git_dir(REPO)
    old, young = repo / "incoming-old", repo / "incoming-young"
    partial = repo / "lfs" / "incomplete" / "half"
    for folder in (old, young):
        folder.mkdir()
        (folder / "object").write_bytes(b"x")
    partial.write_bytes(b"x")
    for path in (old, partial):
        os.utime(path, (time.time() - 90_000,) * 2)
    Storage(in_process_hub.root).sweep()
    assert (old.exists(), partial.exists(), young.exists()) == (False, False, True)


# Big files


def test_upload_with_wrong_content_is_refused(in_process_hub):
    oid = hashlib.sha256(b"right").hexdigest()
    file = {"key": "lfsFile", "value": {"path": "w.bin", "algo": "sha256", "oid": oid, "size": 5}}
    href = in_process_hub.batch(REPO, oid, 5)["actions"]["upload"]["href"]
    for content in (b"wrong", b"righ", b"righty"):
        assert in_process_hub.send("PUT", href, content, role=None).status == 400, content
    assert "actions" in in_process_hub.batch(REPO, oid, 5)
    href_large = in_process_hub.batch(REPO, OID, len(BINARY))["actions"]["upload"]["href"]
    assert in_process_hub.send("PUT", href_large, bytes(len(BINARY)), role=None).status == 400
    answer = in_process_hub.commit(REPO, file)
    assert answer.status == 400
    assert "was not uploaded" in answer.json()["error"]
    for _ in range(2):  # the client may send it again
        assert httpx2.put(href, content=iter([b"ri", b"ght"])).status_code == 200  # chunked, without a length
    assert in_process_hub.commit(REPO, file).status == 200
    assert incomplete(in_process_hub) == []


def test_interrupted_upload_leaves_no_file(in_process_hub):
    """It does not matter whether the client closes or resets the connection."""
    path = in_process_hub.batch(REPO, OID, len(BINARY))["actions"]["upload"]["href"].removeprefix(in_process_hub.url)
    for reset in (False, True):
        with in_process_hub.connect() as connection:
            head = f"PUT {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(BINARY)}\r\n\r\n"
            connection.sendall(head.encode() + BINARY[:100_000])
            wait_until(lambda: incomplete(in_process_hub))
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        wait_until(lambda: not incomplete(in_process_hub))
    assert "actions" in in_process_hub.batch(REPO, OID, len(BINARY))


def test_forged_upload_link_is_refused(in_process_hub):
    in_process_hub.api().create_repo("local/other")
    oid = hashlib.sha256(b"right").hexdigest()
    href = in_process_hub.batch(REPO, oid, 5)["actions"]["upload"]["href"]
    head, _, signature = href.partition("signature=")
    for forged in (
        head,
        head + f"signature=1000000000.{signature.partition('.')[2]}",  # expired
        href[:-1] + ("0" if href[-1] != "0" else "1"),
        href.replace("size=5", "size=6"),
        href.replace("local/m/", "local/other/"),
        href.replace(oid, hashlib.sha256(b"other").hexdigest()),
    ):
        assert in_process_hub.send("PUT", forged, b"right", role=None).status == 403, forged
    assert "actions" in in_process_hub.batch(REPO, oid, 5)


def test_large_file_is_streamed(hubs, tmp_path):
    """The server's memory grows by less than 30 MiB, whatever the size of the file."""
    hub = hubs("one")
    api = hub.api()
    api.create_repo(REPO)
    put(api, "warm.bin", b"\0warm")
    api.hf_hub_download(REPO, "warm.bin", cache_dir=hub.cache)
    before, _ = rss_mib(hub.process.pid)
    content = random.Random(2).randbytes(60 * 2**20)
    source = tmp_path / "source.bin"
    source.write_bytes(content)
    api.upload_file(path_or_fileobj=source, path_in_repo="w.bin", repo_id=REPO)
    assert Path(api.hf_hub_download(REPO, "w.bin", cache_dir=hub.cache)).read_bytes() == content
    _, peak = rss_mib(hub.process.pid)
    assert peak - before < 30


def test_large_commit_is_not_held_in_memory(hub):
    api = hub.api()
    api.create_repo(REPO)
    put(api, "warm.txt", b"warm")
    before, _ = rss_mib(hub.process.pid)
    text = b"0123456789abcde\n" * 2**19  # 8 MiB, below the limit for LFS
    operations = [CommitOperationAdd(f"{number}.txt", b"%d\n" % number + text) for number in range(16)]
    api.create_commit(REPO, operations, commit_message="128 MiB of text")
    _, peak = rss_mib(hub.process.pid)
    assert peak - before < 110
    assert hub.git(REPO, "fsck", "--full", "--strict") == ""


def test_full_disk_returns_507_and_keeps_repository(hubs, tmp_path):
    limit = 4_000_000
    hub = hubs("full", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    api = hub.api()
    api.create_repo(REPO)
    put(api, "fits.bin", BINARY)
    before = api.model_info(REPO).sha
    with pytest.raises(RuntimeError) as caught:
        put(api, "large.bin", BINARY * 4)
    cause = caught.value.__cause__
    assert isinstance(cause, HfHubHTTPError)
    assert cause.response.status_code == 507
    assert "disk is full: free some space" in str(cause)
    noise = random.Random(3).randbytes(6_000_000).hex().encode()  # 6 MB however well it is compressed
    with pytest.raises(HfHubHTTPError, match="disk is full") as caught:
        put(api, "text.txt", noise[:9_000_000])
    assert caught.value.response.status_code == 507
    assert api.model_info(REPO).sha == before
    assert incomplete(hub) == []
    assert list(hub.git_dir(REPO).glob("incoming-*")) == []
    put(api, "still.txt", b"works")
    assert hub.git(REPO, "fsck", "--full", "--strict") == ""


def test_upload_larger_than_free_space_is_refused_at_once(in_process_hub):
    answer = in_process_hub.batch(REPO, "a" * 64, shutil.disk_usage(in_process_hub.root).free + 2**30)
    assert answer["error"]["code"] == 507
    assert "free some space" in answer["error"]["message"]


def test_token_is_in_no_file_and_no_log(hub):
    """File modes are tested in test_hub_damage.py."""
    hub.api().create_repo(REPO)
    for path in hub.root.rglob("*"):
        assert path.is_dir() or hub.token.encode() not in path.read_bytes()
    assert hub.token not in hub.log.read_text()
