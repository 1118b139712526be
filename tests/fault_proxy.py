"""A reverse proxy on loopback between the real Hub client and a Hub, which injects faults.

    with FaultProxy(hub.url) as proxy:
        proxy.inject(Fault("refuse", "commit"), Fault("cut_upload", "lfs_upload", size=100_000))
        HfApi(endpoint=proxy.url, token=hub.token).create_commit(...)
        assert proxy.counts.faults == {"refuse 500": 1, "cut_upload": 1}

It forwards the Host header unchanged, so the links that the Hub builds from that header lead to the proxy.
"""

from __future__ import annotations

import http.client
import json
import re
import select
import socket
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

#: Operation -> (method, pattern of the path). The first match is a request's operation; without a match it is "other".
OPERATIONS = {
    "create_repo": ("POST", r"^/api/repos/create$"),
    "preupload": ("POST", r"^/api/.+/preupload/"),
    "commit": ("POST", r"^/api/.+/commit/"),
    "lfs_batch": ("POST", r"\.git/info/lfs/objects/batch$"),
    "lfs_upload": ("PUT", r"^/_lfs/"),
    "create_tag": ("POST", r"^/api/.+/tag/"),
    "delete_tag": ("DELETE", r"^/api/.+/tag/"),
    "refs": ("GET", r"^/api/.+/refs$"),
    "download": ("GET", r"/resolve/"),
}


@dataclass(frozen=True)
class Fault:
    """A fault of the nth matching request and of the count - 1 matching requests after it (count=None: of all).

    A request matches if it has this `operation` (a name in OPERATIONS), and `path` (a regular expression) matches
    somewhere in its path and query. None matches any request. With forwarded=True, the fault happens after the Hub
    has processed the request.

    refuse        the answer is `status`, with Retry-After: `seconds` unless that is 0
    drop          the connection is closed without an answer
    delay         the request waits for `seconds`
    hold          the request (forwarded: the answer) waits for `release()`, and is dropped if its client has died
    cut_upload    both connections are closed after `size` bytes of the request's body
    cut_download  the connection is closed after `size` bytes of the answer's body
    """

    kind: Literal["refuse", "drop", "delay", "hold", "cut_upload", "cut_download"]
    operation: str | None = None
    path: str | None = None
    nth: int = 1
    count: int | None = 1
    forwarded: bool = False
    status: int = 500
    seconds: float = 0
    size: int = 0

    @property
    def name(self) -> str:
        """The name in `Counts.faults`: "refuse 429", "drop", "drop forwarded", ..."""
        words = [self.kind, *([str(self.status)] if self.kind == "refuse" else []), *self.forwarded * ["forwarded"]]
        return " ".join(words)


@dataclass(frozen=True)
class Counts:
    """Requests by operation, forwarded or not, and injected faults by name; "down" counts outages."""

    requests: Counter[str]
    faults: Counter[str]


class FaultProxy:
    """Listens on 127.0.0.1 and forwards to `upstream`, the address of a Hub."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream.removeprefix("http://")
        self.connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._rules: list[tuple[Fault, list[int]]] = []  # fault, [its matching requests so far]
        self._requests: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._holding = threading.Condition()
        self._held = self._released = 0
        self._server: _Server | None = None
        self._reserved: socket.socket | None = _bound(0)
        self.port: int = self._reserved.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FaultProxy:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()
        self.release()
        if self._reserved is not None:
            self._reserved.close()

    def inject(self, *faults: Fault) -> None:
        """Adds faults, which count matching requests from now on. If several are due, the first one added applies."""
        assert {fault.operation for fault in faults} <= {*OPERATIONS, None}
        with self._lock:
            self._rules += [(fault, [0]) for fault in faults]

    def clear(self) -> None:
        """Removes all faults; held requests stay held."""
        with self._lock:
            self._rules.clear()

    def down(self) -> None:
        """Cuts every connection and refuses new ones until `up()`. The port stays bound, without listening."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server, self._reserved = None, _bound(self.port)
            with self._lock:
                self._faults["down"] += 1
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def up(self) -> None:
        """Accepts connections again."""
        if self._reserved is not None:
            self._server = _Server(self, self._reserved)
            self._reserved = None
            threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def wait_held(self, seconds: float = 60) -> None:
        """Waits until a request is held; fails after `seconds`."""
        with self._holding:
            assert self._holding.wait_for(lambda: self._held, seconds), "no request is held"

    def hold(self) -> None:
        """Holds the calling request until `release()`."""
        with self._holding:
            turn = self._released
            self._held += 1
            self._holding.notify_all()
            self._holding.wait_for(lambda: self._released > turn)
            self._held -= 1

    def release(self) -> None:
        """Lets the held requests continue."""
        with self._holding:
            self._released += 1
            self._holding.notify_all()

    @property
    def counts(self) -> Counts:
        """A copy of the current counts."""
        with self._lock:
            return Counts(Counter(self._requests), Counter(self._faults))

    def next_fault(self, method: str, target: str) -> Fault | None:
        """Counts a request and returns the fault to inject, if any."""
        path, due = target.partition("?")[0], None
        matching = (name for name, (verb, form) in OPERATIONS.items() if verb == method and re.search(form, path))
        operation = next(matching, "other")
        with self._lock:
            self._requests[operation] += 1
            for fault, matches in self._rules:
                if fault.operation in (None, operation) and re.search(fault.path or "", target):
                    matches[0] += 1
                    is_over = fault.count is not None and matches[0] >= fault.nth + fault.count
                    if due is None and matches[0] >= fault.nth and not is_over:
                        due = fault
            if due is not None:
                self._faults[due.name] += 1
        return due


