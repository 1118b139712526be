"""What lies on the embedded Hub's disk, when clients race, processes die, disks fill and names are hostile."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import BadRequestError, HfHubHTTPError

from rlhf_zoo.hub.server.storage import Storage

REPO = "local/m"
BINARY = random.Random(1).randbytes(3_000_000)


def client(hub) -> HfApi:
    """A client of its own, for a thread of its own."""
    return HfApi(endpoint=hub.url, token=hub.token)


def put(api, path: str, content: bytes, **options) -> str:
    return api.upload_file(path_or_fileobj=content, path_in_repo=path, repo_id=REPO, **options).oid


def rss_mib(pid: int) -> tuple[float, float]:
    """Resident memory of a process now, and at its highest."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) / 1024, int(lines["VmHWM"].split()[0]) / 1024


def test_many_committers_lose_nothing(hub):
    hub.api().create_repo(REPO)
    threads, commits = 8, 4

    def work(thread: int) -> list[str]:
        api = client(hub)
        return [put(api, f"{thread}/{number}.bin", bytes([0, thread, number])) for number in range(commits)]

    with ThreadPoolExecutor(threads) as pool:
        oids = [oid for part in pool.map(work, range(threads)) for oid in part]
    history = [c.commit_id for c in hub.api().list_repo_commits(REPO)]
    assert len(set(oids)) == threads * commits
    assert set(oids) | {history[-1]} == set(history)
    expected = {f"{thread}/{number}.bin" for thread in range(threads) for number in range(commits)}
    assert set(hub.api().list_repo_files(REPO)) == expected | {".gitattributes"}
    assert hub.git(REPO, "fsck", "--full", "--strict") == ""
    assert hub.git(REPO, "log", "--format=%H").split() == history


def test_only_one_of_many_gets_the_parent(hub):
    hub.api().create_repo(REPO)
    parent = hub.api().model_info(REPO).sha

    def work(thread: int) -> int:
        try:
            put(client(hub), "a.txt", b"%d" % thread, parent_commit=parent)
        except HfHubHTTPError as error:
            return error.response.status_code
        return 200

    with ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(work, range(6))) == [200, 412, 412, 412, 412, 412]


def test_same_large_file_from_many_clients(hub):
    hub.api().create_repo(REPO)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: put(client(hub), f"{n}.bin", BINARY), range(4)))
    stored = [path for path in (hub.git_dir(REPO) / "lfs" / "objects").rglob("*") if path.is_file()]
    assert [path.name for path in stored] == [hashlib.sha256(BINARY).hexdigest()]
    assert list((hub.git_dir(REPO) / "lfs" / "incomplete").iterdir()) == []


def test_two_servers_over_one_root(hubs):
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
    # A link signed by one server is honoured by the other, and a token made later is known to both.
    later = HfApi(endpoint=second.url, token=second.token)
    assert later.whoami()["name"] == "local"
    assert HfApi(endpoint=first.url, token=second.token).whoami()["name"] == "local"


def kill_during_commits(hubs, tmp_path: Path, name: str, *, delay: float) -> None:
    """Commit without pause, SIGKILL the server after `delay` seconds, and look at what is left."""
    hub = hubs(name)
    hub.api().create_repo(REPO)
    done: list[str] = []

    def work() -> None:
        api = client(hub)
        number = 0
        try:
            while True:
                operations = [
                    CommitOperationAdd(f"f{number}.txt", b"x" * 50_000),
                    CommitOperationAdd("w.bin", b"\0%d" % number + BINARY[:300_000]),
                ]
                done.append(api.create_commit(REPO, operations, commit_message=f"Step {number}").oid)
                number += 1
        except (httpx2.HTTPError, HfHubHTTPError, RuntimeError, OSError):
            return

    worker = threading.Thread(target=work)
    worker.start()
    time.sleep(delay)
    hub.stop(signal.SIGKILL)
    worker.join(timeout=120)
    assert not worker.is_alive()
    assert done, "the server died before the first commit"
    hub.git(REPO, "fsck", "--full", "--strict")
    history = hub.git(REPO, "log", "--format=%H").split()
    # Every acknowledged commit is there; at most one more was made whose answer got lost.
    assert history[-len(done) - 1 : -1] == done[::-1]
    assert len(history) - 1 - len(done) in (0, 1)
    again = hubs(f"{name}-again", root=hub.root)
    api = again.api()
    for entry in api.list_repo_tree(REPO, recursive=True):
        content = Path(api.hf_hub_download(REPO, entry.path, cache_dir=tmp_path / "cache" / name)).read_bytes()
        assert len(content) == entry.size
        if entry.lfs:
            assert hashlib.sha256(content).hexdigest() == entry.lfs.sha256
    put(api, "w.bin", b"\0after")
    assert again.git(REPO, "log", "--format=%H").split()[1] == history[0]
    again.git(REPO, "fsck", "--full", "--strict")


