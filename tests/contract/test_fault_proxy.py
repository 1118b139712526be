"""The proxy that injects faults: each kind, as the real client meets it."""

from __future__ import annotations

import hashlib
import http.client
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
from fault_proxy import Fault, FaultProxy, operation
from hub_fixture import RunningHub
from huggingface_hub import CommitOperationAdd, HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from warm import PYTHON

REPO = "local/m"
LARGE = os.urandom(400_000)
FILES = {"config.json": b'{"a": 1}\n', "model.safetensors": LARGE}


@pytest.fixture
def proxy(hub: RunningHub) -> Iterator[FaultProxy]:
    with FaultProxy(hub.url) as proxy:
        yield proxy


@pytest.fixture
def api(hub: RunningHub, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> HfApi:
    """A client of the proxy, with an empty repository; its waits between attempts are short."""
    hurried = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: time.sleep(seconds / 50)})
    monkeypatch.setattr("huggingface_hub.utils._http.time", hurried)
    hub.api().create_repo(REPO)
    return HfApi(endpoint=proxy.url, token=hub.token)


def push(api: HfApi, files: dict[str, bytes] = FILES) -> str:
    operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in files.items()]
    return api.create_commit(REPO, operations, commit_message="Files").oid


def pull(api: HfApi, folder: Path) -> dict[str, bytes]:
    path = Path(snapshot_download(REPO, endpoint=api.endpoint, token=api.token, cache_dir=folder))
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name in FILES}


def commits(hub: RunningHub) -> int:
    return len(hub.api().list_repo_commits(REPO))


# Passing through


def test_what_passes_is_byte_identical(hub, proxy, api, tmp_path):
    commit = push(api)
    api.create_tag(REPO, tag="v1", revision=commit, tag_message="One")
    assert pull(api, tmp_path) == FILES
    assert [ref.name for ref in hub.api().list_repo_refs(REPO).tags] == ["v1"]
    counts = proxy.counts
    assert not counts.faults
    once = ("preupload", "lfs_batch", "lfs_upload", "commit", "create_tag")
    assert [counts.requests[name] for name in once] == [1] * len(once)
    assert counts.requests["other"] == 0
    assert {seen.status for seen in proxy.seen} <= {200, 307}


def test_answers_are_those_of_the_hub(hub, proxy, api):
    """Heads and bodies of every framing, up to the date and to links, which name whom the client asked."""
    push(api)
    wanted = [
        ("GET", f"/api/models/{REPO}?blobs=True"),
        ("GET", f"/{REPO}/resolve/main/model.safetensors"),
        ("HEAD", f"/{REPO}/resolve/main/model.safetensors"),
        ("GET", f"/{REPO}/resolve/main/none"),
        ("GET", "/api/models/local/none"),
    ]

    def answers(url: str) -> list[tuple[int, list[tuple[str, str]], bytes]]:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
        found = []
        for method, path in wanted:  # one connection for all: the proxy keeps it
            headers = {"Authorization": f"Bearer {hub.token}", "Range": "bytes=7-300006"}
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            head = [(name, value) for name, value in answer.getheaders() if name != "Date"]
            found.append((answer.status, head, answer.read().replace(url.encode(), b"URL")))
        connection.close()
        return found

    through = answers(proxy.url)
    assert through == answers(hub.url)
    assert through[1][0] == 206 and through[1][2] == LARGE[7:300007]


def test_chunked_bodies_pass(hub, proxy, api):
    oid = hashlib.sha256(LARGE).hexdigest()
    href = upload_link(hub, proxy, oid)
    assert href.startswith(proxy.url)
    pieces = (LARGE[start : start + 30_001] for start in range(0, len(LARGE), 30_001))
    assert httpx2.put(href, content=pieces).status_code == 200
    assert stored(hub, oid) == LARGE


def upload_link(hub: RunningHub, proxy: FaultProxy, oid: str) -> str:
    answer = httpx2.post(
        f"{proxy.url}/{REPO}.git/info/lfs/objects/batch",
        headers={"Authorization": f"Bearer {hub.token}"},
        json={"operation": "upload", "objects": [{"oid": oid, "size": len(LARGE)}]},
    )
    return answer.json()["objects"][0]["actions"]["upload"]["href"]


def stored(hub: RunningHub, oid: str) -> bytes | None:
    path = hub.git_dir(REPO) / "lfs/objects" / oid[:2] / oid[2:4] / oid
    return path.read_bytes() if path.exists() else None


# Faults


