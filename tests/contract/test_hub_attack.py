"""Hostile requests from the same machine must not stop the embedded Hub or write outside its repositories."""

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
def repo_hub(in_process_hub: ThreadHub) -> ThreadHub:
    """A Hub with the repository REPO."""
    in_process_hub.api().create_repo(REPO)
    return in_process_hub


def test_validate_yaml_ignores_anonymous_users_and_bounds_parsing(hub):
    """The Hub runs in a separate process, because a stack overflow in the parser would end it."""
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


def test_foreign_origin_or_host_is_refused_on_every_route(repo_hub):
    port = repo_hub.port
    own = [f"http://127.0.0.1:{port}", f"http://localhost:{port}"]
    foreign = ["https://evil.example", "null", "", "http://127.0.0.1", f"http://127.0.0.1:{port + 1}",
               f"https://127.0.0.1:{port}", f"http://127.0.0.1:{port}.evil.example", f"http://evil@127.0.0.1:{port}",
               f"http://127.0.0.1:{port}/", "http://localhost"]  # fmt: skip
    routes = [("GET", "/"), ("GET", f"/api/models/{REPO}"), ("POST", "/api/validate-yaml"),
              ("POST", "/v1/telemetry"), ("POST", "/api/repos/create"),
              ("OPTIONS", "/api/repos/create"), ("GET", "/no/such/place/here")]  # fmt: skip
    for method, path in routes:
        for origin in foreign:
            assert repo_hub.send(method, path, b"{}", role="write", Origin=origin).status == 403, (method, path, origin)
    for origin, host in zip(own, (f"127.0.0.1:{port}", f"localhost:{port}"), strict=True):
        assert repo_hub.send("GET", "/api/models", Origin=origin, Host=host).status == 200
    # The client knows this server as 127.0.0.1.
    assert repo_hub.send("GET", "/api/models", Origin=own[1]).status == 403
    assert repo_hub.send("GET", "/api/models", Origin="http://localhost", Host="localhost:80").status == 200
    for headers, status in (
        ("", 403),
        ("Host: 127.0.0.1\r\nHost: evil.example", 403),
        ("Host: 127.0.0.1\r\nOrigin: http://127.0.0.1\r\nOrigin: x", 403),
        *((f"Host: {host}", 403) for host in ("evil.example", "127.0.0.1.evil.example", "")),
        *((f"Host: {host}", 200) for host in ("127.0.0.1", "localhost:1234", "[::1]:80")),
    ):
        answer = send_raw(repo_hub, f"GET /api/models/{REPO} HTTP/1.1\r\n{headers}\r\nConnection: close\r\n\r\n")
        assert int(answer.split(b" ", 2)[1]) == status, headers