def test_killed_server_leaves_the_last_commit_whole(hubs, tmp_path):
    kill_during_commits(hubs, tmp_path, "one", delay=1.1)


@pytest.mark.full
def test_many_kills(hubs, tmp_path):
    for number in range(12):
        kill_during_commits(hubs, tmp_path, f"n{number}", delay=0.6 + 0.077 * number)


def test_rubbish_of_killed_servers_is_swept_after_a_day(hub):
    hub.api().create_repo(REPO)
    repo = hub.git_dir(REPO)
    old, young = repo / "incoming-old", repo / "incoming-young"
    half = repo / "lfs" / "incomplete" / "half"
    for folder in (old, young):
        folder.mkdir()
        (folder / "object").write_bytes(b"x")
    half.write_bytes(b"x")
    for path in (old, half):
        os.utime(path, (time.time() - 90_000,) * 2)
    Storage(hub.root).sweep()
    assert (old.exists(), half.exists(), young.exists()) == (False, False, True)


def test_multipart_upload(hubs, tmp_path):
    hub = hubs("parts", "--part-size", "1000000")
    api = hub.api()
    api.create_repo(REPO)
    put(api, "w.bin", BINARY)  # 3 parts
    put(api, "x.bin", BINARY[:2_500_001])  # the last part is short
    put(api, "y.bin", BINARY[:1_000_000])  # one request
    log = hub.log.read_text()
    assert log.count("PUT /_lfs/") == 3 + 3 + 1
    for name, size in (("w.bin", 3_000_000), ("x.bin", 2_500_001), ("y.bin", 1_000_000)):
        path = api.hf_hub_download(REPO, name, cache_dir=hub.cache)
        assert Path(path).read_bytes() == BINARY[:size]
    assert list((hub.git_dir(REPO) / "lfs" / "incomplete").iterdir()) == []


def test_files_above_50_megabytes_come_in_parts(hub, tmp_path):
    api = hub.api()
    api.create_repo(REPO)
    large = tmp_path / "w.bin"
    for size, parts in ((50_000_000, 1), (50_000_001, 3)):
        large.write_bytes(BINARY * 16 + BINARY[: size - 48_000_000])
        api.upload_file(path_or_fileobj=large, path_in_repo="w.bin", repo_id=REPO)
        assert hub.log.read_text().count("PUT /_lfs/") == parts
        path = api.hf_hub_download(REPO, "w.bin", cache_dir=hub.cache)
        assert Path(path).read_bytes() == large.read_bytes()


