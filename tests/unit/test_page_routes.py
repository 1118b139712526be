"""What a page answers over HTTP: its own routes, and nothing else of what Gradio opens."""

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
def test_routes_of_the_page_are_open(visitor: httpx2.Client, path: str) -> None:
    assert visitor.get(path).status_code == 200


def test_api_function_can_be_called(visitor: httpx2.Client) -> None:
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
def test_other_gradio_routes_are_closed(visitor: httpx2.Client, path: str) -> None:
    response = visitor.get(f"{API}/{path}")
    assert (response.status_code, response.json()) == (404, {"detail": "Not Found"})


@pytest.mark.parametrize("path", ["..%2f..%2f__init__.py", "%2fetc%2fhostname", "..%2f..%2f..%2f..%2fetc%2fhostname"])
@pytest.mark.parametrize("folder", ["static", "assets", "svelte"])
def test_files_outside_front_end_are_not_served(visitor: httpx2.Client, folder: str, path: str) -> None:
    assert visitor.get(f"/{folder}/{path}").status_code in (403, 404)


@pytest.mark.parametrize("path", ["/monitoring", "/monitoring/summary", "/openapi.json", "/login", "/docs"])
def test_server_information_is_not_served(visitor: httpx2.Client, path: str) -> None:
    assert visitor.get(path).status_code == 404


def test_visitors_cannot_upload_files(visitor: httpx2.Client) -> None:
    """Gradio would keep uploads, and give a recording to ffmpeg, which follows what a playlist names."""
    for path in ("upload", "upload/"):
        assert visitor.post(f"{API}/{path}", files=FILE).status_code == 404
    playlist = {"video": ("a.mp4", b"ffconcat version 1.0\nfile 'x'\n", "video/mp4")}
    assert visitor.post(f"{API}/process_recording", files=playlist).status_code == 404
    for path in ("component_server", "vibe-edit", "vibe-code"):
        assert visitor.post(f"{API}/{path}", json={}).status_code == 404


def test_oversized_requests_are_rejected(visitor: httpx2.Client) -> None:
    for path in ("run/length", "queue/join", "call/length"):
        long = json.dumps({"data": ["x" * routes.MAX_BODY]}).encode()
        assert visitor.post(f"{API}/{path}", content=long).status_code == 413
        chunked = visitor.post(f"{API}/{path}", content=iter([long[:1000], long[1000:]]))
        assert chunked.status_code == 413


@pytest.mark.parametrize("name", [["local/x"], {"a": 1}, 7, True, "local/y", ""])
def test_unknown_run_is_rejected_in_a_sentence(name: Any) -> None:
    point = TimelinePoint(1, "step-1", None, "x")
    comparison: Any = SimpleNamespace()
    timeline = Timeline(comparison, [TimelineRun("local/x", 0.1, (point,))])
    with pytest.raises(ZooError, match=r"There is no run .* here: choose one of local/x"):
        timeline.get_run(name)


@pytest.mark.parametrize("root_path", ["/zoo", "/zoo/", "https://example.com/zoo", "/s"])
def test_page_works_behind_proxy_with_path_prefix(monkeypatch: pytest.MonkeyPatch, root_path: str) -> None:
    """The proxy may strip its prefix or pass it on, and "/s" is also how /static begins."""
    monkeypatch.setenv("GRADIO_ROOT_PATH", root_path)
    with gr.Blocks(analytics_enabled=False) as page:
        box, length = gr.Textbox(), gr.HTML()
        box.submit(len, [box], [length], queue=False, api_name="length")
    address, prefix = start(page, host="127.0.0.1"), "/s" if root_path == "/s" else "/zoo"
    try:
        with httpx2.Client(base_url=address, timeout=30, follow_redirects=False) as client:
            for begin in ("", prefix):
                for path in ("/", "/config", "/theme.css", f"{API}/info", "/static/img/logo.svg"):
                    assert client.get(f"{begin}{path}").status_code == 200, f"{begin}{path}"
                assert client.post(f"{begin}{API}/run/length", json={"data": ["four"]}).json()["data"] == [4]
                assert client.post(f"{begin}{API}/upload", files=FILE).status_code == 404
            assert client.get("/config").json()["root"].endswith(prefix)
    finally:
        page.close(verbose=False)