def test_refused_before_the_hub_hears_of_it(hub, proxy, api):
    proxy.inject(Fault("refuse", "create_repo"), Fault("refuse", "create_tag", status=412), Fault("refuse", "commit"))
    with pytest.raises(HfHubHTTPError, match="500"):
        api.create_repo("local/other")
    assert not hub.api().repo_exists("local/other")
    with pytest.raises(HfHubHTTPError, match="500"):
        push(api)
    assert commits(hub) == 1
    with pytest.raises(HfHubHTTPError, match="412"):
        api.create_tag(REPO, tag="v1")
    assert not hub.api().list_repo_refs(REPO).tags
    assert proxy.counts.faults == {"refuse 500": 2, "refuse 412": 1}
    push(api)
    assert commits(hub) == 2
    assert proxy.counts.requests["lfs_upload"] == 1  # the file had arrived before the commit was refused


def test_refused_after_the_hub_has_done_it(hub, proxy, api):
    proxy.inject(Fault("refuse", "commit", forwarded=True), Fault("drop", "create_tag", forwarded=True))
    with pytest.raises(HfHubHTTPError, match="500"):
        push(api)
    assert commits(hub) == 2
    with pytest.raises(httpx2.RemoteProtocolError):
        api.create_tag(REPO, tag="v1")
    assert [ref.name for ref in hub.api().list_repo_refs(REPO).tags] == ["v1"]
    assert proxy.counts.faults == {"refuse 500 forwarded": 1, "drop forwarded": 1}


def test_too_many_requests(hub, proxy, api, monkeypatch):
    """The client honours Retry-After (and adds a second) where it tries again by itself."""
    waits: list[float] = []
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(**vars(time) | {"sleep": waits.append}))
    proxy.inject(Fault("refuse", "lfs_batch", status=429, seconds=3, count=2))
    push(api)
    assert waits == [4, 4]
    assert proxy.counts.faults == {"refuse 429": 2}
    assert proxy.counts.requests["lfs_batch"] == 3


def test_nth_and_count_and_path(hub, proxy, api):
    proxy.inject(
        Fault("refuse", method="POST", path=r"/tag/", nth=2, count=2),
        Fault("refuse", "create_tag", nth=4, status=412),
        Fault("refuse", "refs", count=None),
    )
    statuses = []
    for number in range(5):
        try:
            api.create_tag(REPO, tag=f"v{number}")
            statuses.append(200)
        except HfHubHTTPError as error:
            statuses.append(error.response.status_code)
    assert statuses == [200, 500, 500, 412, 200]
    for _ in range(3):
        with pytest.raises(HfHubHTTPError, match="500"):
            api.list_repo_refs(REPO)
    proxy.clear()
    assert [ref.name for ref in api.list_repo_refs(REPO).tags] == ["v0", "v4"]
    assert [(seen.fault, seen.status) for seen in proxy.seen if seen.operation == "create_tag"] == [
        (None, 200), ("refuse 500", 500), ("refuse 500", 500), ("refuse 412", 412), (None, 200),
    ]  # fmt: skip


def test_closed_without_an_answer(hub, proxy, api):
    proxy.inject(Fault("drop", "commit"))
    with pytest.raises(httpx2.RemoteProtocolError):
        push(api)
    assert commits(hub) == 1
    assert proxy.counts.faults == {"drop": 1}
    assert [seen.status for seen in proxy.seen if seen.operation == "commit"] == [None]


def test_closed_in_the_middle_of_an_upload(hub, proxy, api):
    """Both sides are torn: the Hub keeps nothing of it, and the client's own second attempt is whole."""
    oid = hashlib.sha256(LARGE).hexdigest()
    href = upload_link(hub, proxy, oid)
    proxy.inject(Fault("cut_upload", "lfs_upload", size=150_000))
    with pytest.raises(httpx2.TransportError):
        httpx2.put(href, content=LARGE)
    assert stored(hub, oid) is None
    proxy.inject(Fault("cut_upload", "lfs_upload", size=150_000))
    push(api)
    assert stored(hub, oid) == LARGE
    assert proxy.counts.faults == {"cut_upload": 2}
    assert proxy.counts.requests["lfs_upload"] == 3


def test_closed_in_the_middle_of_a_commit(hub, proxy, api):
    proxy.inject(Fault("cut_upload", "commit", size=100))
    with pytest.raises(httpx2.TransportError):
        push(api, {"config.json": b" " * 200_000})
    assert commits(hub) == 1
    assert proxy.counts.faults == {"cut_upload": 1}


def test_closed_in_the_middle_of_a_download(hub, proxy, api, tmp_path):
    push(api)
    proxy.inject(Fault("cut_download", "download", path="model", size=100_000))
    with httpx2.stream("GET", f"{proxy.url}/{REPO}/resolve/main/model.safetensors") as answer:
        arrived: list[bytes] = []
        with pytest.raises(httpx2.TransportError):
            arrived.extend(answer.iter_raw())
    assert b"".join(arrived) == LARGE[:100_000]
    proxy.inject(Fault("cut_download", "download", path="model", size=100_000))
    path = hf_hub_download(REPO, "model.safetensors", endpoint=proxy.url, token=api.token, cache_dir=tmp_path)
    assert Path(path).read_bytes() == LARGE
    assert proxy.counts.faults == {"cut_download": 2}