def batch(hub, oid: str, size: int) -> dict:
    answer = httpx2.post(
        f"{hub.url}/{REPO}.git/info/lfs/objects/batch",
        headers={"Authorization": f"Bearer {hub.token}"},
        json={"operation": "upload", "transfers": ["basic", "multipart"], "objects": [{"oid": oid, "size": size}]},
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["objects"][0]


def test_parts_in_any_order_through_two_servers(hubs):
    first = hubs("first", "--part-size", "1000000")
    second = hubs("second", "--part-size", "1000000", root=first.root)
    first.api().create_repo(REPO)
    oid = hashlib.sha256(BINARY).hexdigest()
    action = batch(first, oid, len(BINARY))["actions"]["upload"]
    other = lambda href: href.replace(first.url, second.url)  # noqa: E731
    header = action["header"]
    assert header["chunk_size"] == "1000000"
    for part, href in (("3", header["3"]), ("1", other(header["1"])), ("2", header["2"]), ("1", header["1"])):
        start = (int(part) - 1) * 1_000_000
        assert httpx2.put(href, content=BINARY[start : start + 1_000_000]).status_code == 200
    body = {"oid": oid, "parts": []}
    assert httpx2.post(other(action["href"]), json=body).status_code == 200
    assert httpx2.post(action["href"], json=body).status_code == 200  # the client may ask again
    assert "actions" not in batch(first, oid, len(BINARY))


def test_damaged_upload_is_refused(hubs):
    hub = hubs("damage", "--part-size", "1000000")
    hub.api().create_repo(REPO)
    oid = hashlib.sha256(b"right").hexdigest()
    href = batch(hub, oid, 5)["actions"]["upload"]["href"]
    for content in (b"wrong", b"righ", b"righty"):
        answer = httpx2.put(href, content=content)
        assert answer.status_code == 400, content
    assert "actions" in batch(hub, oid, 5)
    action = batch(hub, hashlib.sha256(BINARY).hexdigest(), len(BINARY))["actions"]["upload"]
    for part in ("1", "2", "3"):
        assert httpx2.put(action["header"][part], content=bytes(1_000_000)).status_code == 200
    assert httpx2.post(action["href"], json={}).status_code == 400
    assert httpx2.put(action["header"]["1"], content=b"short").status_code == 400
    with pytest.raises(BadRequestError, match="was not uploaded"):
        commit_large(hub, oid)
    assert httpx2.put(href, content=iter([b"ri", b"ght"])).status_code == 200  # chunked, without a length
    assert commit_large(hub, oid)


def commit_large(hub, oid: str) -> str:
    lines = [
        {"key": "header", "value": {"summary": "By hand"}},
        {"key": "lfsFile", "value": {"path": "w.bin", "algo": "sha256", "oid": oid, "size": 5}},
    ]
    answer = httpx2.post(
        f"{hub.url}/api/models/{REPO}/commit/main",
        headers={"Authorization": f"Bearer {hub.token}"},
        content="\n".join(json.dumps(line) for line in lines),
    )
    if answer.status_code == 400:
        raise BadRequestError(answer.text, response=answer)
    return answer.json()["commitOid"]


def test_upload_links_are_signed(hub):
    hub.api().create_repo(REPO)
    hub.api().create_repo("local/other")
    oid = hashlib.sha256(b"right").hexdigest()
    href = batch(hub, oid, 5)["actions"]["upload"]["href"]
    head, _, signature = href.partition("signature=")
    expired = f"1000000000.{signature.partition('.')[2]}"
    for forged in (
        head,
        head + "signature=" + expired,
        href[:-1] + ("0" if href[-1] != "0" else "1"),
        href.replace("size=5", "size=6"),
        href.replace("local/m/", "local/other/"),
        href.replace(oid, hashlib.sha256(b"other").hexdigest()),
    ):
        assert httpx2.put(forged, content=b"right").status_code == 403, forged
    assert "actions" in batch(hub, oid, 5)


def stream(hub, tmp_path: Path, size: int, limit_mib: float) -> None:
    """Push and pull a file of `size` bytes while the server's memory stays within `limit_mib` of what it was."""
    api = hub.api()
    api.create_repo(REPO)
    put(api, "warm.bin", b"\0warm")
    api.hf_hub_download(REPO, "warm.bin", cache_dir=hub.cache)
    before, _ = rss_mib(hub.process.pid)
    source = tmp_path / "source.bin"
    digest = hashlib.sha256()
    block = random.Random(2).randbytes(2**20)
    with open(source, "wb") as file:
        for number in range(size // 2**20):
            piece = number.to_bytes(8, "little") + block[8:]
            digest.update(piece)
            file.write(piece)
    api.upload_file(path_or_fileobj=source, path_in_repo="w.bin", repo_id=REPO)
    source.unlink()
    path = api.hf_hub_download(REPO, "w.bin", cache_dir=hub.cache)
    with open(path, "rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == digest.hexdigest()
    _, peak = rss_mib(hub.process.pid)
    assert peak - before < limit_mib


def test_files_stream_through_the_server(hub, tmp_path):
    stream(hub, tmp_path, 60 * 2**20, 30)


@pytest.mark.full
def test_500_megabytes(hub, tmp_path):
    stream(hub, tmp_path, 500 * 2**20, 30)


@pytest.mark.full
def test_500_megabytes_in_parts(hubs, tmp_path):
    stream(hubs("parts", "--part-size", str(64 * 2**20)), tmp_path, 500 * 2**20, 30)


def test_regular_files_of_a_large_commit_do_not_gather_in_memory(hub):
    api = hub.api()
    api.create_repo(REPO)
    put(api, "warm.txt", b"warm")
    before, _ = rss_mib(hub.process.pid)
    text = b"0123456789abcde\n" * 2**19  # 8 MiB, below the limit for LFS
    operations = [CommitOperationAdd(f"{number}.txt", b"%d\n" % number + text) for number in range(20)]
    api.create_commit(REPO, operations, commit_message="160 MiB of text")
    _, peak = rss_mib(hub.process.pid)
    assert peak - before < 110
    assert hub.git(REPO, "fsck", "--full", "--strict") == ""


def test_full_disk(hubs, tmp_path):
    limit = 4_000_000
    hub = hubs("full", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    api = hub.api()
    api.create_repo(REPO)
    put(api, "fits.bin", BINARY)
    before = api.model_info(REPO).sha
    large = tmp_path / "large.bin"
    large.write_bytes(BINARY * 4)
    with pytest.raises(RuntimeError) as caught:
        api.upload_file(path_or_fileobj=large, path_in_repo="large.bin", repo_id=REPO)
    cause = caught.value.__cause__
    assert isinstance(cause, HfHubHTTPError)
    assert cause.response.status_code == 507
    assert "disk is full: free some space" in str(cause)
    noise = random.Random(3).randbytes(6_000_000).hex().encode()  # 6 MB however well it is compressed
    with pytest.raises(HfHubHTTPError, match="disk is full") as caught:
        put(api, "text.txt", noise[:9_000_000])
    assert caught.value.response.status_code == 507
    assert api.model_info(REPO).sha == before
    assert list((hub.git_dir(REPO) / "lfs" / "incomplete").iterdir()) == []
    assert list(hub.git_dir(REPO).glob("incoming-*")) == []
    put(api, "still.txt", b"works")
    assert hub.git(REPO, "fsck", "--full", "--strict") == ""


def test_upload_that_cannot_fit_is_refused_before_it_starts(hub):
    hub.api().create_repo(REPO)
    size = shutil.disk_usage(hub.root).free + 2**30
    answer = batch(hub, "a" * 64, size)
    assert answer["error"]["code"] == 507
    assert "free some space" in answer["error"]["message"]


def request(hub, text: str) -> bytes:
    """Send bytes as they are: a client library would tidy them up first."""
    port = int(hub.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(text.encode("latin-1"))
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    return answer


@pytest.mark.parametrize(
    "path",
    [
        "/local/m/resolve/main/../../../tokens.json",
        "/local/m/resolve/main/..%2F..%2F..%2Ftokens.json",
        "/local/m/resolve/main/%2e%2e/%2e%2e/tokens.json",
        "/local/m/resolve/..%2F..%2Ftokens.json/x",
        "/local/m/resolve/main//etc/passwd",
        "/local/m/resolve/main/%2Fetc%2Fpasswd",
        "/local/m/resolve/main/a%00b",
        "/local/m/resolve/main/%ff",
        "/../../../../etc/passwd",
        "/local/..%2F..%2Fm/resolve/main/x",
        "/api/models/../tokens/x/tree/main",
        "/api/models/local/..%2F..%2F..%2Ftokens.json",
        "/api/models/local/m/tree/main/..%2F..",
        "/local/" + "n" * 300 + "/resolve/main/x",
        "/local/m/resolve/main/" + "x" * 5000,
        "/local/m/resolve/" + "r" * 5000 + "/x",
        "/" + "x" * 70_000,
    ],
)
def test_hostile_paths(shared_hub, path):
    shared_hub.api().create_repo(REPO, exist_ok=True)
    answer = request(shared_hub, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    status = int(answer.split(b" ", 2)[1])
    assert status in (400, 401, 404, 414)
    assert b"root:" not in answer
    assert b"sha256" not in answer


@pytest.mark.parametrize(
    "path",
    [
        "../x",
        "a/../../x",
        "/etc/x",
        "a//b",
        "./a",
        "",
        ".git/config",
        "a/.GIT/hooks/x",
        "x" * 300,
        "d/" * 600 + "x",
        "a\0b",
        "..\\x",
        "a\\..\\b",
        ".git /config",
        ".git./config",
        ".git::$INDEX_ALLOCATION/config",
        ".g\u200cit/config",
        ".gitmodules",
    ],
)
def test_hostile_paths_in_commits(shared_hub, path):
    shared_hub.api().create_repo(REPO, exist_ok=True)
    before = shared_hub.api().model_info(REPO).sha
    for value in ({"key": "file", "value": {"path": path, "content": "eA==", "encoding": "base64"}},
                  {"key": "lfsFile", "value": {"path": path, "algo": "sha256", "oid": "0" * 64, "size": 1}},
                  {"key": "deletedFile", "value": {"path": path}}):  # fmt: skip
        answer = httpx2.post(
            f"{shared_hub.url}/api/models/{REPO}/commit/main",
            headers={"Authorization": f"Bearer {shared_hub.token}"},
            content=json.dumps({"key": "header", "value": {"summary": "x"}}) + "\n" + json.dumps(value),
        )
        assert answer.status_code == 400, answer.text
    assert shared_hub.api().model_info(REPO).sha == before


@pytest.mark.parametrize("name", ["..", "a/..", "../../x", "a\0", "x" * 200, ".hidden", "a--b", "x.git", ""])
def test_hostile_repository_names(shared_hub, name):
    answer = httpx2.post(
        f"{shared_hub.url}/api/repos/create",
        headers={"Authorization": f"Bearer {shared_hub.token}"},
        json={"name": name, "organization": "local"},
    )
    assert answer.status_code == 400
    answer = httpx2.post(
        f"{shared_hub.url}/api/repos/create",
        headers={"Authorization": f"Bearer {shared_hub.token}"},
        json={"name": "m", "organization": name},
    )
    assert answer.status_code == 400
    assert {path.parts[-2:] for path in (shared_hub.root / "repos").glob("*/*/*")} <= {("local", "m.git")}


MALFORMED = ["", "{}", "[]", "nonsense", '{"key": 1, "value": {}}', '{"key": "file", "value": {}}', "[" * 100_000]


@pytest.mark.parametrize("body", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_commits(shared_hub, body):
    api = shared_hub.api()
    api.create_repo(REPO, exist_ok=True)
    before = api.model_info(REPO).sha
    answer = httpx2.post(
        f"{shared_hub.url}/api/models/{REPO}/commit/main",
        headers={"Authorization": f"Bearer {shared_hub.token}"},
        content=body,
    )
    assert answer.status_code == 400
    assert api.model_info(REPO).sha == before


def test_only_known_host_names_are_served(shared_hub):
    shared_hub.api().create_repo(REPO, exist_ok=True)
    path = f"/api/models/{REPO}"
    for host, status in (
        ("127.0.0.1", 200),
        ("localhost:1234", 200),
        ("[::1]:80", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ):
        answer = request(shared_hub, f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
        assert int(answer.split(b" ", 2)[1]) == status, host
    assert b" 403 " in request(shared_hub, f"GET {path} HTTP/1.1\r\nConnection: close\r\n\r\n")


@pytest.mark.parametrize(
    "text",
    [
        "NONSENSE\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        "BREW / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "POST /api/repos/create HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        "POST /api/repos/create HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n",
        "POST /api/repos/create HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        "POST /api/repos/create HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{",
        "GET / HTTP/1.1\r\nHost: localhost\r\n" + "A: b\r\n" * 300 + "\r\n",
    ],
)
def test_malformed_requests_do_no_harm(shared_hub, text):
    answer = request(shared_hub, text)
    assert not answer.startswith(b"HTTP/1.1 2")
    assert b"Traceback" not in answer
    assert shared_hub.api().whoami()["name"] == "local"


def test_secrets_are_not_for_everyone(hub):
    hub.api().create_repo(REPO)
    for name in ("tokens.json", "secret"):
        assert stat.S_IMODE((hub.root / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(hub.root.stat().st_mode) == 0o700
    for path in hub.root.rglob("*"):
        assert path.is_dir() or hub.token.encode() not in path.read_bytes()
    assert hub.token not in hub.log.read_text()


def test_git_can_clone_the_stored_repository(hub, tmp_path):
    hub.api().create_repo(REPO)
    put(hub.api(), "d/a.txt", b"text")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(hub.git_dir(REPO)), str(clone)], check=True)
    assert (clone / "d" / "a.txt").read_bytes() == b"text"


@pytest.mark.parametrize("module", ["cli", "xet_store", "xet_format"])
def test_nothing_heavy_is_imported_at_start(module):
    code = (
        f"import sys; import rlhf_zoo.hub.server.{module}; "
        "heavy = {'torch', 'transformers', 'datasets', 'huggingface_hub', 'dulwich', 'yaml', 'httpx2', 'http.server', "
        "'numpy', 'lz4', 'blake3'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
