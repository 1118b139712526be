"""What somebody on the same machine would send to bring the embedded Hub down, or to write where nobody should."""

import contextlib
import hashlib
import json
import socket
import time
from datetime import datetime
from http.client import parse_headers
from io import BytesIO
from typing import Any

import pytest
from click.testing import CliRunner
from test_hub_storage import rss_mib
from thread_hub import ThreadHub
from zoo_process import wait_until

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.server import create_token, handler, tokens
from rlhf_zoo.hub.server.cli import hub as group
from rlhf_zoo.hub.server.faults import Fault
from rlhf_zoo.hub.server.messages import Body, Request
from rlhf_zoo.hub.server.names import check_path
from rlhf_zoo.hub.server.routing import Router
from rlhf_zoo.hub.server.tokens import TokenFile, revoke_tokens

pytestmark = pytest.mark.attack

REPO = "local/m"
NESTED = "---\nx: " + "[" * 40_000 + "\n---\n"
BOMB = "---\na: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
BAD_CARDS = [NESTED, BOMB + "---\n", f"---\nx: 0x{'f' * 5000}\n---\n", "---\nx: !!timestamp foo\n---\n"]


@pytest.fixture
def here(near_hub: ThreadHub) -> ThreadHub:
    """With a repository."""
    near_hub.api().create_repo(REPO)
    return near_hub


def test_yaml_of_strangers_is_not_parsed_and_yaml_of_others_is_bounded(hub):
    """In a process of its own: what overflows the stack of the parser ends the process."""
    hub.api().create_repo(REPO)
    before, _ = rss_mib(hub.process.pid)
    for card in BAD_CARDS:
        body = {"content": card, "repoType": "model"}
        answer = hub.send("POST", "/api/validate-yaml", body, role=None)
        assert (answer.status, answer.json()) == (200, {"errors": [], "warnings": []})
        answer = hub.send("POST", "/api/validate-yaml", body)
        assert answer.status == 400
        assert "cannot be read" in answer.json()["errors"][0]["message"]
        answer = hub.commit(REPO, {"key": "file", "value": {"path": "README.md", "content": card}})
        assert answer.status == 400
        assert "Invalid metadata in README.md" in answer.json()["error"]
    answer = hub.send("POST", "/api/validate-yaml", {"content": "---\na: [1\nb: 2\n---\n"})
    assert "(line 3, column " in answer.json()["errors"][0]["message"]
    assert hub.process.poll() is None
    assert rss_mib(hub.process.pid)[1] - before < 150


def test_a_page_of_another_site_is_refused_everywhere(here):
    port = here.port
    own = [f"http://127.0.0.1:{port}", f"http://localhost:{port}"]
    foreign = ["https://evil.example", "null", "", "http://127.0.0.1", f"http://127.0.0.1:{port + 1}",
               f"https://127.0.0.1:{port}", f"http://127.0.0.1:{port}.evil.example", f"http://evil@127.0.0.1:{port}",
               f"http://127.0.0.1:{port}/", "http://localhost"]  # fmt: skip
    routes = [("GET", "/"), ("GET", f"/api/models/{REPO}"), ("POST", "/api/validate-yaml"),
              ("POST", "/v1/telemetry"), ("POST", "/api/repos/create"),
              ("OPTIONS", "/api/repos/create"), ("GET", "/no/such/place/here")]  # fmt: skip
    for method, path in routes:
        for origin in foreign:
            assert here.send(method, path, b"{}", role="write", Origin=origin).status == 403, (method, path, origin)
    for origin, host in zip(own, (f"127.0.0.1:{port}", f"localhost:{port}"), strict=True):
        assert here.send("GET", "/api/models", Origin=origin, Host=host).status == 200
    assert here.send("GET", "/api/models", Origin=own[1]).status == 403  # the client knows this server as 127.0.0.1
    assert here.send("GET", "/api/models", Origin="http://localhost", Host="localhost:80").status == 200
    for headers, status in (
        ("", 403),
        ("Host: 127.0.0.1\r\nHost: evil.example", 403),
        ("Host: 127.0.0.1\r\nOrigin: http://127.0.0.1\r\nOrigin: x", 403),
        *((f"Host: {host}", 403) for host in ("evil.example", "127.0.0.1.evil.example", "")),
        *((f"Host: {host}", 200) for host in ("127.0.0.1", "localhost:1234", "[::1]:80")),
    ):
        answer = raw(here, f"GET /api/models/{REPO} HTTP/1.1\r\n{headers}\r\nConnection: close\r\n\r\n")
        assert int(answer.split(b" ", 2)[1]) == status, headers


