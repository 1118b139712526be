"""Bodies that no client sends, on every route that reads one: the Hub refuses them, and goes on."""

from __future__ import annotations

import hashlib
import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hub_fixture import RunningHub, start_hub
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_hub_storage import rss_mib
from test_hub_xet import CHUNKS, Store, one_file, packed, shard

from rlhf_zoo.hub_server.application import Application
from rlhf_zoo.hub_server.faults import Fault
from rlhf_zoo.hub_server.messages import Body, Request
from rlhf_zoo.hub_server.routing import Router

pytestmark = pytest.mark.attack

REPO = "local/m"
SMALL = b"\0content"
SMALL_OID = hashlib.sha256(SMALL).hexdigest()
MEMORY_MIB = 500
EXAMPLES = settings(max_examples=70, deadline=None, database=None, suppress_health_check=list(HealthCheck))

HOSTILE = st.sampled_from([
    "", "\ud800", "x\udfff", "\0", "..", "../../x", ".git/config", "a\\b", "~", "-",
    "a" * 300, "é" * 200, "\u202e", "main",
    "refs/heads/main", "refs/heads/../x", "HEAD", "f" * 40, "1" * 40, "local/m", "model", "null", "true",
    "NaN", "'", '"', "\n",
    "$(x)", "{{x}}", "%2e%2e", "0" * 64, SMALL_OID, "data:x", "[" * 50, "&a *a", "!!python/name:os.system x",
])  # fmt: skip
TEXTS = HOSTILE | st.text(st.characters(codec=None), max_size=20)
NUMBERS = (
    st.integers() | st.floats() | st.sampled_from([0, -1, 2**31, 2**63, 10**17, -(10**18), 10**400, 1e308, True, False])
)
VALUES = st.recursive(
    st.none() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)


@st.composite
def near(draw: st.DrawFn, example: Any) -> Any:
    """Values that are like the example but for one or two parts: what is all wrong is refused at the first look."""
    for _ in range(draw(st.integers(0, 2))):
        example = _changed(draw, example)
    return example


def _changed(draw: st.DrawFn, value: Any) -> Any:
    keys = list(value if isinstance(value, dict) else range(len(value))) if isinstance(value, dict | list) else []
    how = draw(st.sampled_from(["inside", "inside", "inside", "gone", "other"])) if keys else "other"
    if how == "other":
        return draw(TEXTS | VALUES)
    changed, key = value.copy(), draw(st.sampled_from(keys))
    if how == "gone":
        del changed[key]
    else:
        changed[key] = _changed(draw, changed[key])
    return changed


