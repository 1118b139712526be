"""A language model's API on loopback, POST /v1/chat/completions, that judges by a rule and injects faults.

    with StubLLM(longer, key="secret") as stub:
        stub.script += [Fault("status", 429, headers={"Retry-After": "1"}), OK, Fault("drop")]
        LLMJudge(stub.url, "stub", ...).compare(...)
        assert len(stub.requests) == 4

The faults of the script apply to requests in the order of arrival; every request after the script's end is answered.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Rule = Callable[[Mapping[str, str]], str]  # data of a request -> text of the answer


def always(answer: str) -> Rule:
    """Returns the same text each time; "A" makes a judge that always prefers the first text."""
    return lambda data: answer


def longer(data: Mapping[str, str]) -> str:
    """Prefers the longer text; equal lengths are a tie."""
    a, b = len(data["A"]), len(data["B"])
    return json.dumps({"verdict": "A" if a > b else "B" if b > a else "tie"})


def rating_by_length(data: Mapping[str, str]) -> str:
    """Rates a completion by its number of characters, from 1 to 10."""
    return json.dumps({"rating": max(1, min(10, len(data["completion"])))})


@dataclass(frozen=True)
class Fault:
    """A fault of one request.

    status     the answer is `status` with `headers` and `body`
    drop       the connection is closed without an answer
    cut        the connection is closed after half of the answer
    hold       there is no answer until the stub closes
    malformed  the answer is not JSON
    shape      the answer is JSON, but not a completion
    content    the model answers `body`
    unmetered  the answer has no usage
    call       the stub calls `call()` and then answers
    """

    kind: Literal["ok", "status", "drop", "cut", "hold", "malformed", "shape", "content", "unmetered", "call"]
    status: int = 500
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = '{"error": {"message": "Injected"}}'
    call: Callable[[], None] | None = None


OK = Fault("ok")


@dataclass(frozen=True)
class Request:
    """A request. data: The data in its prompt. at: When it arrived, in monotonic seconds."""

    path: str
    authorization: str | None
    body: dict[str, Any]
    data: dict[str, str]
    at: float


class StubLLM:
    """Serves until the end of its context. key: The bearer token that it requires; None if it requires none."""

    def __init__(self, rule: Rule, *, key: str | None = None, usage: tuple[int, int] = (100, 10)) -> None:
        self.rule, self.key, self.usage = rule, key, usage
        self.script: list[Fault] = []
        self.requests: list[Request] = []
        self.max_concurrent = 0  # the largest number of requests in progress at the same time
        self._in_progress = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                stub._answer(self)

            def do_GET(self) -> None:  # a client that follows a redirect sends GET
                stub._answer(self)

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> StubLLM:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers.get("Content-Length") or 0)) or "{}")
        data = json.loads(body["messages"][-1]["content"].split("\n")[0]) if "messages" in body else {}
        with self._lock:
            self.requests.append(
                Request(handler.path, handler.headers.get("Authorization"), body, data, time.monotonic())
            )
            fault = self.script.pop(0) if self.script else OK
            self._in_progress += 1
            self.max_concurrent = max(self.max_concurrent, self._in_progress)
        try:
            answer = self._prepare_answer(handler, fault, data)
        finally:  # before the answer is sent: its client may send the next request at once
            with self._lock:
                self._in_progress -= 1
        if answer is not None:
            with contextlib.suppress(OSError):  # the client has disconnected
                self._send(handler, fault, *answer)

    def _prepare_answer(
        self, handler: BaseHTTPRequestHandler, fault: Fault, data: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes] | None:
        status, headers, text = 200, {}, ""
        if fault.kind == "drop":
            handler.close_connection = True
            return None
        if fault.kind == "hold":
            self._closing.wait()
            return None
        if fault.call is not None:
            fault.call()
        if fault.kind == "status":
            status, headers, text = fault.status, dict(fault.headers), fault.body
        elif self.key is not None and handler.headers.get("Authorization") != f"Bearer {self.key}":
            wrong_key = handler.headers.get("Authorization")
            status, text = 401, json.dumps({"error": {"message": f"Incorrect API key provided: {wrong_key}"}})
        elif handler.path.endswith("/models"):
            text = '{"data": []}'
        elif fault.kind == "malformed":
            text = "<html>It works!</html>"
        elif fault.kind == "shape":
            text = '{"status": "fine"}'
        else:
            reply = fault.body if fault.kind == "content" else self.rule(data)
            prompt, completion = self.usage
            answer: dict[str, Any] = {
                "model": "stub-2026",
                "choices": [{"index": 0, "message": {"role": "assistant", "content": reply}}],
                "usage": {"prompt_tokens": prompt, "completion_tokens": completion},
            }
            if fault.kind == "unmetered":
                del answer["usage"]
            text = json.dumps(answer)
        return status, headers, text.encode()

    def _send(
        self, handler: BaseHTTPRequestHandler, fault: Fault, status: int, headers: dict[str, str], content: bytes
    ) -> None:
        handler.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content[: len(content) // 2] if fault.kind == "cut" else content)
        handler.close_connection = fault.kind == "cut"