def _bound(port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port))
    return bound


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, proxy: FaultProxy, bound: socket.socket) -> None:
        super().__init__(("127.0.0.1", proxy.port), _Handler, bind_and_activate=False)
        self.proxy = proxy
        self.socket.close()
        self.socket = bound
        self.socket.listen(128)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def handle(self) -> None:
        connections = self.server.proxy.connections
        connections.add(self.connection)
        try:
            with suppress(OSError, http.client.HTTPException):  # either side has closed its connection
                super().handle()
        finally:
            connections.discard(self.connection)

    def finish(self) -> None:
        with suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: the Hub has a log."""

    def _forward(self) -> None:
        proxy = self.server.proxy
        fault = proxy.next_fault(self.command, self.path)
        kind = fault.kind if fault else None
        body = self._read_body()
        if fault and not fault.forwarded and not self._inject(fault):
            return
        upstream = http.client.HTTPConnection(proxy.upstream, timeout=600)
        try:
            upstream.connect()
            proxy.connections.add(upstream.sock)
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("transfer-encoding", "content-length", "expect"):
                    upstream.putheader(name, value)
            if body or self.command not in ("GET", "HEAD"):
                upstream.putheader("Content-Length", str(len(body)))
            upstream.endheaders(body[: fault.size] if fault and kind == "cut_upload" else body)
            if kind == "cut_upload":
                self.close_connection = True
                return
            answer = upstream.getresponse()
            content = answer.read()
        finally:
            proxy.connections.discard(upstream.sock)
            upstream.close()
        if fault and fault.forwarded and not self._inject(fault):
            return
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() != "transfer-encoding":
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content[: fault.size] if fault and kind == "cut_download" else content)
        if kind == "cut_download" or answer.will_close:
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = _forward

    def _read_body(self) -> bytes:
        """Reads the body. Raises ConnectionError if the client disconnects before its end."""
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            size = int(self.headers.get("Content-Length", 0))
            return self._read_exactly(size)
        pieces = []
        while size := int(self.rfile.readline().strip() or b"0", 16):
            pieces.append(self._read_exactly(size + 2)[:-2])
        self.rfile.readline()
        return b"".join(pieces)

    def _read_exactly(self, size: int) -> bytes:
        content = self.rfile.read(size)
        if len(content) < size:
            raise ConnectionError
        return content

    def _inject(self, fault: Fault) -> bool:
        """Applies a fault to a request or to its answer. Returns whether to go on with it."""
        proxy = self.server.proxy
        if fault.kind == "delay":
            threading.Event().wait(fault.seconds)
        elif fault.kind == "hold":
            proxy.hold()
            if _is_closed(self.connection):
                raise ConnectionError
        elif fault.kind == "drop":
            self.close_connection = True
            return False
        elif fault.kind == "refuse":
            message = f"Injected {fault.status}"
            content = b"" if self.command == "HEAD" else json.dumps({"error": message}).encode()
            self.send_response_only(fault.status)
            for name, value in (("Content-Type", "application/json"), ("X-Error-Message", message)):
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            if fault.seconds:
                self.send_header("Retry-After", f"{fault.seconds:g}")
            self.end_headers()
            self.wfile.write(content)
            return False
        return True


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed the connection, even if it left unread bytes."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))
