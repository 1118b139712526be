"""A reverse proxy on loopback that stands between the real Hub client and a Hub, and fails as it is told to.

    with FaultProxy(hub.url) as proxy:
        proxy.inject(Fault("refuse", "commit"), Fault("cut_upload", "lfs_upload", size=100_000))
        HfApi(endpoint=proxy.url, token=hub.token).create_commit(...)
        assert proxy.counts.faults == {"refuse 500": 1, "cut_upload": 1}

Requests and answers pass byte for byte, the Host header too: the links that the Hub makes from it lead back here.
"""

from __future__ import annotations

import json
import re
import select
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from types import TracebackType
from typing import Literal
from urllib.parse import urlsplit

__all__ = ["OPERATIONS", "Counts", "Fault", "FaultProxy"]

#: What a request is for: name -> method, path. The first that fits counts; "other" where none does.
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
PIECE = 2**16
PHRASES = {412: "Precondition Failed", 429: "Too Many Requests", 500: "Internal Server Error"}


def _operation(method: str, target: str) -> str:
    path = target.partition("?")[0]
    return next(
        (name for name, (verb, form) in OPERATIONS.items() if verb == method and re.search(form, path)), "other"
    )


@dataclass(frozen=True)
class Fault:
    """What to do with the nth request that matches, and with count - 1 more after it (count=None: all from there on).

    A request matches where `operation` (a name in OPERATIONS) and `path` (a regular expression, sought in path and
    query) fit, as far as they are given.

    kind        what happens                                                                  forwarded=True
    refuse      the answer is `status`, with Retry-After: `seconds` where that is not 0       the Hub did the work
    drop        the connection is closed without an answer                                    the Hub did the work
    delay       the request waits for `seconds`
    hold        the request waits for `release()`; it goes no further if its client has died  the answer waits
    cut_upload  both connections are closed after `size` bytes of the request's body
    cut_download  both connections are closed after `size` bytes of the answer's body
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
        """Under which it is counted: "refuse 429", "drop", "drop forwarded", ..."""
        words = [self.kind, *([str(self.status)] if self.kind == "refuse" else []), *self.forwarded * ["forwarded"]]
        return " ".join(words)

    def matches(self, what: str, target: str) -> bool:
        return self.operation in (None, what) and (self.path is None or re.search(self.path, target) is not None)


@dataclass(frozen=True)
class Counts:
    """Requests by operation, also those of which nothing was forwarded, and faults by name; "down" counts outages."""

    requests: Counter[str]
    faults: Counter[str]


class _Torn(Exception):
    """A side closed its connection in the middle of a message, or a fault says so."""


@dataclass(frozen=True)
class _Head:
    """The first line and the headers of a message, as they came."""

    raw: bytes
    line: list[str]
    headers: dict[str, str]

    @property
    def chunked(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "").lower()

    @property
    def last(self) -> bool:
        """Whether the sender closes the connection after this message."""
        return self.headers.get("connection", "").lower() == "close"


class FaultProxy:
    """Listens on 127.0.0.1 and forwards to `upstream`, the address of a Hub."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self._lock = threading.Lock()
        self._rules: list[tuple[Fault, list[int]]] = []
        self._requests: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._open: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._holding = threading.Condition()
        self._held = 0
        self._released = 0
        self._closing = threading.Event()
        self._listener: socket.socket | None = None
        self._bound = self._bind(0)
        self.port: int = self._bound.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FaultProxy:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self.down()
        self._bound.close()
        self.release()
        for thread in list(self._threads):
            thread.join(10)

    # -- what a test says -----------------------------------------------------------------------------------------

    def inject(self, *faults: Fault) -> None:
        """Add faults. Each counts the requests that match it from here on; the first whose turn it is takes one."""
        assert {fault.operation for fault in faults} <= {*OPERATIONS, None}
        with self._lock:
            self._rules += [(fault, [0]) for fault in faults]

    def clear(self) -> None:
        """Forget all faults that were injected; what is held stays held."""
        with self._lock:
            self._rules.clear()

    def down(self) -> None:
        """Cut every connection and refuse new ones until `up()`. The port stays ours."""
        with self._lock:
            if self._listener is not None:
                listener, self._listener = self._listener, None
                _close(listener)
                self._bound = self._bind(self.port)  # bound and not listening: refused by the kernel
                if not self._closing.is_set():
                    self._faults["down"] += 1
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def up(self) -> None:
        """Take connections again."""
        with self._lock:
            if self._listener is None and not self._closing.is_set():
                self._bound.listen(128)
                self._listener = self._bound
                self._spawn(self._accept, self._listener)

    def wait_held(self, count: int = 1, seconds: float = 60) -> None:
        """Until `count` requests are held at the same time; fails when that takes too long."""
        with self._holding:
            assert self._holding.wait_for(lambda: self._held >= count, seconds), f"{self._held} are held, not {count}"

    def release(self) -> None:
        """Let go on what is held now."""
        with self._holding:
            self._released += 1
            self._holding.notify_all()

    @property
    def counts(self) -> Counts:
        """A copy of the counts as they are now."""
        with self._lock:
            return Counts(Counter(self._requests), Counter(self._faults))

    # -- connections ----------------------------------------------------------------------------------------------

    @staticmethod
    def _bind(port: int) -> socket.socket:
        bound = socket.socket()
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", port))
        return bound

    def _spawn(self, work: Callable[[socket.socket], None], connection: socket.socket) -> None:
        def run() -> None:
            try:
                work(connection)
            finally:
                self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, daemon=True)
        self._threads.add(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # down
                return
            with self._lock:
                if self._listener is not listener:
                    connection.close()
                    return
                self._open.add(connection)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._spawn(self._serve, connection)

    def _serve(self, client: socket.socket) -> None:
        """The requests of one connection, until either side closes it."""
        try:
            with client.makefile("rb") as reader:
                while self._request(client, reader):
                    pass
        except (_Torn, OSError):
            pass
        finally:
            with self._lock:
                self._open.discard(client)
            _close(client)

    def _request(self, client: socket.socket, reader: BufferedReader) -> bool:
        """One request; False where the connection ends with it."""
        head = _read_head(reader)
        if head is None:
            return False
        return self._handle(client, reader, head, self._next(*head.line[:2]))

    def _next(self, method: str, target: str) -> Fault | None:
        """Count the request; the fault that takes it, if any."""
        what, taken = _operation(method, target), None
        with self._lock:
            self._requests[what] += 1
            for fault, matched in self._rules:
                if fault.matches(what, target):
                    matched[0] += 1
                    over = fault.count is not None and matched[0] >= fault.nth + fault.count
                    if taken is None and matched[0] >= fault.nth and not over:
                        taken = fault
            if taken is not None:
                self._faults[taken.name] += 1
        return taken

    def _handle(self, client: socket.socket, reader: BufferedReader, head: _Head, fault: Fault | None) -> bool:
        body = _body(reader, head, request=True)
        kind = fault.kind if fault else None
        if fault and not fault.forwarded:
            if kind == "delay":
                self._closing.wait(fault.seconds)
            elif kind == "hold":
                self._hold(client)
            elif kind in ("refuse", "drop"):
                for _ in body:  # a client hears an answer only once it has sent all
                    pass
                return kind == "refuse" and _refuse(client, head, fault)
        with self._to_hub() as upstream:
            with suppress(BrokenPipeError, ConnectionResetError):  # a Hub that refuses a body answers before its end
                _relay(head, body, upstream, fault.size if fault and kind == "cut_upload" else None)
            with upstream.makefile("rb") as answers:
                answer = _read_head(answers)
                while answer is not None and answer.line[1].startswith("1"):
                    client.sendall(answer.raw)
                    answer = _read_head(answers)
                if answer is None:
                    raise _Torn
                content = _body(answers, answer, request=False, bare=head.line[0] == "HEAD")
                if fault and fault.forwarded:
                    if kind in ("refuse", "drop"):
                        for _ in content:
                            pass
                        return kind == "refuse" and _refuse(client, head, fault)
                    self._hold(client)
                _relay(answer, content, client, fault.size if fault and kind == "cut_download" else None)
        framed = answer.chunked or "content-length" in answer.headers or answer.line[1] in ("204", "304")
        return framed and not (head.last or answer.last)

    @contextmanager
    def _to_hub(self) -> Iterator[socket.socket]:
        """A connection for one request: the Hub may be another process by the next one."""
        address = urlsplit(self.upstream)
        upstream = socket.create_connection((address.hostname or "", address.port or 80), timeout=600)
        try:
            upstream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open.add(upstream)
            yield upstream
        finally:
            with self._lock:
                self._open.discard(upstream)
            upstream.close()

    def _hold(self, client: socket.socket) -> None:
        with self._holding:
            turn = self._released
            self._held += 1
            self._holding.notify_all()
            self._holding.wait_for(lambda: self._released > turn)
            self._held -= 1
        if self._closing.is_set() or _gone(client):
            raise _Torn


def _close(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _gone(connection: socket.socket) -> bool:
    """Whether the other side has closed, even where it left bytes that were not read."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))


def _read_head(reader: BufferedReader) -> _Head | None:
    """None at the end of the connection."""
    first = reader.readline()
    if not first:
        return None
    raw, headers = [first], dict[str, str]()
    while True:
        line = reader.readline()
        if not line:
            raise _Torn
        raw.append(line)
        if line == b"\r\n":
            return _Head(b"".join(raw), first.decode("latin-1").split(maxsplit=2), headers)
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()


def _body(reader: BufferedReader, head: _Head, *, request: bool, bare: bool = False) -> Iterator[bytes]:
    """What follows a head, as it comes, with the sizes of the chunks where it is chunked. bare: an answer to HEAD."""
    try:
        if bare or (not request and head.line[1] in ("204", "304")):
            return
        if head.chunked:
            yield from _chunks(reader)
        elif "content-length" in head.headers:
            yield from _exactly(reader, int(head.headers["content-length"]))
        elif not request:
            while piece := reader.read1(PIECE):
                yield piece
    except OSError as error:  # of the reader: what the taker of a piece meets is not raised in here
        raise _Torn from error


def _chunks(reader: BufferedReader) -> Iterator[bytes]:
    size = -1
    while size != 0:
        line = reader.readline()
        if not re.match(rb"[0-9a-fA-F]", line):
            raise _Torn
        yield line
        size = int(line.partition(b";")[0], 16)
        yield from _exactly(reader, size)
        end = b""
        while end != b"\r\n":  # only trailers are longer
            end = reader.readline()
            if not end:
                raise _Torn
            yield end


def _exactly(reader: BufferedReader, size: int) -> Iterator[bytes]:
    while size:
        piece = reader.read1(min(size, PIECE))
        if not piece:
            raise _Torn
        size -= len(piece)
        yield piece


def _relay(head: _Head, body: Iterator[bytes], to: socket.socket, limit: int | None) -> None:
    """Send a message on; raises _Torn after `limit` bytes of its body, or at its end if it is shorter."""
    to.sendall(head.raw)
    sent = 0
    for piece in body:
        part = piece if limit is None else piece[: limit - sent]
        to.sendall(part)
        sent += len(part)
        if len(part) < len(piece):
            break
    if limit is not None:
        raise _Torn


def _refuse(client: socket.socket, head: _Head, fault: Fault) -> bool:
    said = f"Injected {fault.status}"
    body = b"" if head.line[0] == "HEAD" else json.dumps({"error": said}).encode()
    lines = [
        f"HTTP/1.1 {fault.status} {PHRASES.get(fault.status, 'Injected')}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        f"X-Error-Message: {said}",
    ]
    if fault.seconds:
        lines.append(f"Retry-After: {fault.seconds:g}")
    client.sendall("\r\n".join([*lines, "", ""]).encode() + body)
    return not head.last