def raw(here: ThreadHub, text: str) -> bytes:
    with here.connect() as connection:
        connection.sendall(text.encode("latin-1"))
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_addresses_that_lead_elsewhere(here):
    for path in (
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
        "/api/collections/local/..%2F..%2Ftokens",
        "/local/" + "n" * 300 + "/resolve/main/x",
        "/local/m/resolve/main/" + "x" * 5000,
        "/local/m/resolve/" + "r" * 5000 + "/x",
        "/" + "x" * 70_000,
    ):
        answer = raw(here, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        assert int(answer.split(b" ", 2)[1]) in (400, 401, 404, 414), path
        assert b"root:" not in answer and b"sha256" not in answer, path


def test_malformed_requests_do_no_harm(here):
    post = "POST /api/repos/create HTTP/1.1\r\nHost: localhost\r\n"
    for text in (
        "NONSENSE\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        "BREW / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        f"{post}Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        f"{post}Content-Length: 50\r\n\r\n{{",
        "GET / HTTP/1.1\r\nHost: localhost\r\n" + "A: b\r\n" * 300 + "\r\n",
    ):
        answer = raw(here, text)
        assert not answer.startswith(b"HTTP/1.1 2") and b"Traceback" not in answer, text


def test_repositories_of_hostile_names(here):
    for name in ("..", "a/..", "../../x", "a\0", "x" * 200, ".hidden", "a--b", "x.git", ""):
        for fields in ({"name": name, "organization": "local"}, {"name": "m", "organization": name}):
            assert here.send("POST", "/api/repos/create", fields).status == 400, fields
    for namespace in ("api", "datasets"):  # which begin other addresses
        assert here.send("POST", "/api/repos/create", {"name": "m", "organization": namespace}).status == 400
    assert {path.parts[-2:] for path in (here.root / "repos").glob("*/*/*")} == {("local", "m.git")}


BAD_NAMES = [
    ".git", ".GIT", "git~1", "GIT~1", ".git ", ".git.", ".git. .", ".git::$INDEX_ALLOCATION", ".git:", ".g\u200cit",
    "\ufeff.git", "a\\.git", "..", ".gitmodules", ".GitModules",
    "..\\x", "a\\..\\b", "a\\b", "...", ".. ", ". .", ".\u200c.", "\u200d", "C:/x", "c:x", "a/.. /x",
    ".git/x", "a/.git /b", "../x", "a/../../x", "/etc/x", "a//b", "./a", "", "x" * 300, "d/" * 600 + "x", "a\0b",
]  # fmt: skip
GOOD_NAMES = [
    ".gitignore", ".gitattributes", "a/.gitattributes", ".github/workflows/x.yml", "git", "git~10", "git~2",
    "a.git", ".gitx", "x.", "notes~1", "gi~x", "~1", "ab:c", "events:1", "日本/語.txt", "e\u0301", ".g",
    "model-00001~2.bin", "a\u200db",
]  # fmt: skip


def test_paths_that_git_and_other_systems_read_as_its_own(here):
    for path in BAD_NAMES:
        for each in (path, f"folder/{path}", f"{path}/folder"):
            if each in ("folder/C:/x", "folder/c:x"):  # a colon means a drive only in front
                continue
            with pytest.raises(Fault) as caught:
                check_path(each)
            assert caught.value.status == 400, each
    for path in GOOD_NAMES:
        assert check_path(path) == path
    before = here.send("GET", f"/api/models/{REPO}").json()["sha"]
    for value in ({"key": "file", "value": {"path": ".git./config", "content": "x"}},
                  {"key": "lfsFile", "value": {"path": "..\\x", "oid": "0" * 64, "size": 1}},
                  {"key": "deletedFile", "value": {"path": ".g\u200cit/x"}},
                  {"key": "deletedFolder", "value": {"path": "a\\..\\b/"}},
                  {"key": "file", "value": {"path": ".gitattributes", "content": "x" * 2100}}):  # fmt: skip
        assert here.commit(REPO, value).status == 400, value
    body = {"files": [{"path": ".git::$INDEX_ALLOCATION/x", "size": 1, "sample": ""}]}
    assert here.send("POST", f"/api/models/{REPO}/preupload/main", body).status == 400
    assert here.send("GET", f"/api/models/{REPO}").json()["sha"] == before
    assert here.send("POST", "/api/repos/move", {"fromRepo": REPO, "toRepo": "api/x"}).status == 400


WRONG = [
    ("POST", f"/api/models/{REPO}/preupload/main", {"files": 5}),
    ("POST", f"/api/models/{REPO}/preupload/main", {"files": [5]}),
    ("POST", f"/api/models/{REPO}/preupload/main", {"files": [{"path": "a", "size": "x"}]}),
    ("POST", f"/{REPO}.git/info/lfs/objects/batch", {"operation": "upload", "objects": [1]}),
    ("POST", f"/{REPO}.git/info/lfs/objects/batch", {"operation": "upload", "objects": 1}),
    ("POST", f"/{REPO}.git/info/lfs/objects/batch", {"operation": "upload", "objects": 5}),
    ("POST", "/api/repos/create", {"name": "n", "variables": 5}),
    ("POST", "/api/repos/create", {"name": "n", "type": ["model"]}),
    ("POST", "/api/repos/create", {"name": "n", "type": {"model": 1}}),
    ("POST", "/api/repos/create", {"name": "n", "sdk": ["gradio"]}),
    ("POST", "/api/repos/create", {"name": "n\ud800"}),
    ("DELETE", "/api/repos/delete", {"name": "m", "type": ["model"]}),
    ("POST", "/api/repos/move", {"fromRepo": REPO, "toRepo": "local/n", "type": [1]}),
    ("POST", "/api/collections", {"title": "half \udc00"}),
    ("POST", "/api/collections", {"title": "t", "description": "\ud800"}),
    ("POST", f"/api/models/{REPO}/branch/b", {"startingPoint": 5}),
    ("POST", f"/api/models/{REPO}/tag/main", {"tag": "t\ud800"}),
    ("POST", f"/api/models/{REPO}/tag/main", {"tag": "t", "message": 5}),
    ("POST", f"/api/models/{REPO}/super-squash/main", {"message": ["x"]}),
    ("POST", "/api/validate-yaml", {"content": "\ud800"}),
    ("POST", "/api/collections", b'{"title": "half \xed\xa0\x80"}'),
    ("POST", "/api/collections", '{"title": "half \\ud800"}'.encode("utf-16")),
    ("PUT", f"/api/models/{REPO}/settings", b'{"private": 1e999}'),
    ("PUT", f"/api/models/{REPO}/settings", b'{"private": ' + b"9" * 4000 + b"}"),
    ("GET", "/api/models?" + "a&" * 5001, None),
    *(
        ("POST", f"/api/models/{REPO}/commit/main", body)
        for body in (
            b"",
            b"{}",
            b"[]",
            b"nonsense",
            b'{"key": 1, "value": {}}',
            b'{"key": "file", "value": {}}',
            b"[" * 100_000,
        )
    ),
]


def test_wrong_kinds_are_a_400(here):
    before = here.api().model_info(REPO).sha
    for method, path, body in WRONG:
        answer = here.send(method, path, body)
        assert answer.status == 400, (path, body, answer.content)
    for item in (5, [], {"type": ["model"], "id": REPO}, {"type": "model", "id": 5}):
        slug = here.send("POST", "/api/collections", {"title": f"c {item!r:.30}"}).json()["slug"]
        assert here.send("POST", f"/api/collections/{slug}/items", {"item": item}).status == 400
    for value in ({"path": ["a"], "content": "x"}, {"path": "a\ud800", "content": "x"}, {"path": "a", "content": 5}):
        assert here.commit(REPO, {"key": "file", "value": value}).status == 400
    assert here.api().model_info(REPO).sha == before


def test_patterns_that_a_regular_expression_takes_minutes_for(here):
    pattern = "*a*a*a*ab"
    names = ["a" * 250, "x.y", "a" * 250 + "b"]
    files = [{"path": name, "size": 1, "sample": ""} for name in names]
    for name, more in ((".gitattributes", " filter=lfs"), (".gitignore", "")):
        value = {"path": name, "content": f"{pattern}{more}\n*.y{more}\n"}
        assert here.commit(REPO, {"key": "file", "value": value}).status == 200
    began = time.process_time()
    answer = here.send("POST", f"/api/models/{REPO}/preupload/main", {"files": files})
    assert [(item["uploadMode"], item["shouldIgnore"]) for item in answer.json()["files"]] == [
        ("regular", False), ("lfs", True), ("lfs", True)]  # fmt: skip
    assert time.process_time() - began < 1


def test_headers_of_spaces_take_a_moment(here):
    """Two runs of spaces with nothing between them are split in as many ways as there are spaces."""
    began = time.process_time()
    for header in ("bytes=" + " " * 60_000 + "x", "bytes" + " " * 60_000, "bytes=0" + " " * 60_000 + "x"):
        assert here.send("GET", f"/{REPO}/resolve/main/.gitattributes", role=None, Range=header).status == 200
    assert time.process_time() - began < 2


def test_a_route_that_says_nothing_of_a_body_reads_none():
    router = Router(lambda repo: True)
    router.add("POST", "/undeclared", lambda request: request.json())
    headers = parse_headers(BytesIO(b"Content-Length: 2\r\n\r\n"))
    with pytest.raises(Fault) as caught:
        router.dispatch(Request("POST", "/undeclared", {}, headers, Body(BytesIO(b"{}"), headers), "write", ""))
    assert caught.value.status == 413


def test_bodies_are_bounded(here):
    """However a body is framed, no more of it is read than its route takes, and then a little."""
    token = create_token(here.root, "write")
    chunk = b"100000\r\n" + bytes(2**20) + b"\r\n"
    for path, authorization in (
        ("/v1/telemetry", ""),
        ("/api/validate-yaml", ""),
        ("/api/repos/create", f"Authorization: Bearer {token}\r\n"),
        (f"/{REPO}.git/info/lfs/objects/batch", ""),
        (f"/_lfs/models/{REPO}/{'0' * 64}?size=9&signature=1.x", ""),
    ):
        method = "PUT" if path.startswith("/_lfs") else "POST"
        with here.connect() as connection:
            head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{authorization}Transfer-Encoding: chunked\r\n\r\n"
            connection.sendall(head.encode())
            with pytest.raises(OSError):
                any(connection.sendall(chunk) for _ in range(200))
    framings = [
        "Content-Length: 2\r\nTransfer-Encoding: chunked",
        "Content-Length: 2\r\nContent-Length: 3",
        "Content-Length: -2",
        "Content-Length: +2",
        "Content-Length: 1e3",
        f"Content-Length: {'9' * 40}",
        "Transfer-Encoding: gzip, chunked",
        "Transfer-Encoding: xchunked",
        "Transfer-Encoding: identity",
    ]
    for framing in framings:
        with here.connect() as connection:
            connection.sendall(f"POST /v1/telemetry HTTP/1.1\r\nHost: 127.0.0.1\r\n{framing}\r\n\r\n{{}}".encode())
            assert b" 400 " in connection.recv(100), framing
            while connection.recv(2**16):  # and the rest of it is not taken for another request
                pass
    answer = here.send("POST", "/api/repos/create", b"", Content_Length=str(2**40))
    assert answer.status == 413
    assert here.commit(REPO, {"key": "file", "value": {"path": "a", "content": "x" * (17 * 2**20)}}).status == 413


def test_silent_senders_do_not_keep_a_thread(here, monkeypatch):
    for name in ("_IDLE_SECONDS", "_HEAD_SECONDS", "_PATIENCE_SECONDS"):
        monkeypatch.setattr(handler, name, 0.3)
    head = b"POST /v1/telemetry HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\n\r\n"
    for start in (b"", b"POST /v1", head):
        with here.connect() as connection:
            connection.sendall(start)
            while connection.recv(2**16):  # 408 or nothing, and then the end
                pass


@pytest.mark.parametrize("start", ["GET / HTTP/1.1\r\nA: ", "POST /v1/telemetry HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                                   "Transfer-Encoding: chunked\r\n\r\n"])  # fmt: skip
def test_a_byte_now_and_then_does_not_keep_a_thread(here, monkeypatch, start):
    """A limit on each read alone would: no pause is as long as it."""
    for name in ("_IDLE_SECONDS", "_HEAD_SECONDS", "_PATIENCE_SECONDS"):
        monkeypatch.setattr(handler, name, 0.5)
    began = time.monotonic()
    piece = b"x" if start.startswith("GET") else b"1\r\nx\r\n"
    with here.connect() as connection, pytest.raises((ConnectionError, BrokenPipeError)):
        _drip(connection, start.encode(), piece, until=began + 10)
    assert time.monotonic() - began < 5


def _drip(connection: socket.socket, start: bytes, piece: bytes, until: float) -> None:
    connection.sendall(start)
    while time.monotonic() < until:
        connection.sendall(piece)
        time.sleep(0.05)


def test_connections_without_a_request_make_room_for_one(here, monkeypatch):
    """However many begin a request that they do not end, another one is answered at once."""
    monkeypatch.setattr(handler, "_SLOT_SECONDS", 1.0)
    many = [here.connect() for _ in range(300)]
    for connection in many:
        with contextlib.suppress(OSError):  # the first are closed by now
            connection.sendall(b"GET / HTTP/1.1\r\nA: b")
    began = time.monotonic()
    assert here.send("GET", "/api/models").status == 200
    assert time.monotonic() - began < 5
    for connection in many:
        connection.close()


def test_no_more_threads_than_slots(here, monkeypatch):
    monkeypatch.setattr(handler, "_SLOT_SECONDS", 0.5)
    head = b"POST /v1/telemetry HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n"
    many = [here.connect() for _ in range(256)]
    for connection in many:
        connection.sendall(head)
    wait_until(lambda: here.server._active_requests == 256)
    with here.connect() as last:
        assert last.recv(100).startswith(b"HTTP/1.1 503 ")
    for connection in many:
        connection.close()
    wait_until(lambda: here.server._slots._value > 250)
    assert here.send("GET", "/api/models").status == 200


@pytest.mark.parametrize("gone", ["deleted", "deleted and made again", "moved away", "another in its place"])
def test_an_upload_link_ends_with_its_repository(here, gone):
    digest = hashlib.sha256(b"right").hexdigest()
    link = here.batch(REPO, digest, 5)["actions"]["upload"]["href"]
    if gone.startswith("deleted"):
        assert here.send("DELETE", "/api/repos/delete", {"name": "m"}).status == 200
    else:
        assert here.send("POST", "/api/repos/move", {"fromRepo": REPO, "toRepo": "local/n"}).status == 200
    if gone == "deleted and made again":
        assert here.send("POST", "/api/repos/create", {"name": "m"}).status == 200
    if gone == "another in its place":
        assert here.send("POST", "/api/repos/create", {"name": "other"}).status == 200
        assert here.send("POST", "/api/repos/move", {"fromRepo": "local/other", "toRepo": REPO}).status == 200
    assert here.send("PUT", link, b"right", role=None).status == 403
    assert not list(here.root.rglob(digest))


def test_tokens_are_listed_revoked_and_expire(here, monkeypatch):
    def call(*arguments: str) -> Any:
        return CliRunner().invoke(group, ["token", *arguments, "--root", str(here.root)])

    def lets_in(token: str) -> bool:
        answer = here.send("GET", "/api/whoami-v2", role=None, Authorization=f"Bearer {token}")
        return answer.status == 200

    old = here.token
    stored = json.loads((here.root / "tokens.json").read_text())
    assert [set(entry) for entry in stored] == [{"sha256", "role", "created"}]  # as every version before wrote them
    assert lets_in(old)
    lasting = call("--role", "read", "--name", "laptop").stdout.strip()
    short = call("--expires", "30m").stdout.strip()
    assert lets_in(lasting) and lets_in(short)
    rows = json.loads(call("list", "--json").stdout)
    assert [(row["role"], row["name"], row["expires"] is None) for row in rows] == [
        ("write", None, True), ("read", "laptop", True), ("write", None, False)]  # fmt: skip
    shown = call("list").stdout
    assert "laptop" in shown
    assert "until 20" in shown
    for token in (old, lasting, short):
        assert token not in shown
        assert token.removeprefix("hub_")[:12] not in shown
    revoked = call("revoke", rows[1]["id"], short)
    assert revoked.exit_code == 0
    assert short not in revoked.output
    assert (lets_in(old), lets_in(lasting), lets_in(short)) == (True, False, False)
    with pytest.raises(ZooError, match="hub token list") as caught:
        revoke_tokens(here.root, (short,))
    assert short not in str(caught.value)
    gone = call("--expires", "1m").stdout.strip()
    assert lets_in(gone)
    later = time.time() + 61

    class Clock(datetime):
        @classmethod
        def now(cls, zone=None):
            return datetime.fromtimestamp(later, zone)

    monkeypatch.setattr(tokens, "datetime", Clock)
    assert not lets_in(gone)
    assert "expired 20" in call("list").stdout
    TokenFile(here.root).add("read")
    assert "expired" not in call("list").stdout  # dropped when the file was written
    assert call("--expires", "5 days").exit_code == 2
    assert call("revoke", "nonsense").exit_code == 2
    assert CliRunner().invoke(group, ["token", "--role", "read", "list"]).exit_code == 2


def test_commands_with_hub_local_outlive_the_revocation_of_their_token(tmp_path, monkeypatch):
    from rlhf_zoo.hub.client.connect import _embedded_hub

    def token() -> str:
        with _embedded_hub(tmp_path) as (_, found):
            return found

    first = token()
    assert token() == first
    revoke_tokens(tmp_path, (first,))
    second = token()
    assert TokenFile(tmp_path).role(second) == "write"
