"""The client respects rate limits, and stops with one sentence at endless or invalid responses."""

import datetime
import email.utils
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.utils._http import default_client_factory

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client import bounds
from rlhf_zoo.hub.client.connect import Hub
from rlhf_zoo.hub.client.pull import fetch
from rlhf_zoo.hub.client.refs import try_hub_then_source
from rlhf_zoo.hub.client.refusals import reason, retry_after, translate_hub_errors
from rlhf_zoo.hub.client.retry_after import seconds_to_wait
from rlhf_zoo.runs.data.sources import find_data

pytestmark = pytest.mark.attack
COMMIT = "a" * 40
#: The date of a Hub whose clock is behind ours.
PAST = "Wed, 21 Oct 2015 07:28:00 GMT"

Answer = Callable[[BaseHTTPRequestHandler], None]


def send(handler: BaseHTTPRequestHandler, status: int, body: object = None, **headers: str) -> None:
    content = json.dumps({} if body is None else body).encode()
    handler.send_response(status)
    for name, value in {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(content)


@pytest.fixture
def start_hub() -> Iterator[Callable[[Answer], tuple[Hub, list[str]]]]:
    """start_hub(answer) returns a Hub that answers each GET with `answer`, and the list of requested paths."""
    servers = []

    def start(answer: Answer) -> tuple[Hub, list[str]]:
        paths: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                paths.append(self.path)
                answer(self)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return Hub("other", f"http://127.0.0.1:{server.server_port}", "a test", token=False), paths

    bounds.install()
    yield start
    huggingface_hub.set_client_factory(default_client_factory)
    for server in servers:
        server.shutdown()
        server.server_close()


def send_bytes(handler: BaseHTTPRequestHandler, content: bytes, kind: str) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", kind)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


def model_info(hub: Hub) -> str:
    with translate_hub_errors("The model cannot be fetched", "try again."):
        return str(hub.api().model_info("maker/model").sha)


def test_seconds_to_wait_parses_seconds_fractions_and_dates() -> None:
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=90)
    assert seconds_to_wait("1.5") == 1.5 and seconds_to_wait("7") == 7
    assert seconds_to_wait(email.utils.format_datetime(soon, usegmt=True)) == pytest.approx(90, abs=2)
    assert seconds_to_wait("soon") is None and seconds_to_wait(None) is None


@pytest.mark.parametrize(
    ("headers", "seconds", "quota"),
    [
        ({"RateLimit": '"api";r=0;t=271', "RateLimit-Policy": '"fixed window";"api";q=500;w=300'}, 271, "'api'"),
        ({"RateLimit": '"api";r=3;t=271', "Retry-After": "2"}, 2, None),
        ({"Retry-After": "1.5"}, 1.5, None),
        ({}, 0, None),
    ],
)
def test_retry_after_and_reason_read_rate_limit_headers(
    headers: dict[str, str], seconds: float, quota: str | None
) -> None:
    error = OSError("429 Too Many Requests")
    error.response = SimpleNamespace(headers=headers, status_code=429)  # type: ignore[attr-defined]
    assert retry_after(error) == seconds
    assert (quota or "429" if not seconds else quota or "too many requests") in reason(error)


@pytest.mark.parametrize("headers", [{"RateLimit": '"api";r=0;t=1'}, {"Retry-After": "0.6"}, {"Retry-After": PAST}])
def test_client_waits_as_long_as_hub_asks(start_hub, caplog, headers: dict[str, str]) -> None:
    times: list[float] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        times.append(time.monotonic())
        if len(times) < 2:
            send(handler, 429, **headers)
        else:
            send(handler, 200, {"id": "maker/model", "sha": COMMIT})

    hub, _ = start_hub(answer)
    assert try_hub_then_source("maker/model", hub, model_info) == (hub, COMMIT)
    assert all(later - before >= 0.6 for before, later in itertools.pairwise(times)) and len(times) == 2
    assert ("the quota 'api' is used up" in caplog.text) is ("RateLimit" in headers)


@pytest.mark.parametrize("headers", [{"RateLimit": '"api";r=0;t=99999999'}, {"Retry-After": "99999999"}])
@pytest.mark.parametrize("status", [429, 503])
def test_client_rejects_very_long_wait(start_hub, tmp_path, headers: dict[str, str], status: int) -> None:
    hub, paths = start_hub(lambda handler: send(handler, status, **headers))
    started = time.monotonic()
    with pytest.raises(ZooError, match="99999999 s"):
        try_hub_then_source("maker/model", hub, model_info)
    with pytest.raises(ZooError, match="99999999 s"):
        fetch("maker/model", tmp_path / "out", hub=hub)
    assert time.monotonic() - started < 10 and len(paths) == 2


def test_fetch_stops_at_endless_pagination(start_hub, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_PAGES", 5)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if "/tree/" in handler.path:
            page = f"<http://{handler.headers['Host']}{handler.path.partition('?')[0]}?cursor={len(paths)}>"
            files = [{"type": "file", "path": f"{len(paths)}.json", "size": 1, "oid": COMMIT}]
            send(handler, 200, files, Link=f'{page}; rel="next"')
        else:
            send(handler, 200, {"id": "maker/model", "sha": COMMIT, "branches": [], "tags": [], "converts": []})

    hub, paths = start_hub(answer)
    with pytest.raises(ZooError, match="has over 5 pages"):
        fetch("maker/model", tmp_path / "out", hub=hub)
    assert len([path for path in paths if "/tree/" in path]) == 5


def test_client_stops_at_endless_response(start_hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_JSON_BYTES", 2**20)
    sent: list[int] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json; charset=utf-8")
        handler.end_headers()
        try:
            while True:
                sent.append(handler.wfile.write(b"[" * 2**16))
        except OSError:
            pass

    hub, _ = start_hub(answer)
    with pytest.raises(ZooError, match="is too large"):
        model_info(hub)
    assert sum(sent) < 16 * 2**20


DEEP = b'{"id": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"<html>Please log in</html>", "text/html; charset=utf-8", "is text/html but is not JSON; it may come"),
        (b"<html>Please log in</html>", "application/json", "claims to be application/json but is not JSON"),
        (b"", "application/json", "is not JSON"),
        (DEEP, "application/json", "is JSON that is nested too deeply"),
        (b"[]", "application/json", "its answer is not a Hub's"),
        (b"5", "application/json", "its answer is not a Hub's"),
        (b'{"siblings": 5}', "application/json", "its answer is not a Hub's"),
    ],
)
def test_client_rejects_response_that_no_hub_sends(
    start_hub, tmp_path, content: bytes, kind: str, message: str
) -> None:
    hub, _ = start_hub(lambda handler: send_bytes(handler, content, kind))
    for call in (model_info, lambda hub: fetch("maker/model", tmp_path / "out", hub=hub)):
        with pytest.raises(ZooError, match=re.escape(message)) as caught:
            call(hub)
        assert "\n" not in str(caught.value)
    source = find_data("maker/data", None, hub)
    with pytest.raises(ZooError, match="The data set maker/data"):
        source.load(None, "train", columns=[])


def test_translate_hub_errors_passes_on_programming_errors() -> None:
    with pytest.raises(KeyError), translate_hub_errors("It cannot be fetched", "try again."):
        {}["a"]
