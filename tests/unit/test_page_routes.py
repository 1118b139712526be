"""What a page answers over HTTP: its own routes, and nothing else of what Gradio opens."""

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import gradio as gr
import httpx2
import pytest

from rlhf_zoo.app.engine import Timeline, TimelinePoint, TimelineRun
from rlhf_zoo.app.page import routes
from rlhf_zoo.app.page.serve import start
from rlhf_zoo.errors import ZooError

pytestmark = pytest.mark.attack

API = "/gradio_api"
FILE = {"files": ("../../../tmp/x.html", b"<script>1</script>", "text/html")}


@pytest.fixture(scope="module")
def visitor() -> Iterator[httpx2.Client]:
    """A visitor of a page with one function of each kind."""
    with gr.Blocks(title="A page", analytics_enabled=False) as page:
        box, length = gr.Textbox(), gr.HTML()
        box.submit(len, [box], [length], queue=False, api_name="length")
    with httpx2.Client(base_url=start(page, host="127.0.0.1"), timeout=30) as client:
        yield client
    page.close(verbose=False)


@pytest.mark.parametrize(
    "path", ["/", "/config", "/config/", "/theme.css", "/robots.txt", "/manifest.json", f"{API}/info", f"{API}/app_id"]
)
def test_what_the_page_needs(visitor: httpx2.Client, path: str) -> None:
    assert visitor.get(path).status_code == 200


def test_a_function_is_called(visitor: httpx2.Client) -> None:
    response = visitor.post(f"{API}/run/length", json={"data": ["four"]})
    assert response.json()["data"] == [4]


@pytest.mark.parametrize(
    "path",
    [
        "upload_progress?upload_id=x", "file=/etc/hostname", "file=pyproject.toml", "file/x", "proxy=https://x.hf.space/",
        "deep_link?session_hash=x", "vibe-code", "runs", "run-history/buckets", "stream/x/1/1/playlist.m3u8",
        "profiling/summary", "custom_component/x/client/component/index.js", "dev/reload", "mcp/sse", "token", "user",
    ],
)  # fmt: skip
def test_other_routes_of_gradio_are_closed(visitor: httpx2.Client, path: str) -> None:
    response = visitor.get(f"{API}/{path}")
    assert (response.status_code, response.json()) == (404, {"detail": "Not Found"})


@pytest.mark.parametrize("path", ["..%2f..%2f__init__.py", "%2fetc%2fhostname", "..%2f..%2f..%2f..%2fetc%2fhostname"])
@pytest.mark.parametrize("folder", ["static", "assets", "svelte"])
def test_no_file_outside_the_front_end(visitor: httpx2.Client, folder: str, path: str) -> None:
    assert visitor.get(f"/{folder}/{path}").status_code in (403, 404)


@pytest.mark.parametrize("path", ["/monitoring", "/monitoring/summary", "/openapi.json", "/login", "/docs"])
def test_nothing_is_told_of_the_server(visitor: httpx2.Client, path: str) -> None:
    assert visitor.get(path).status_code == 404


def test_no_visitor_writes_files(visitor: httpx2.Client) -> None:
    """Gradio would keep uploads, and give a recording to ffmpeg, which follows what a playlist names."""
    for path in ("upload", "upload/"):
        assert visitor.post(f"{API}/{path}", files=FILE).status_code == 404
    playlist = {"video": ("a.mp4", b"ffconcat version 1.0\nfile 'x'\n", "video/mp4")}
    assert visitor.post(f"{API}/process_recording", files=playlist).status_code == 404
    for path in ("component_server", "vibe-edit", "vibe-code"):
        assert visitor.post(f"{API}/{path}", json={}).status_code == 404


def test_a_request_has_a_bound(visitor: httpx2.Client) -> None:
    for path in ("run/length", "queue/join", "call/length"):
        long = json.dumps({"data": ["x" * routes.MAX_BODY]}).encode()
        assert visitor.post(f"{API}/{path}", content=long).status_code == 413
        chunked = visitor.post(f"{API}/{path}", content=iter([long[:1000], long[1000:]]))
        assert chunked.status_code == 413


@pytest.mark.parametrize("name", [["local/x"], {"a": 1}, 7, True, "local/y", ""])
def test_a_run_that_is_none_is_a_sentence(name: Any) -> None:
    point = TimelinePoint(1, "step-1", None, "x")
    comparison: Any = SimpleNamespace()
    timeline = Timeline(comparison, [TimelineRun("local/x", 0.1, (point,))])
    with pytest.raises(ZooError, match=r"There is no run .* here: choose one of local/x"):
        timeline.run(name)


@pytest.mark.parametrize(("path", "status"), [("/zoo/gradio_api/info", 200), ("/zoo/gradio_api/upload", 404)])
def test_behind_a_proxy_that_keeps_its_prefix(path: str, status: int) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        sent.append(message)

    sent: list[Any] = []
    call = routes.ServedRoutes(application)({"type": "http", "path": path, "root_path": "/zoo"}, None, send)  # type: ignore[arg-type]
    asyncio.run(call)  # type: ignore[arg-type]
    assert sent[0]["status"] == status