def send_raw(repo_hub: ThreadHub, text: str) -> bytes:
    with repo_hub.connect() as connection:
        connection.sendall(text.encode("latin-1"))
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_path_traversal_returns_client_error(repo_hub):
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
        answer = send_raw(repo_hub, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        assert int(answer.split(b" ", 2)[1]) in (400, 401, 404, 414), path
        assert b"root:" not in answer and b"sha256" not in answer, path


def test_malformed_request_gets_neither_success_nor_traceback(repo_hub):
    post = "POST /api/repos/create HTTP/1.1\r\nHost: localhost\r\n"
    for text in (
        "NONSENSE\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        "BREW / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        f"{post}Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        f"{post}Content-Length: 50\r\n\r\n{{",
        "GET / HTTP/1.1\r\nHost: localhost\r\n" + "A: b\r\n" * 300 + "\r\n",
    ):
        answer = send_raw(repo_hub, text)
        assert not answer.startswith(b"HTTP/1.1 2") and b"Traceback" not in answer, text


def test_create_rejects_hostile_repository_names(repo_hub):
    for name in ("..", "a/..", "../../x", "a\0", "x" * 200, ".hidden", "a--b", "x.git", ""):
        for fields in ({"name": name, "organization": "local"}, {"name": "m", "organization": name}):
            assert repo_hub.send("POST", "/api/repos/create", fields).status == 400, fields
    for namespace in ("api", "datasets"):  # prefixes of other addresses
        assert repo_hub.send("POST", "/api/repos/create", {"name": "m", "organization": namespace}).status == 400
    assert {path.parts[-2:] for path in (repo_hub.root / "repos").glob("*/*/*")} == {("local", "m.git")}


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


def test_commit_rejects_paths_special_to_git_or_windows(repo_hub):
    for path in BAD_NAMES:
        for variant in (path, f"folder/{path}", f"{path}/folder"):
            if variant in ("folder/C:/x", "folder/c:x"):  # a colon means a drive only in front
                continue
            with pytest.raises(Fault) as caught:
                check_path(variant)
            assert caught.value.status == 400, variant
    for path in GOOD_NAMES:
        assert check_path(path) == path
    before = repo_hub.send("GET", f"/api/models/{REPO}").json()["sha"]
    for value in ({"key": "file", "value": {"path": ".git./config", "content": "x"}},
                  {"key": "lfsFile", "value": {"path": "..\\x", "oid": "0" * 64, "size": 1}},
                  {"key": "deletedFile", "value": {"path": ".g\u200cit/x"}},
                  {"key": "deletedFolder", "value": {"path": "a\\..\\b/"}},
                  {"key": "file", "value": {"path": ".gitattributes", "content": "x" * 2100}}):  # fmt: skip
        assert repo_hub.commit(REPO, value).status == 400, value
    body = {"files": [{"path": ".git::$INDEX_ALLOCATION/x", "size": 1, "sample": ""}]}
    assert repo_hub.send("POST", f"/api/models/{REPO}/preupload/main", body).status == 400
    assert repo_hub.send("GET", f"/api/models/{REPO}").json()["sha"] == before
    assert repo_hub.send("POST", "/api/repos/move", {"fromRepo": REPO, "toRepo": "api/x"}).status == 400


WRONG_TYPES = [
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


def test_wrong_json_types_return_400(repo_hub):
    before = repo_hub.api().model_info(REPO).sha
    for method, path, body in WRONG_TYPES:
        answer = repo_hub.send(method, path, body)
        assert answer.status == 400, (path, body, answer.content)
    for item in (5, [], {"type": ["model"], "id": REPO}, {"type": "model", "id": 5}):
        slug = repo_hub.send("POST", "/api/collections", {"title": f"c {item!r:.30}"}).json()["slug"]
        assert repo_hub.send("POST", f"/api/collections/{slug}/items", {"item": item}).status == 400
    for value in ({"path": ["a"], "content": "x"}, {"path": "a\ud800", "content": "x"}, {"path": "a", "content": 5}):
        assert repo_hub.commit(REPO, {"key": "file", "value": value}).status == 400
    assert repo_hub.api().model_info(REPO).sha == before


def test_slow_glob_pattern_is_matched_quickly(repo_hub):
    pattern = "*a*a*a*ab"
    names = ["a" * 250, "x.y", "a" * 250 + "b"]
    files = [{"path": name, "size": 1, "sample": ""} for name in names]
    for name, attribute in ((".gitattributes", " filter=lfs"), (".gitignore", "")):
        value = {"path": name, "content": f"{pattern}{attribute}\n*.y{attribute}\n"}
        assert repo_hub.commit(REPO, {"key": "file", "value": value}).status == 200
    started = time.process_time()
    answer = repo_hub.send("POST", f"/api/models/{REPO}/preupload/main", {"files": files})
    assert [(item["uploadMode"], item["shouldIgnore"]) for item in answer.json()["files"]] == [
        ("regular", False), ("lfs", True), ("lfs", True)]  # fmt: skip
    assert time.process_time() - started < 1


def test_range_header_of_spaces_is_parsed_quickly(repo_hub):
    """A careless regular expression tries as many splits as there are spaces."""
    started = time.process_time()
    for header in ("bytes=" + " " * 60_000 + "x", "bytes" + " " * 60_000, "bytes=0" + " " * 60_000 + "x"):
        assert repo_hub.send("GET", f"/{REPO}/resolve/main/.gitattributes", role=None, Range=header).status == 200
    assert time.process_time() - started < 2


def test_route_without_body_limit_reads_no_body():
    router = Router(lambda repo: True, lambda *_: None)
    router.add("POST", "/undeclared", lambda request: request.json())
    headers = parse_headers(BytesIO(b"Content-Length: 2\r\n\r\n"))
    with pytest.raises(Fault) as caught:
        router.dispatch(Request("POST", "/undeclared", {}, headers, Body(BytesIO(b"{}"), headers), "write", ""))
    assert caught.value.status == 413


def test_request_body_is_bounded_by_route(repo_hub):
    """Whatever the framing, the Hub reads little more than the route's limit."""
    token = create_token(repo_hub.root, "write")
    chunk = b"100000\r\n" + bytes(2**20) + b"\r\n"
    for path, authorization in (
        ("/v1/telemetry", ""),
        ("/api/validate-yaml", ""),
        ("/api/repos/create", f"Authorization: Bearer {token}\r\n"),
        (f"/{REPO}.git/info/lfs/objects/batch", ""),
        (f"/_lfs/models/{REPO}/{'0' * 64}?size=9&signature=1.x", ""),
    ):
        method = "PUT" if path.startswith("/_lfs") else "POST"
        with repo_hub.connect() as connection:
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
        with repo_hub.connect() as connection:
            connection.sendall(f"POST /v1/telemetry HTTP/1.1\r\nHost: 127.0.0.1\r\n{framing}\r\n\r\n{{}}".encode())
            assert b" 400 " in connection.recv(100), framing
            while connection.recv(2**16):  # the rest is not read as another request
                pass
    answer = repo_hub.send("POST", "/api/repos/create", b"", Content_Length=str(2**40))
    assert answer.status == 413
    assert repo_hub.commit(REPO, {"key": "file", "value": {"path": "a", "content": "x" * (17 * 2**20)}}).status == 413


def test_silent_connection_is_closed(repo_hub, monkeypatch):
    for name in ("_IDLE_SECONDS", "_HEAD_SECONDS", "_BODY_SECONDS"):
        monkeypatch.setattr(handler, name, 0.3)
    head = b"POST /v1/telemetry HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\n\r\n"
    for start in (b"", b"POST /v1", head):
        with repo_hub.connect() as connection:
            connection.sendall(start)
            while connection.recv(2**16):  # 408 or nothing, and then the end
                pass


@pytest.mark.parametrize("start", ["GET / HTTP/1.1\r\nA: ", "POST /v1/telemetry HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                                   "Transfer-Encoding: chunked\r\n\r\n"])  # fmt: skip
def test_dripping_connection_is_closed(repo_hub, monkeypatch, start):
    """A timeout per read would not close it, because every pause is shorter."""
    for name in ("_IDLE_SECONDS", "_HEAD_SECONDS", "_BODY_SECONDS"):
        monkeypatch.setattr(handler, name, 0.5)
    started = time.monotonic()
    piece = b"x" if start.startswith("GET") else b"1\r\nx\r\n"
    with repo_hub.connect() as connection, pytest.raises((ConnectionError, BrokenPipeError)):
        _drip(connection, start.encode(), piece, until=started + 10)
    assert time.monotonic() - started < 5


def _drip(connection: socket.socket, start: bytes, piece: bytes, until: float) -> None:
    connection.sendall(start)
    while time.monotonic() < until:
        connection.sendall(piece)
        time.sleep(0.05)


def test_incomplete_requests_do_not_delay_complete_one(repo_hub, monkeypatch):
    monkeypatch.setattr(handler, "_SLOT_SECONDS", 1.0)
    connections = [repo_hub.connect() for _ in range(300)]
    for connection in connections:
        with contextlib.suppress(OSError):  # the Hub has closed the first ones
            connection.sendall(b"GET / HTTP/1.1\r\nA: b")
    started = time.monotonic()
    assert repo_hub.send("GET", "/api/models").status == 200
    assert time.monotonic() - started < 5
    for connection in connections:
        connection.close()


def test_hub_answers_503_when_all_slots_are_busy(repo_hub, monkeypatch):
    monkeypatch.setattr(handler, "_SLOT_SECONDS", 0.5)
    head = b"POST /v1/telemetry HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n"
    connections = [repo_hub.connect() for _ in range(256)]
    for connection in connections:
        connection.sendall(head)
    wait_until(lambda: repo_hub.server._active_requests == 256)
    with repo_hub.connect() as last:
        assert last.recv(100).startswith(b"HTTP/1.1 503 ")
    for connection in connections:
        connection.close()
    wait_until(lambda: repo_hub.server._slots._value > 250)
    assert repo_hub.send("GET", "/api/models").status == 200


@pytest.mark.parametrize("gone", ["deleted", "deleted and created again", "moved away", "another in its place"])
def test_upload_link_is_invalid_after_repository_is_gone(repo_hub, gone):
    digest = hashlib.sha256(b"right").hexdigest()
    link = repo_hub.batch(REPO, digest, 5)["actions"]["upload"]["href"]
    if gone.startswith("deleted"):
        assert repo_hub.send("DELETE", "/api/repos/delete", {"name": "m"}).status == 200
    else:
        assert repo_hub.send("POST", "/api/repos/move", {"fromRepo": REPO, "toRepo": "local/n"}).status == 200
    if gone == "deleted and created again":
        assert repo_hub.send("POST", "/api/repos/create", {"name": "m"}).status == 200
    if gone == "another in its place":
        assert repo_hub.send("POST", "/api/repos/create", {"name": "other"}).status == 200
        assert repo_hub.send("POST", "/api/repos/move", {"fromRepo": "local/other", "toRepo": REPO}).status == 200
    assert repo_hub.send("PUT", link, b"right", role=None).status == 403
    assert not list(repo_hub.root.rglob(digest))


def test_tokens_can_be_listed_revoked_and_expire(repo_hub, monkeypatch):
    def run_token(*arguments: str) -> Any:
        return CliRunner().invoke(group, ["token", *arguments, "--root", str(repo_hub.root)])

    def is_accepted(token: str) -> bool:
        answer = repo_hub.send("GET", "/api/whoami-v2", role=None, Authorization=f"Bearer {token}")
        return answer.status == 200

    old = repo_hub.token
    stored = json.loads((repo_hub.root / "tokens.json").read_text())
    assert [set(entry) for entry in stored] == [{"sha256", "role", "created"}]  # the format of earlier versions
    assert is_accepted(old)
    lasting = run_token("--role", "read", "--name", "laptop").stdout.strip()
    short = run_token("--expires", "30m").stdout.strip()
    assert is_accepted(lasting) and is_accepted(short)
    rows = json.loads(run_token("list", "--json").stdout)
    assert [(row["role"], row["name"], row["expires"] is None) for row in rows] == [
        ("write", None, True), ("read", "laptop", True), ("write", None, False)]  # fmt: skip
    shown = run_token("list").stdout
    assert "laptop" in shown
    assert "until 20" in shown
    for token in (old, lasting, short):
        assert token not in shown
        assert token.removeprefix("hub_")[:12] not in shown
    revoked = run_token("revoke", rows[1]["id"], short)
    assert revoked.exit_code == 0
    assert short not in revoked.output
    assert (is_accepted(old), is_accepted(lasting), is_accepted(short)) == (True, False, False)
    with pytest.raises(ZooError, match="hub token list") as caught:
        revoke_tokens(repo_hub.root, (short,))
    assert short not in str(caught.value)
    expired = run_token("--expires", "1m").stdout.strip()
    assert is_accepted(expired)
    later = time.time() + 61

    class Clock(datetime):
        @classmethod
        def now(cls, zone=None):
            return datetime.fromtimestamp(later, zone)

    monkeypatch.setattr(tokens, "datetime", Clock)
    assert not is_accepted(expired)
    assert "expired 20" in run_token("list").stdout
    TokenFile(repo_hub.root).add("read")
    assert "expired" not in run_token("list").stdout  # dropped when the file was written
    assert run_token("--expires", "5 days").exit_code == 2
    assert run_token("revoke", "nonsense").exit_code == 2
    assert CliRunner().invoke(group, ["token", "--role", "read", "list"]).exit_code == 2


def test_embedded_hub_replaces_revoked_client_token(tmp_path, monkeypatch):
    from rlhf_zoo.hub.client.connect import _run_embedded_hub

    def token() -> str:
        with _run_embedded_hub(tmp_path) as (_, value):
            return value

    first = token()
    assert token() == first
    revoke_tokens(tmp_path, (first,))
    second = token()
    assert TokenFile(tmp_path).role(second) == "write"