def test_delay(proxy, api):
    for forwarded in (False, True):
        proxy.inject(Fault("delay", "refs", seconds=0.5, forwarded=forwarded))
        started = time.monotonic()
        api.list_repo_refs(REPO)
        assert time.monotonic() - started >= 0.5
        started = time.monotonic()
        api.list_repo_refs(REPO)
        assert time.monotonic() - started < 0.5
    assert proxy.counts.faults == {"delay": 1, "delay forwarded": 1}


def test_down_until_told(hub, proxy, api):
    kept = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)
    kept.request("GET", "/api/rlhf-zoo")
    assert kept.getresponse().read()
    proxy.down()
    for _ in range(3):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", proxy.port), timeout=5)
    assert kept.sock.recv(1) == b""  # a connection from before is cut
    proxy.up()
    assert push(api)
    assert proxy.counts.faults == {"down": 1}


def test_down_for_a_time(hub, proxy, api):
    """An upload that was under way is torn, and its next attempts come through once the port answers again."""
    proxy.inject(Fault("hold", "lfs_upload"))
    pushing = threading.Thread(target=push, args=(api,))
    pushing.start()
    proxy.wait_held()
    proxy.down(0.5)
    proxy.release()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", proxy.port), timeout=5)
    pushing.join(60)
    assert commits(hub) == 2
    assert proxy.counts.faults == {"hold": 1, "down": 1}
    assert proxy.counts.requests["lfs_upload"] == 2


def test_held_until_released(hub, proxy, api):
    proxy.inject(Fault("hold", "create_tag"))
    thread = threading.Thread(target=api.create_tag, args=(REPO,), kwargs={"tag": "v1"})
    thread.start()
    proxy.wait_held()
    assert not hub.api().list_repo_refs(REPO).tags
    proxy.release()
    thread.join(60)
    assert [ref.name for ref in hub.api().list_repo_refs(REPO).tags] == ["v1"]


CLIENT = f"""
from huggingface_hub import CommitOperationAdd, HfApi
api = HfApi()
operations = [CommitOperationAdd(path_in_repo="config.json", path_or_fileobj=b"1")]
commit = api.create_commit("{REPO}", operations, commit_message="One").oid
api.create_tag("{REPO}", tag="v1", revision=commit)
"""


@pytest.mark.parametrize("forwarded", [False, True])
def test_client_killed_while_held(hub, proxy, api, forwarded):
    """Between commit and tag: what a dead client asked for is not done, unless the Hub had done it before."""
    proxy.inject(Fault("hold", "create_tag", forwarded=forwarded))
    env = hub.env | {"HF_ENDPOINT": proxy.url}
    client = subprocess.Popen([*PYTHON, "-c", CLIENT], env=env, stdout=subprocess.PIPE)
    proxy.wait_held()
    client.send_signal(signal.SIGKILL)
    client.communicate()
    proxy.release()
    deadline = time.monotonic() + 60
    while not any(seen.operation == "create_tag" for seen in proxy.seen):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert commits(hub) == 2
    assert [ref.name for ref in hub.api().list_repo_refs(REPO).tags] == ["v1"] * forwarded


def test_a_client_that_dies_in_the_middle_of_an_upload(hub, proxy, api):
    """The Hub hears of it at once, whether the client's end comes as an end or as a reset."""
    oid = hashlib.sha256(LARGE).hexdigest()
    for linger in (0, 1):
        href = upload_link(hub, proxy, oid)
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=60) as client:
            head = f"PUT {href.removeprefix(proxy.url)} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(LARGE)}"
            client.sendall(f"{head}\r\n\r\n".encode() + LARGE[:100_000])
            time.sleep(0.1)
            if linger:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        deadline = time.monotonic() + 10
        while sum(seen.operation == "lfs_upload" for seen in proxy.seen) <= linger:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    while list((hub.git_dir(REPO) / "lfs/incomplete").iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert stored(hub, oid) is None


def test_another_hub_behind_the_same_address(hubs):
    first = hubs("first")
    with FaultProxy(first.url) as proxy:
        api = HfApi(endpoint=proxy.url, token=first.token)
        api.create_repo(REPO)
        first.stop(signal.SIGKILL)
        with pytest.raises(httpx2.TransportError):
            api.model_info(REPO)
        proxy.upstream = hubs("second", root=first.root).url
        assert api.model_info(REPO).id == REPO


def test_operations():
    assert operation("GET", "/api/models/a/b/revision/exp%2Fa?expand=sha") == "info"
    assert operation("POST", "/datasets/a/b.git/info/lfs/objects/batch") == "lfs_batch"
    assert operation("POST", "/api/models/a/b/tag/main") == "create_tag"
    assert operation("GET", "/api/models") == "other"
    with pytest.raises(AssertionError, match="no operation 'comit'"):
        FaultProxy("http://127.0.0.1:1").inject(Fault("drop", "comit"))
