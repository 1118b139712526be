"""Bodies that no client sends, on every route that reads one: the Hub refuses them, and goes on."""

from __future__ import annotations

import hashlib
import http.client
import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from hub_fixture import RunningHub, start_hub
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_hub_storage import rss_mib
from test_hub_xet import CHUNKS, Store, one_file, packed, shard, xorb_name

from rlhf_zoo.hub.server.application import Application
from rlhf_zoo.hub.server.faults import Fault
from rlhf_zoo.hub.server.messages import Body, Request
from rlhf_zoo.hub.server.routing import Router

pytestmark = pytest.mark.attack

REPO = "local/m"
EXAMPLES = 200
PART_SIZE = 1000
SMALL, LARGE = b"\0content", random.Random(6).randbytes(2500)
SMALL_OID, LARGE_OID = (hashlib.sha256(content).hexdigest() for content in (SMALL, LARGE))
MEMORY_MIB = 500
SECONDS = 60

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
def damaged(draw: st.DrawFn, contents: st.SearchStrategy[bytes]) -> bytes:
    """Those bytes, mostly; or with some cut out, repeated or replaced; or others."""
    content = draw(contents)
    how = draw(st.sampled_from(["whole"] * 6 + ["cut", "again", "replaced", "other"]))
    start, count = draw(st.integers(0, len(content))), draw(st.integers(0, 40))
    match how:
        case "cut":
            return content[:start] + content[start + count :]
        case "again":
            return (
                content[:start] + content[start : start + count] * draw(st.integers(2, 50)) + content[start + count :]
            )
        case "replaced":
            return content[:start] + draw(st.binary(max_size=40)) + content[start + count :]
        case "other":
            return draw(
                st.binary(max_size=200) | st.sampled_from([b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe" * 99])
            )
    return content


def as_json(*examples: Any) -> st.SearchStrategy[bytes]:
    """Half of them with characters as they are, also half ones."""
    values = st.tuples(st.one_of([near(example) for example in examples]), st.booleans())
    return damaged(values.map(lambda pair: json.dumps(pair[0], ensure_ascii=pair[1]).encode(errors="surrogatepass")))


def as_lines(*examples: dict[str, Any]) -> st.SearchStrategy[bytes]:
    header = near({"key": "header", "value": {"summary": "s", "description": "d", "parentCommit": None}})
    lines = st.tuples(header, st.lists(st.one_of([near(example) for example in examples]), max_size=4))
    return damaged(lines.map(lambda pair: "\n".join(map(json.dumps, [pair[0], *pair[1]])).encode()))


WORDS = st.sampled_from([
    "a", "b: ", "- ", "? ", ": ", "&a ", "*a", "<<: ", "[", "]", "{", "}", ", ", "\n", "\n  ", "\t", "'",
    '"', "|\n", ">-\n",
    "# x", "!!timestamp ", "!!int ", "!!set ", "!!binary ", "!!python/object:x ", "%YAML 9.9\n", "...\n",
    "tags: ", "license: ",
    "model-index: ", "1e999", ".nan", "0x" + "f" * 2000, "1" * 5000, "9:" * 900 + "9", "2001-99-99", "~",
    "\ufeff", "\x85", "no",
])  # fmt: skip
CARDS = st.lists(WORDS, max_size=30).map(lambda words: f"---\n{''.join(words)}\n---\ntext\n")


@dataclass(repr=False)
class Target:
    """A Hub in a process of its own, and what the addresses of its routes are made of."""

    hub: RunningHub
    slug: str
    item: str
    links: dict[str, str]
    store: Store
    xorb: str
    memory: float

    def send(self, method: str, path: str, body: bytes, *, token: str | None, form: str = "", pieces: int = 0) -> int:
        """The status. pieces: how many chunks the body comes in; as a whole where 0."""
        connection = http.client.HTTPConnection("127.0.0.1", int(self.hub.url.rpartition(":")[2]), timeout=SECONDS)
        headers = {"Content-Type": form or "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        try:
            if pieces:
                size = max(1, len(body) // pieces)
                parts = [body[start : start + size] for start in range(0, len(body), size)]
                headers["Transfer-Encoding"] = "chunked"
                connection.request(method, path, iter(parts), headers, encode_chunked=True)
            else:
                connection.request(method, path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            assert answer.status < 500, (method, path, answer.status, content)
            return answer.status
        finally:
            connection.close()

    def prepare(self) -> None:
        """What a request may have removed is there again."""
        for fields in ({"name": "m"}, {"name": "s", "type": "space", "sdk": "gradio"}, {"name": "victim"}):
            self.send("POST", "/api/repos/create", json.dumps(fields).encode(), token=self.hub.token)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    hub = start_hub(tmp_path_factory.mktemp("fuzz"), "--part-size", str(PART_SIZE))
    try:
        api = hub.api()
        api.create_repo(REPO)
        collection = api.create_collection("A collection", namespace="local")
        item = api.add_collection_item(collection.slug, REPO, "model").items[0].item_object_id
        links = {}
        for oid, content in ((SMALL_OID, SMALL), (LARGE_OID, LARGE)):
            links |= {f"{oid} {key}": href.removeprefix(hub.url) for key, href in upload_links(hub, oid, len(content))}
        store = Store(hub)
        found = Target(hub, collection.slug, item, links, store, store.xorb(*CHUNKS[:2]), 0)
        found.prepare()
        found.memory, _ = rss_mib(hub.process.pid)
        yield found
    finally:
        hub.stop()
    assert "Traceback" not in hub.log.read_text(), hub.log.read_text()[-5000:]


def upload_links(hub: RunningHub, oid: str, size: int) -> Iterator[tuple[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", int(hub.url.rpartition(":")[2]), timeout=SECONDS)
    fields = {"operation": "upload", "transfers": ["multipart"], "objects": [{"oid": oid, "size": size}]}
    headers = {"Authorization": f"Bearer {hub.token}"}
    connection.request("POST", f"/{REPO}.git/info/lfs/objects/batch", json.dumps(fields), headers)
    [entry] = json.loads(connection.getresponse().read())["objects"]
    connection.close()
    upload = entry["actions"]["upload"]
    yield "whole", upload["href"]
    yield from ((key, href) for key, href in upload.get("header", {}).items() if key.isdigit())


FILE = {"key": "file", "value": {"path": "folder/a.txt", "content": "eA==", "encoding": "base64"}}
LARGE_FILE = {"key": "lfsFile", "value": {"path": "w.bin", "algo": "sha256", "oid": SMALL_OID, "size": len(SMALL)}}
GONE = {"key": "deletedFolder", "value": {"path": "folder/"}}
NEW_REPO = {"name": "fuzz", "organization": "local", "type": "model", "private": True, "sdk": "gradio",
            "variables": [{"key": "A", "value": "b"}], "visibility": "public"}  # fmt: skip
COLLECTION = {"title": "t", "description": "d", "namespace": "local", "private": False, "position": 1, "theme": "x"}
SEGMENTS = st.sampled_from(["main", "b", "v1", "refs%2Fheads%2Fmain"]) | TEXTS.map(
    lambda t: quote(t, safe="", errors="replace")
)

#: For each route that reads a body: what to send, and where (a text, or a function of the target and a drawn segment).
BODIES: dict[tuple[str, str], tuple[str | Callable[[Target, str], str], st.SearchStrategy[bytes]]] = {
    ("POST", "/api/collections"): ("/api/collections", as_json(COLLECTION)),
    ("PATCH", "/api/collections/{namespace}/{slug}"): (lambda t, _: f"/api/collections/{t.slug}", as_json(COLLECTION)),
    ("POST", "/api/collections/{namespace}/{slug}/items"): (
        lambda t, _: f"/api/collections/{t.slug}/items",
        as_json({"item": {"type": "model", "id": "local/victim"}, "note": "n"}),
    ),
    ("PATCH", "/api/collections/{namespace}/{slug}/items/{item}"): (
        lambda t, _: f"/api/collections/{t.slug}/items/{t.item}",
        as_json({"note": "n", "position": 0}),
    ),
    **{
        (method, f"/api/spaces/{{namespace}}/{{name}}/{kind}"): (
            f"/api/spaces/local/s/{kind}",
            as_json({"key": "A", "value": "b", "description": "d"}),
        )
        for method in ("POST", "DELETE")
        for kind in ("variables", "secrets")
    },
    ("POST", "/{page}.git/info/lfs/objects/batch"): (
        f"/{REPO}.git/info/lfs/objects/batch",
        as_json(
            {"operation": "upload", "transfers": ["multipart"], "objects": [{"oid": "0" * 64, "size": 2500}],
             "hash_algo": "sha256"},
            {"operation": "download", "objects": [{"oid": SMALL_OID, "size": 8}]},
        ),
    ),
    ("PUT", "/_lfs/{repo}/{oid}"): (lambda t, _: t.links[f"{SMALL_OID} whole"], damaged(st.just(SMALL))),
    ("PUT", "/_lfs/{repo}/{oid}/{upload}/{part}"): (
        lambda t, segment: t.links[f"{LARGE_OID} {len(segment) % 3 + 1}"],
        damaged(st.sampled_from([LARGE[:1000], LARGE[1000:2000], LARGE[2000:]])),
    ),
    ("POST", "/_xet/{repo}/{epoch}/v1/xorbs/default/{xorb}"): (
        lambda t, _: f"{t.store.url.removeprefix(t.hub.url)}/v1/xorbs/default/{xorb_name(CHUNKS[0])}",
        damaged(st.sampled_from([packed(CHUNKS[0], scheme) for scheme in (0, 1, 2)] + [packed(CHUNKS[1], 1) * 3])),
    ),
    ("POST", "/_xet/{repo}/{epoch}/v1/shards"): (
        lambda t, _: f"{t.store.url.removeprefix(t.hub.url)}/v1/shards",
        damaged(st.just(shard(one_file(xorb_name(*CHUNKS[:2]))))),
    ),
    ("POST", "/api/validate-yaml"): (
        "/api/validate-yaml",
        st.one_of(as_json({"content": "---\ntags: [a]\n---\n", "repoType": "model"}),
                  CARDS.map(lambda card: json.dumps({"content": card, "repoType": "space"}).encode())),
    ),
    ("POST", "/api/{repo}/preupload/{revision}"): (
        f"/api/models/{REPO}/preupload/main",
        as_json({"files": [{"path": "a", "sample": "eA==", "size": 1}], "gitIgnore": "*.x\n[!"}),
    ),
    ("POST", "/api/{repo}/commit/{revision}"): (
        f"/api/models/{REPO}/commit/main",
        st.one_of(
            as_lines(FILE, LARGE_FILE, GONE),
            CARDS.flatmap(lambda card: as_lines({"key": "file", "value": {"path": "README.md", "content": card}})),
            as_lines({"key": "file", "value": {"path": ".gitattributes", "content": "*.x filter=lfs\n[a]b\n"}}),
            as_lines({"key": "file", "value": {"path": ".gitignore", "content": "!*[\n\\\n"}}),
            as_lines({"key": "file", "value": {"path": "config.json", "content": '{"architectures": ["X"]}'}}),
        ),
    ),
    ("POST", "/api/{repo}/paths-info/{revision}"): (
        f"/api/models/{REPO}/paths-info/main",
        st.one_of(
            as_json({"paths": ["w.bin", "folder"], "expand": True}),
            damaged(st.lists(st.tuples(st.sampled_from(["paths", "expand"]), HOSTILE.filter(lambda t: t.isprintable())))
                    .map(lambda fields: urlencode(fields, errors="replace").encode())),
        ),
    ),
    ("POST", "/api/{repo}/branch/{name}"): (
        lambda _, segment: f"/api/models/{REPO}/branch/{segment}",
        as_json({"startingPoint": "main", "emptyBranch": False}),
    ),
    ("POST", "/api/{repo}/tag/{revision}"): (
        lambda _, segment: f"/api/models/{REPO}/tag/{segment}",
        as_json({"tag": "v1", "message": "m"}),
    ),
    ("POST", "/api/{repo}/super-squash/{name}"): (
        lambda _, segment: f"/api/models/{REPO}/super-squash/{segment}",
        as_json({"message": "m"}),
    ),
    ("POST", "/api/repos/create"): ("/api/repos/create", as_json(NEW_REPO)),
    ("DELETE", "/api/repos/delete"): (
        "/api/repos/delete",
        as_json({"name": "victim", "organization": "local", "type": "model"}),
    ),
    ("POST", "/api/repos/move"): (
        "/api/repos/move",
        as_json({"fromRepo": "local/victim", "toRepo": "local/other", "type": "model"}),
    ),
    ("PUT", "/api/{repo}/settings"): (
        f"/api/models/{REPO}/settings",
        as_json({"private": False, "gated": False, "visibility": "public"}),
    ),
}  # fmt: skip


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
@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_body_does_harm(target: Target, route: tuple[str, str], data: st.DataObject) -> None:
    method, pattern = route
    address, contents = BODIES[route]
    segment = data.draw(SEGMENTS)
    path = address if isinstance(address, str) else address(target, segment)
    body = data.draw(contents)
    # Most of the time by somebody who may do it: strangers are refused before anything of theirs is looked at.
    token = data.draw(st.sampled_from([target.hub.token] * 5 + [None]))
    if pattern.startswith("/_xet"):
        token = target.store.token
    form = "application/x-www-form-urlencoded" if pattern.endswith("paths-info/{revision}") and body[:1] != b"{" else ""
    target.send(method, path, body, token=token, form=form, pieces=data.draw(st.sampled_from([0, 0, 1, 3])))
    if method == "DELETE" or pattern.endswith("/move"):
        target.prepare()
    if "commit" in pattern:  # what was stored can be told
        target.send("GET", f"/api/models/{REPO}", b"", token=target.hub.token)


@pytest.mark.full
@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_header_of_weights_does_harm(target: Target, data: st.DataObject) -> None:
    """A safetensors file is read when a repository is described: its length, then its JSON."""
    example = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {"format": "pt"}}
    shapes = st.sampled_from(
        [["x", 10**12], [10**17] * 400, [1e308, 1e308], "23", [[]], [-1], [True], {"a": 1}, [2**63] * 2]
    )
    header = data.draw(as_json(example) | shapes.map(lambda s: json.dumps({"a": {"dtype": "F", "shape": s}}).encode()))
    length = data.draw(st.sampled_from([len(header)] * 5 + [0, 2**26 - 1, 2**63, 2**64 - 1, max(0, len(header) - 1)]))
    content = struct.pack("<Q", length) + header
    oid = hashlib.sha256(content).hexdigest()
    token = target.hub.token
    links = dict(_links_or_none(target, oid, len(content)))
    for key, link in links.items():
        if key == "whole" and len(links) == 1:
            assert target.send("PUT", link, content, token=None) == 200
        elif key != "whole":
            start = (int(key) - 1) * PART_SIZE
            assert target.send("PUT", link, content[start : start + PART_SIZE], token=None) == 200
    if len(links) > 1:
        assert target.send("POST", links["whole"], b"{}", token=None) == 200
    value = {"path": "model.safetensors", "oid": oid, "size": len(content)}
    lines = [{"key": "header", "value": {"summary": "w"}}, {"key": "lfsFile", "value": value}]
    body = "\n".join(map(json.dumps, lines)).encode()
    assert target.send("POST", f"/api/models/{REPO}/commit/main", body, token=token) == 200
    assert target.send("GET", f"/api/models/{REPO}", b"", token=token) == 200
    assert target.send("GET", "/api/models?num_parameters=min:1", b"", token=token) == 200


def _links_or_none(target: Target, oid: str, size: int) -> Iterator[tuple[str, str]]:
    try:
        yield from ((key, href.removeprefix(target.hub.url)) for key, href in upload_links(target.hub, oid, size))
    except KeyError:  # it is stored already
        return


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
