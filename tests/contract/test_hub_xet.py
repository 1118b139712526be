"""Uploads by Xet, the default of the unmodified client, each in its own client process."""

import hashlib
import json
import logging
import os
import random
import re
import resource
import signal
import struct
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import httpx2
import lz4.frame
import pytest
from test_hub_storage import rss_mib
from warm import PYTHON

from rlhf_zoo.hub.server import xet_format, xet_store
from rlhf_zoo.hub.server.names import RepoId
from rlhf_zoo.hub.server.storage import Storage
from rlhf_zoo.hub.server.tokens import Signer

REPO = "local/m"
XET = {"HF_HUB_DISABLE_XET": "0"}
# hf-xet retries errors of the server for minutes; tests do not wait that long.
FAST_RETRIES = XET | {"HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "1", "HF_XET_CLIENT_RETRY_BASE_DELAY": "50ms"}


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def files_of(hub, cache: Path, revision: str = "main") -> dict[str, str]:
    """Downloads a revision and returns the SHA-256 of each file."""
    folder = Path(hub.api().snapshot_download(REPO, revision=revision, cache_dir=cache))
    return {str(path.relative_to(folder)): digest(path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def store_of(hub, repo: str = REPO) -> Path:
    """Returns the folder of the only epoch."""
    (folder,) = xet_store._list_epochs(hub.git_dir(repo) / "xet")
    return folder


def stored_file(hub, sha256: str) -> Path:
    return hub.git_dir(REPO) / "lfs" / "objects" / sha256[:2] / sha256[2:4] / sha256


def uploaded_bytes(hub, repo: str = REPO) -> int:
    """Returns the number of content bytes in all xorbs of the epoch."""
    xorbs = (store_of(hub, repo) / "xorbs").iterdir()
    chunks = [(xorb, at) for xorb in (path.open("rb") for path in xorbs) for at in xet_format.find_chunk_offsets(xorb)]
    return sum(len(xet_format.read_chunk(xorb, at)) for xorb, at in chunks)


def is_tidy(hub) -> bool:
    """Whether no partial file is left."""
    folders = [store_of(hub) / "incomplete", hub.git_dir(REPO) / "lfs" / "incomplete"]
    return not any(path for folder in folders for path in folder.iterdir())


def fsck(hub) -> None:
    assert hub.git(REPO, "fsck", "--full", "--strict") == ""


#: Pushes the folder `files` by two calls, and pulls it again: prints the sha256 of every file.
PUSH_AND_PULL = f"""
import hashlib, json
from pathlib import Path
from huggingface_hub import CommitOperationAdd, HfApi, snapshot_download
api = HfApi()
api.create_repo("{REPO}")
files = {{str(path.relative_to("files")): path for path in Path("files").rglob("*") if path.is_file()}}
content = files.pop("random.bin").read_bytes()
api.upload_file(path_or_fileobj=content, path_in_repo="random.bin", repo_id="{REPO}")
operations = [CommitOperationAdd(path, file) for path, file in files.items()]
api.create_commit("{REPO}", operations, commit_message="All sorts")
folder = Path(snapshot_download("{REPO}"))
files = [path for path in folder.rglob("*") if path.is_file()]
print(json.dumps({{str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}}))
"""


def test_xet_round_trips_files_of_all_kinds(in_process_hub, tmp_path, monkeypatch, caplog):
    """The real client uses all three compression schemes: it groups the bytes of weights before compressing."""
    schemes = set()
    unpack = xet_format.unpack
    monkeypatch.setattr(xet_format, "unpack", lambda scheme, *args: (schemes.add(scheme), unpack(scheme, *args))[1])
    rng = random.Random(0)
    files = {
        "random.bin": rng.randbytes(3_000_001),
        "normal.safetensors": array("f", [rng.gauss(0, 0.02) for _ in range(400_000)]).tobytes(),
        "odd.bin": array("f", [rng.gauss(0, 1) for _ in range(50_000)]).tobytes() + b"abc",
        "zeros.bin": bytes(2_000_000),
        "text.bin": b"the same line again and again\n" * 40_000,
        "one.bin": b"\0",
        "empty.bin": b"",
        "folder/a b/ü.npy": rng.randbytes(70_000),
        "notes.txt": b"a regular file\n",
    }
    for path, content in files.items():
        (tmp_path / "files" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / path).write_bytes(content)
    with caplog.at_level(logging.INFO, "rlhf_zoo.hub.server"):
        pulled = json.loads(in_process_hub.python(PUSH_AND_PULL, cwd=tmp_path, **XET).splitlines()[-1])
    assert {path: pulled.get(path) for path in files} == {path: digest(content) for path, content in files.items()}
    assert schemes == {0, 1, 2}
    assert caplog.text.count("/v1/shards 200") == 2
    assert "PUT /_lfs/" not in caplog.text
    large = {s.rfilename for s in in_process_hub.api().model_info(REPO, files_metadata=True).siblings if s.lfs}
    assert large == set(files) - {"notes.txt", "empty.bin"}
    # Downloads never go by Xet, though the client could.
    head = in_process_hub.send("HEAD", f"/{REPO}/resolve/main/random.bin")
    assert not [name for name in head.headers if "xet" in name.lower()]
    assert "xet-read-token" not in caplog.text
    assert is_tidy(in_process_hub)
    fsck(in_process_hub)


def test_xet_uploads_known_content_only_once(in_process_hub, tmp_path):
    """Within a process and across processes, because hf-xet records on disk what it has sent."""
    make_files = """
import random, sys
rng = random.Random(7)
base, other = rng.randbytes(8_000_000), rng.randbytes(300_000)
files = {"a.bin": base, "b.bin": base[:4_000_000] + other + base[4_000_000:], "c.bin": other + base}
"""
    code = f"""{make_files}
from huggingface_hub import HfApi
api = HfApi()
api.create_repo("{REPO}", exist_ok=True)
for path in sys.argv[1:]:
    api.upload_file(path_or_fileobj=files[path], path_in_repo=path, repo_id="{REPO}")
"""
    in_process_hub.run(sys.executable, "-c", code, "a.bin", "b.bin", **XET)
    assert 8_300_000 <= uploaded_bytes(in_process_hub) < 9_000_000
    in_process_hub.run(sys.executable, "-c", code, "c.bin", **XET)
    assert uploaded_bytes(in_process_hub) < 9_500_000
    namespace: dict = {}
    exec(make_files, namespace)
    assert (
        files_of(in_process_hub, tmp_path).items()
        >= {path: digest(content) for path, content in namespace["files"].items()}.items()
    )
    # Repositories share no content, because their readers may differ.
    in_process_hub.run(sys.executable, "-c", code.replace(REPO, "local/other"), "a.bin", **XET)
    assert uploaded_bytes(in_process_hub, "local/other") == 8_000_000


ENDLESS = f"""
import random
from huggingface_hub import CommitOperationAdd, HfApi
api = HfApi()
number = START
base = random.Random(1).randbytes(600_000)
while True:
    new = random.Random(number).randbytes(400_000)
    operations = [CommitOperationAdd("w.bin", base + new), CommitOperationAdd(f"f{{number}}.txt", b"x" * 10_000)]
    print(api.create_commit("{REPO}", operations, commit_message=f"Step {{number}}").oid, flush=True)
    number += 1
"""


@pytest.mark.parametrize("delay", [0.2, *(pytest.param(delay, marks=pytest.mark.full) for delay in (0.05, 0.4))])
def test_killed_server_keeps_last_commit_intact(hubs, tmp_path, delay):
    """A client pushes without pause while the server is killed, and continues with a new server at the same address."""
    hub = hubs("one")
    hub.api().create_repo(REPO)
    command = [*PYTHON, "-c", ENDLESS.replace("START", "0")]
    pusher = subprocess.Popen(command, env=hub.env | FAST_RETRIES, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert pusher.stdout is not None
    acknowledged = [pusher.stdout.readline().decode().strip()]
    time.sleep(delay)
    hub.stop(signal.SIGKILL)
    pusher.kill()
    acknowledged += pusher.stdout.read().decode().split()
    pusher.wait()
    hub.git(REPO, "fsck", "--full", "--strict")
    history = hub.git(REPO, "log", "--format=%H").split()
    assert history[-len(acknowledged) - 1 : -1] == acknowledged[::-1]
    assert len(history) - 1 - len(acknowledged) in (0, 1)
    # At the same address the client relies on what it sent before the kill.
    restarted = hubs("again", "--port", hub.url.rpartition(":")[2], root=hub.root)
    pushed = len(history) - 1
    code = ENDLESS.replace("START", str(pushed)).replace("while True", f"while number <= {pushed}")
    oid = restarted.python(code, **FAST_RETRIES, HF_HOME=hub.env["HF_HOME"]).split()[-1]
    assert restarted.git(REPO, "log", "--format=%H").split()[:2] == [oid, history[0]]
    for revision, number in ((oid, pushed), (history[0], pushed - 1)):
        content = random.Random(1).randbytes(600_000) + random.Random(number).randbytes(400_000)
        assert files_of(restarted, tmp_path, revision)["w.bin"] == digest(content)
    restarted.git(REPO, "fsck", "--full", "--strict")


def test_full_disk_fails_upload_and_keeps_files(hubs, tmp_path):
    """A limit on the size of files stands in for a full disk: the kernel stops the write in the middle."""
    limit = 4_000_000
    hub = hubs("full", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    code = f"""
import random
from huggingface_hub import HfApi
api = HfApi()
api.create_repo("{REPO}", exist_ok=True)
rng = random.Random(2)
fits = rng.randbytes(3_000_000)
api.upload_file(path_or_fileobj=fits, path_in_repo="fits.bin", repo_id="{REPO}")
# Too large as a xorb; and small as a xorb, too large as the file.
for content in (rng.randbytes(6_000_000), bytes(6_000_000)):
    try:
        api.upload_file(path_or_fileobj=content, path_in_repo="large.bin", repo_id="{REPO}")
    except Exception as error:
        print("refused", "507" in str(error))
api.upload_file(path_or_fileobj=fits[:1_000_000], path_in_repo="still.bin", repo_id="{REPO}")
"""
    assert hub.python(code, **FAST_RETRIES).split() == ["refused", "True"] * 2
    log = hub.log.read_text()
    assert "disk is full: free some space" in log
    assert re.search(r"POST \S+/v1/xorbs/\S+ 507 ", log)
    assert re.search(r"POST \S+/v1/shards 507 ", log)
    assert "Traceback" not in log
    stored, fits = files_of(hub, tmp_path), random.Random(2).randbytes(3_000_000)
    assert (stored["fits.bin"], stored["still.bin"]) == (digest(fits), digest(fits[:1_000_000]))
    assert "large.bin" not in stored
    assert is_tidy(hub)
    fsck(hub)


def test_xet_upload_is_streamed(hubs, tmp_path):
    hub = hubs("one")
    code = f"""
from huggingface_hub import HfApi
HfApi().create_repo("{REPO}", exist_ok=True)
HfApi().upload_file(path_or_fileobj="NAME", path_in_repo="NAME", repo_id="{REPO}")
"""
    (tmp_path / "warm.bin").write_bytes(os.urandom(1_000_000))
    (tmp_path / "w.bin").write_bytes(os.urandom(100 * 2**20))
    hub.python(code.replace("NAME", "warm.bin"), cwd=tmp_path, **XET)
    before, _ = rss_mib(hub.process.pid)
    hub.python(code.replace("NAME", "w.bin"), cwd=tmp_path, **XET)
    _, peak = rss_mib(hub.process.pid)
    oid = digest((tmp_path / "w.bin").read_bytes())
    assert digest(stored_file(hub, oid).read_bytes()) == oid
    assert peak - before < 60


# Hand-written requests that the real client would not send


def pack_chunk(content: bytes, scheme: int = 0) -> bytes:
    """Returns a chunk in the format of a xorb."""
    stored = lz4.frame.compress(content) if scheme else content
    return b"\0" + len(stored).to_bytes(3, "little") + bytes([scheme]) + len(content).to_bytes(3, "little") + stored


def hash_bytes(text: str) -> bytes:
    return struct.pack("<4Q", *(int(text[start : start + 16], 16) for start in range(0, 64, 16)))


ENTRY = struct.Struct("<32s4I")
END = b"\xff" * 32 + bytes(16)


def shard(*files: tuple[str, list[tuple]], flags: int = 3 << 30, tail: bytes = END + END) -> bytes:
    """Returns a shard of files: (sha256, [(xorb, start, end, bytes)])."""
    data = xet_format._SHARD_MAGIC + bytes(8)
    for sha256, ranges in files:
        data += ENTRY.pack(bytes(32), flags, len(ranges), 0, 0)
        data += b"".join(ENTRY.pack(hash_bytes(x), 0, size, start, end) for x, start, end, size in ranges)
        data += bytes(ENTRY.size) * len(ranges)
        data += ENTRY.pack(hash_bytes(sha256), 0, 0, 0, 0)
    return data + tail


class Store:
    """A hand-written client of a repository's Xet store."""

    def __init__(self, hub, repo: str = REPO, token: str | None = None) -> None:
        answer = httpx2.get(
            f"{hub.url}/api/models/{repo}/xet-write-token/main",
            headers={"Authorization": f"Bearer {token or hub.token}"},
        )
        assert answer.status_code == 200, answer.text
        self.url, self.token = answer.json()["casUrl"], answer.json()["accessToken"]
        self.expiry = answer.json()["exp"]
        names = ("X-Xet-Cas-Url", "X-Xet-Access-Token", "X-Xet-Token-Expiration")
        assert [answer.headers[name] for name in names] == [self.url, self.token, str(self.expiry)]

    def post(self, path: str, content, token: str | None = None) -> httpx2.Response:
        headers = {"Authorization": f"Bearer {token or self.token}"}
        return httpx2.post(f"{self.url}/v1/{path}", content=content, headers=headers, timeout=60)

    def xorb(self, *chunks: bytes, scheme: int = 0) -> str:
        name = digest(b"".join(chunks))
        answer = self.post(f"xorbs/default/{name}", b"".join(pack_chunk(chunk, scheme) for chunk in chunks))
        assert answer.json() == {"was_inserted": True}, answer.text
        return name


@pytest.fixture
def hub(in_process_hub):
    """A Hub in this process, which makes these tests faster."""
    return in_process_hub


@pytest.fixture
def store(hub) -> Store:
    hub.api().create_repo(REPO)
    return Store(hub)


CHUNKS = [random.Random(5).randbytes(10_001), b"again " * 5_000, bytes(range(256)) * 40 + b"!"]


def one_file(name: str) -> tuple[str, list[tuple]]:
    content = CHUNKS[0] + CHUNKS[1]
    return digest(content), [(name, 0, 2, len(content))]


def test_store_accepts_hand_written_requests(hub, store):
    name = store.xorb(*CHUNKS, scheme=1)
    body = b"".join(pack_chunk(chunk) for chunk in CHUNKS)
    assert store.post(f"xorbs/default/{name}", body).json() == {"was_inserted": False}
    # With a footer and without a Content-Length.
    pieces = iter([body, b"XETBLOB\1" + bytes(5_000)])
    assert store.post(f"xorbs/default/{'0' * 64}", pieces).json() == {"was_inserted": True}
    content = CHUNKS[1] + CHUNKS[2] + CHUNKS[0]
    ranges = [(name, 1, 3, len(CHUNKS[1] + CHUNKS[2])), ("0" * 64, 0, 1, len(CHUNKS[0]))]
    sha256 = digest(content)
    assert store.post("shards", shard((sha256, ranges))).json() == {"result": 1}
    assert stored_file(hub, sha256).read_bytes() == content
    # A later shard may refer to the xorb; a file that is already stored is checked again.
    part = (name, 2, 3, len(CHUNKS[2]))
    assert store.post("shards", shard((digest(CHUNKS[2] * 2), [part, part]), (sha256, ranges))).status_code == 200
    assert store.post("shards", shard((sha256, ranges[::-1]))).status_code == 400


HEADER = pack_chunk(CHUNKS[0])[:8]
BOMB = lz4.frame.compress(bytes(50_000_000))[:131072]
BAD_CHUNKS = {
    "cut short": pack_chunk(CHUNKS[0])[:-1],
    "header alone": HEADER[:5],
    "unknown version": b"\7" + pack_chunk(CHUNKS[0])[1:],
    "unknown scheme": HEADER[:4] + b"\3" + pack_chunk(CHUNKS[0])[5:],
    "not LZ4": HEADER[:4] + b"\1" + pack_chunk(CHUNKS[0])[5:],
    "other length": pack_chunk(CHUNKS[1], 1)[:5] + (17).to_bytes(3, "little") + pack_chunk(CHUNKS[1], 1)[8:],
    "no length": bytes(8),
    "bomb": b"\0" + len(BOMB).to_bytes(3, "little") + b"\1" + (131072).to_bytes(3, "little") + BOMB,
    "chunk too long": pack_chunk(bytes(131_073)),
    "other content": pack_chunk(CHUNKS[2]),
    "footer alone": b"XETBLOB\1",
}


def test_malformed_xorb_fails_only_its_file(hub, store):
    """It is detected when a file is built from it. The next attempt gets a new epoch, and can succeed."""
    assert store.post(f"xorbs/default/{'0' * 64}", b"").status_code == 400
    file = digest(CHUNKS[0]), [("0" * 64, 0, 1, len(CHUNKS[0]))]
    for case, body in BAD_CHUNKS.items():
        fresh = Store(hub)
        assert fresh.post(f"xorbs/default/{'0' * 64}", body).status_code == 200
        assert fresh.post("shards", shard(file)).status_code == 400, case
    assert not list((hub.git_dir(REPO) / "lfs" / "objects").rglob("*"))
    fresh = Store(hub)
    assert fresh.post(f"xorbs/default/{'0' * 64}", pack_chunk(CHUNKS[0])).json() == {"was_inserted": True}
    assert fresh.post("shards", shard(file)).status_code == 200
    assert not any(path.name.startswith("0" * 64) for path in hub.git_dir(REPO).glob("xet/*/incomplete/*"))


def bad_shards(name: str) -> Iterator[tuple[str, bytes]]:
    good = shard(one_file(name))
    sha256, [(_, start, end, size)] = one_file(name)
    yield "empty", b""
    yield "noise", random.Random(1).randbytes(500)
    yield "other version", good[:32] + struct.pack("<Q", 3) + good[40:]
    yield from ((f"cut at {cut}", good[:cut]) for cut in range(40, len(good), 41))
    yield "huge count", good[:48] + ENTRY.pack(bytes(32), 3 << 30, 0xFFFFFFFF, 0, 0) + good[96:]
    yield "huge count of xorbs", shard(tail=END + ENTRY.pack(bytes(32), 0, 0xFFFFFFFF, 0, 0))
    yield "not a sha256", shard(one_file(name), flags=1 << 31)
    yield "other sha256", shard((digest(b""), [(name, start, end, size)]))
    yield "other length", shard((sha256, [(name, start, end, size + 1)]))
    yield "chunks out of range", shard((sha256, [(name, 0, 9, size)]))
    yield "chunks in reverse", shard((sha256, [(name, 2, 0, size)]))
    yield "unknown xorb", shard(one_file("ab" * 32))


def test_malformed_shard_is_rejected(hub, store):
    name = store.xorb(*CHUNKS[:2])
    for case, body in bad_shards(name):
        answer = store.post("shards", body)
        assert answer.status_code == 400, (case, answer.text)
    assert not list((hub.git_dir(REPO) / "lfs" / "objects").rglob("*"))
    assert not list((hub.git_dir(REPO) / "lfs" / "incomplete").iterdir())
    assert Store(hub).url != store.url  # a client that relies on missing content starts again
    assert store.post("shards", shard(one_file(name))).status_code == 200  # uploads under way can still finish


def test_oversized_request_is_rejected(hub, store):
    big = bytes(2**20)
    for path, count in ((f"xorbs/default/{'ab' * 32}", 66), ("shards", 65)):
        assert store.post(path, big * count).status_code == 413
        assert store.post(path, (big for _ in range(count))).status_code == 413  # the body itself is counted
    assert [path for path in store_of(hub).rglob("*") if path.is_file()] == []


def test_hostile_xorb_and_epoch_names_are_rejected(hub, store):
    before = sorted(hub.root.rglob("*"))
    for name in ("..%2F..%2F..%2Fconfig", "..", "%2Fetc%2Fpasswd", "A" * 64, "0" * 63, "0" * 65, "0" * 5000, "%00"):
        assert store.post(f"xorbs/default/{name}", pack_chunk(CHUNKS[0])).status_code in (400, 404, 405), name
    base = store.url.removeprefix(hub.url).rpartition("/")[0]
    for other in ("..", "..%2F..", "0" * 32, "lock", "%2e%2e"):
        answer = hub.send("POST", f"{base}/{other}/v1/shards", b"", role=None, Authorization=f"Bearer {store.token}")
        assert answer.status in (400, 401, 404, 405), (other, answer)
    assert sorted(hub.root.rglob("*")) == before


def test_store_accepts_only_its_own_token(hub, store):
    api = hub.api()
    api.create_repo("local/other")
    other = Store(hub, "local/other")
    signer = Signer(hub.root)
    claims = ("xet", f"models/{REPO}", Storage(hub.root).settings(RepoId("model", "local", "m")).created)
    name = digest(CHUNKS[0])
    body = pack_chunk(CHUNKS[0])
    assert time.time() + 3000 < store.expiry < time.time() + 4000
    assert hub.token not in store.token
    for case, token in {
        "the user's": hub.token,
        "another repository's": other.token,
        "expired": signer.sign(*claims, seconds=-5),
        "an earlier repository's": signer.sign(*claims[:2], "2026-01-01T00:00:00.000Z"),
        "of an upload link": signer.sign("PUT", f"models/{REPO}", "a" * 64, "5", "0"),
    }.items():
        for path, content in ((f"xorbs/default/{name}", body), ("shards", shard())):
            answer = store.post(path, content, token=token)
            assert answer.status_code == 401, (case, path, answer.text)
    assert hub.send("POST", f"{store.url}/v1/shards", shard(), role=None).status == 401
    assert [path for path in store_of(hub).rglob("*") if path.is_file()] == []
    # A Xet token opens nothing but its store.
    for url in ("api/whoami-v2", f"api/models/{REPO}"):
        assert hub.send("GET", f"/{url}", role=None, Authorization=f"Bearer {store.token}").status == 401
    assert store.post(f"xorbs/default/{name}", body).status_code == 200
    assert store.post("shards", shard(), token=signer.sign(*claims, seconds=5)).status_code == 200


def test_xet_token_requires_write_access(hub):
    api = hub.api()
    api.create_repo(REPO, private=True)
    api.create_repo("local/open")

    def status(repo: str, role: str | None, *, revision: str = "main") -> tuple[int, str | None]:
        answer = hub.send("GET", f"/api/models/{repo}/xet-write-token/{revision}", role=role)
        return answer.status, answer.headers.get("X-Error-Code")

    assert status(REPO, None) == (401, "RepoNotFound")
    assert status("local/none", None) == (401, "RepoNotFound")
    assert status("local/open", None) == (401, None)
    assert status(REPO, "read") == status("local/open", "read") == (403, None)
    assert status("local/none", "write") == (404, "RepoNotFound")
    assert status(REPO, "write", revision="none") == (404, "RevisionNotFound")
    for revision in ("None", "refs%2Fpr%2F1"):
        assert status(REPO, "write", revision=revision) == (403, None)
    assert status(REPO, "write") == (200, None)
    for kind in ("dataset", "space"):
        hub.api().create_repo("local/x", repo_type=kind, space_sdk="static")
        assert hub.send("GET", f"/api/{kind}s/local/x/xet-write-token/main").status == 200


def test_sweep_removes_idle_epoch(hub, store):
    """An epoch takes new uploads for one hour, and is removed after two hours without an upload."""
    name = store.xorb(*CHUNKS)
    assert Store(hub).url == store.url
    first = store_of(hub)

    def set_age(path: Path, seconds: float) -> None:
        os.utime(path, (time.time() - seconds,) * 2)

    set_age(first, 8000)
    fresh = Store(hub)
    assert fresh.url != store.url
    assert store.post("shards", shard(one_file(name))).status_code == 200  # an upload under way may still end there
    set_age(first, 8000)
    set_age(first / "xorbs", 8000)
    Storage(hub.root).sweep()
    assert store_of(hub).name == fresh.url.rpartition("/")[2]
    assert store.post("shards", shard()).status_code == 404


def test_store_is_write_only(hub, store):
    name = store.xorb(*CHUNKS)
    for path in (f"xorbs/default/{name}", "reconstructions/" + "0" * 64, "chunks/default-merkledb/" + "0" * 64):
        answer = hub.send("GET", f"{store.url}/v1/{path}", role=None, Authorization=f"Bearer {store.token}")
        assert answer.status in (404, 405)
    assert store.post(f"xorb-grants/default/{name}", b"{}").status_code == 404
    assert hub.send("POST", "/v1/telemetry", {}, role=None, Authorization="Bearer x").status == 200