@st.composite
def bodies(draw: st.DrawFn, *examples: Any) -> bytes:
    """One of the examples (bytes, a list of lines, or a JSON value), mostly near to it; or with some bytes replaced."""
    example = draw(st.sampled_from(examples))
    if isinstance(example, list):
        content = "\n".join(json.dumps(draw(near(line))) for line in [HEADER, *example]).encode()
    elif isinstance(example, bytes):
        content = example
    else:
        content = json.dumps(draw(near(example)), ensure_ascii=draw(st.booleans())).encode(errors="surrogatepass")
    if draw(st.integers(0, 9)) < 6:
        return content
    start, count = draw(st.integers(0, len(content))), draw(st.integers(0, 40))
    others = st.sampled_from([b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe" * 99])
    return draw(st.binary(max_size=40).map(lambda new: content[:start] + new + content[start + count :]) | others)


HEADER = {"key": "header", "value": {"summary": "s", "description": "d", "parentCommit": None}}
SEGMENTS = st.sampled_from(["main", "b", "v1", "refs%2Fheads%2Fmain"]) | TEXTS.map(
    lambda t: quote(t, safe="", errors="replace")
)
COLLECTION = {"title": "t", "description": "d", "namespace": "local", "private": False, "position": 1, "theme": "x"}
VARIABLE = {"key": "A", "value": "b", "description": "d"}
CARDS = [f"---\n{text}\n---\n" for text in (
    "tags: [a]\nlicense: [b]", "a: &a [*a]", "x: !!timestamp foo", "!!python/object:x {}", "%YAML 9\n---\na: b",
    "9:" * 900 + "9: 1", "1e999: .nan", "2001-99-99: 0x" + "f" * 2000, "<<: {tags: {license: [1]}}", "? {a: b}\n: \x85",
)]  # fmt: skip


def a_file(path: str, content: str) -> list[dict[str, Any]]:
    return [{"key": "file", "value": {"path": path, "content": content}}]


#: For each route that reads a body: where to send it, with names that `target` knows and a segment, and examples of it.
BODIES: dict[tuple[str, str], tuple[str, list[Any]]] = {
    ("POST", "/api/collections"): ("/api/collections", [COLLECTION]),
    ("PATCH", "/api/collections/{namespace}/{slug}"): ("/api/collections/{slug}", [COLLECTION]),
    ("POST", "/api/collections/{namespace}/{slug}/items"): (
        "/api/collections/{slug}/items", [{"item": {"type": "model", "id": "local/victim"}, "note": "n"}]
    ),
    ("PATCH", "/api/collections/{namespace}/{slug}/items/{item}"): (
        "/api/collections/{slug}/items/{item}", [{"note": "n", "position": 0}]
    ),
    **{
        (method, f"/api/spaces/{{namespace}}/{{name}}/{kind}"): (f"/api/spaces/local/s/{kind}", [VARIABLE])
        for method in ("POST", "DELETE") for kind in ("variables", "secrets")
    },
    ("POST", "/{page}.git/info/lfs/objects/batch"): (
        "/local/m.git/info/lfs/objects/batch",
        [{"operation": "upload", "transfers": ["multipart"], "objects": [{"oid": "0" * 64, "size": 2500}],
          "hash_algo": "sha256"}],
    ),
    ("PUT", "/_lfs/{repo}/{oid}"): ("{small}", [SMALL]),
    ("POST", "/_xet/{repo}/{epoch}/v1/xorbs/default/{xorb}"): (
        f"{{xet}}/v1/xorbs/default/{'0' * 64}",
        [packed(CHUNKS[0], scheme) for scheme in (0, 1)] + [packed(CHUNKS[1], 1) * 3],
    ),
    ("POST", "/_xet/{repo}/{epoch}/v1/shards"): ("{xet}/v1/shards", [shard(one_file("0" * 64))]),
    ("POST", "/api/validate-yaml"): (
        "/api/validate-yaml", [{"content": card, "repoType": "space"} for card in CARDS]
    ),
    ("POST", "/api/{repo}/preupload/{revision}"): (
        "/api/models/local/m/preupload/main",
        [{"files": [{"path": "a", "sample": "eA==", "size": 1}], "gitIgnore": "*.x\n[!"}],
    ),
    ("POST", "/api/{repo}/commit/{revision}"): (
        "/api/models/local/m/commit/main",
        [
            [{"key": "file", "value": {"path": "folder/a.txt", "content": "eA==", "encoding": "base64"}},
             {"key": "lfsFile", "value": {"path": "w.bin", "algo": "sha256", "oid": SMALL_OID, "size": len(SMALL)}},
             {"key": "deletedFolder", "value": {"path": "folder/"}}],
            *(a_file("README.md", card) for card in CARDS),
            a_file(".gitattributes", "*.x filter=lfs\n[a]b\n"),
            a_file(".gitignore", "!*[\n\\\n"),
            a_file("config.json", '{"architectures": ["X"]}'),
        ],
    ),
    ("POST", "/api/{repo}/paths-info/{revision}"): (
        "/api/models/local/m/paths-info/main",
        [{"paths": ["w.bin", "folder"], "expand": True}, b"paths=w.bin&paths=..%2Fx&paths=%ff&expand=1"],
    ),
    ("POST", "/api/{repo}/branch/{name}"): (
        "/api/models/local/m/branch/{segment}", [{"startingPoint": "main", "emptyBranch": False}]
    ),
    ("POST", "/api/{repo}/tag/{revision}"): ("/api/models/local/m/tag/{segment}", [{"tag": "v1", "message": "m"}]),
    ("POST", "/api/{repo}/super-squash/{name}"): ("/api/models/local/m/super-squash/{segment}", [{"message": "m"}]),
    ("POST", "/api/repos/create"): (
        "/api/repos/create",
        [{"name": "fuzz", "organization": "local", "type": "model", "private": True, "sdk": "gradio",
          "variables": [{"key": "A", "value": "b"}], "visibility": "public"}],
    ),
    ("DELETE", "/api/repos/delete"): (
        "/api/repos/delete", [{"name": "victim", "organization": "local", "type": "model"}]
    ),
    ("POST", "/api/repos/move"): (
        "/api/repos/move", [{"fromRepo": "local/victim", "toRepo": "local/other", "type": "model"}]
    ),
    ("PUT", "/api/{repo}/settings"): (
        "/api/models/local/m/settings", [{"private": False, "gated": False, "visibility": "public"}]
    ),
}  # fmt: skip


@dataclass(repr=False)
class Target:
    """A Hub in a process of its own, and what the addresses of its routes are made of."""

    hub: RunningHub
    names: dict[str, str]
    xet_token: str
    memory: float

    def send(self, method: str, path: str, body: bytes = b"", role: str | None = "write", **headers: str) -> int:
        answer = self.hub.send(method, path, body, role, **headers)
        assert answer.status < 500, (method, path, answer)
        return answer.status

    def prepare(self) -> None:
        """What a request may have removed is there again."""
        for fields in ({"name": "m"}, {"name": "s", "type": "space", "sdk": "gradio"}, {"name": "victim"}):
            self.send("POST", "/api/repos/create", json.dumps(fields).encode())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    hub = start_hub(tmp_path_factory.mktemp("fuzz"))
    try:
        api = hub.api()
        api.create_repo(REPO)
        collection = api.create_collection("A collection", namespace="local")
        item = api.add_collection_item(collection.slug, REPO, "model").items[0].item_object_id
        small = hub.batch(REPO, SMALL_OID, len(SMALL))["actions"]["upload"]["href"]
        store = Store(hub)
        store.xorb(*CHUNKS[:2])
        names = {"slug": collection.slug, "item": item, "small": small, "xet": store.url}
        found = Target(hub, names, store.token, rss_mib(hub.process.pid)[0])
        found.prepare()
        yield found
    finally:
        hub.stop()
    assert "Traceback" not in hub.log.read_text(), hub.log.read_text()[-5000:]


def test_every_route_that_reads_a_body_is_fuzzed(tmp_path: Path) -> None:
    """A route says how much of a body it reads, and cannot read more than it says."""
    assert set(BODIES) == set(Application(tmp_path).router.bodies())
    router = Router(lambda repo: True)
    router.add("POST", "/undeclared", lambda request: request.json())
    headers = http.client.parse_headers(_stream(b"Content-Length: 2\r\n\r\n"))
    with pytest.raises(Fault) as caught:
        router.dispatch(Request("POST", "/undeclared", {}, headers, Body(_stream(b"{}"), headers), "write", ""))
    assert caught.value.status == 413


def _stream(content: bytes) -> Any:
    return BytesIO(content)


@pytest.mark.full
@pytest.mark.parametrize("route", sorted(BODIES), ids=" ".join)
@EXAMPLES
@given(data=st.data())
def test_no_body_does_harm(target: Target, route: tuple[str, str], data: st.DataObject) -> None:
    method, pattern = route
    address, examples = BODIES[route]
    path = address.format(**target.names, segment=data.draw(SEGMENTS))
    body = data.draw(bodies(*examples))
    # Most of the time by somebody who may do it: strangers are refused before anything of theirs is looked at.
    role = data.draw(st.sampled_from(["write"] * 5 + [None]))
    headers = {"Content-Type": "application/x-www-form-urlencoded" if body[:1] != b"{" else "application/json"}
    if pattern.startswith("/_xet"):
        role, headers["Authorization"] = None, f"Bearer {target.xet_token}"
    target.send(method, path, body, role, **headers)
    if method == "DELETE" or pattern.endswith("/move"):
        target.prepare()
    if "commit" in pattern:  # what was stored can be told
        target.send("GET", f"/api/models/{REPO}")


@pytest.mark.full
def test_what_is_left_is_whole(target: Target) -> None:
    """After all of that, in the order of this file."""
    assert target.hub.process.poll() is None
    assert rss_mib(target.hub.process.pid)[1] - target.memory < MEMORY_MIB
    target.prepare()
    api = target.hub.api()
    assert {REPO, "local/victim"} <= {model.id for model in api.list_models()}
    done = api.upload_file(path_or_fileobj=b"after", path_in_repo="after.txt", repo_id=REPO)
    assert done.oid == api.model_info(REPO).sha
    target.hub.git(REPO, "fsck", "--full", "--strict")
