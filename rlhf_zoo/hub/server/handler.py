"""Serves HTTP/1.1 on threads: reads a request, asks the application, and sends the answer."""

from __future__ import annotations

import io
import ipaddress
import logging
import re
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from .. import LOOPBACK_HOSTS
from .faults import Fault, bad_request, disk_fault
from .messages import Body, FilePart, Request, Response, json_response
from .pace import MinimumRateReader, PendingConnections

if TYPE_CHECKING:
    from .application import Application

log = logging.getLogger(__name__)
_WILDCARDS = ("", "0.0.0.0", "::")  # hosts that stand for every address of this machine
# Each connection needs a thread and a few file descriptors. By default, a process may have 1,024 descriptors.
_MAX_CONNECTIONS = 256
# Seconds that a new connection waits for the slot of another connection, which is being closed.
_SLOT_SECONDS = 2.0
_BUSY_ANSWER = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
# Seconds that a client may keep its thread waiting: between two requests, for a complete head, and for a body.
_IDLE_SECONDS = 15.0
_HEAD_SECONDS = 15.0
_BODY_SECONDS = 120.0


class HubServer(ThreadingHTTPServer):
    """The listening server.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 for any free one.
        application: Answers the requests.
    """

    # A connection that hangs must not keep the process alive. `wait_idle` waits for requests in progress.
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, application: Application) -> None:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = addresses[0]
        self.application = application
        self.bound_host = host
        self._active_requests = 0
        self._idle = threading.Condition()
        self._slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self.pending_connections = PendingConnections()
        super().__init__(address[:2], ConnectionHandler)  # type: ignore[arg-type]

    def server_bind(self) -> None:
        """Binds without the reverse name lookup of http.server, which can take seconds without a network."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for a connection.

        If there are too many connections, closes the one that has waited longest without a complete head. If all of
        them have a request in progress, answers 503.

        Args:
            request: The connection.
            client_address: The client's host and port.
        """
        if not self._slots.acquire(blocking=False):
            self.pending_connections.close_oldest()
            if not self._slots.acquire(timeout=_SLOT_SECONDS):
                with suppress(OSError):  # the client may be gone
                    request.sendall(_BUSY_ANSWER)
                self.shutdown_request(request)
                return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serves a connection until it ends, then frees its slot.

        Args:
            request: The connection.
            client_address: The client's host and port.
        """
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    @property
    def url(self) -> str:
        """The server's address for clients on this machine."""
        host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.bound_host, self.bound_host)
        return f"http://[{host}]:{self.server_port}" if ":" in host else f"http://{host}:{self.server_port}"

    def accepts_host(self, header: str) -> bool:
        """Whether a Host header names this server.

        This check stops DNS rebinding, in which a web page makes its own host name resolve to this machine.

        Args:
            header: Value of the header, with or without a port.

        Returns:
            True for loopback names and for the address that the server is bound to. If the server is bound to all
            addresses, also for any IP address and this machine's names.
        """
        name = re.sub(r":[0-9]+$", "", header).strip("[]").lower()
        if name in LOOPBACK_HOSTS or name == self.bound_host.lower():
            return True
        if self.bound_host not in _WILDCARDS:
            return False
        try:
            ipaddress.ip_address(name)
            return True
        except ValueError:
            return name in (socket.gethostname().lower(), socket.getfqdn().lower())

    def handle_error(self, request: object, client_address: object) -> None:
        """Logs a bug. Not called for clients that disconnect: `handle` closes those connections.

        Args:
            request: The connection.
            client_address: The client's host and port.
        """
        log.exception("A connection failed.")

    def begin_request(self) -> None:
        """Counts a request as in progress, for `wait_idle`."""
        with self._idle:
            self._active_requests += 1

    def end_request(self) -> None:
        """Counts a request as finished, for `wait_idle`."""
        with self._idle:
            self._active_requests -= 1
            self._idle.notify_all()

    def wait_idle(self, seconds: float) -> None:
        """Waits until no request is in progress.

        Args:
            seconds: Maximum wait.
        """
        with self._idle:
            self._idle.wait_for(lambda: self._active_requests == 0, seconds)


def _is_same_origin(origin: str, host: str) -> bool:
    """Whether a page at `origin` came from this server. `host` is the name and port that the client used for it."""
    return origin.lower().removesuffix(":80") == f"http://{host.lower().removesuffix(':80')}"


class ConnectionHandler(BaseHTTPRequestHandler):
    """Serves a connection, on its own thread."""

    protocol_version = "HTTP/1.1"
    server_version = "rlhf-zoo-hub"
    sys_version = ""
    disable_nagle_algorithm = True
    server: HubServer

    def setup(self) -> None:
        super().setup()
        # Replace the plain reader with a reader that has deadlines for the head and the body.
        self.rfile.close()
        self._reader = MinimumRateReader(self.connection)
        self.rfile = io.BufferedReader(self._reader)

    def handle_one_request(self) -> None:
        self._reader.expect_head(_IDLE_SECONDS, _HEAD_SECONDS)
        self.server.pending_connections.add(self.connection)
        try:
            super().handle_one_request()
        finally:
            self.server.pending_connections.remove(self.connection)

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionError, TimeoutError):
            log.debug("%s disconnected", self.client_address)

    def _answer(self) -> None:
        start = time.monotonic()
        self.server.pending_connections.remove(self.connection)
        self._reader.expect_body(_BODY_SECONDS)
        self.server.begin_request()
        try:
            body: Body | None = None
            try:
                body = Body(self.rfile, self.headers)
                host = self._check_host()
                role = self.server.application.find_role(self.path, self.headers)
                path, _, query = self.path.partition("?")
                try:
                    fields = parse_qs(query, keep_blank_values=True, max_num_fields=5000)
                except ValueError as error:
                    raise bad_request("The request's query has too many fields.") from error
                request = Request(self.command, path, fields, self.headers, body, role, f"http://{host}")
                response = self.server.application.answer(request)
            except Fault as fault:
                response = _refusal_response(fault)
            except ConnectionError:
                self.close_connection = True
                return
            except Exception as error:
                response = self._answer_failure(error)
            # The next request on this connection starts after the body. If its end is not found, close the connection.
            if body is None or not body.drain():
                self.close_connection = True
            self._send(response)
            seconds = time.monotonic() - start
            log.info("%s %s %d %.0f ms", self.command, _redact_signature(self.path), response.status, 1000 * seconds)
        finally:
            self.server.end_request()

    def _answer_failure(self, error: Exception) -> Response:
        """Logs the exception that made a request fail, and returns the answer to that request."""
        if isinstance(error, OSError):
            is_write = self.command not in ("GET", "HEAD")
            fault = disk_fault(error, self.server.application.root, is_write=is_write)
            if fault is not None:
                log.warning("%s %s: %s", self.command, _redact_signature(self.path), error)
                return _refusal_response(fault)
        log.exception("%s %s failed", self.command, _redact_signature(self.path))
        return _refusal_response(Fault(500, "The embedded Hub failed on this request: see its log on stderr."))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _answer

    def _check_host(self) -> str:
        """Returns the name and port that the client used for this server.

        Raises Fault 403 for a name that is not this server's, and for requests from pages of other sites.
        """
        # Browsers send Origin with requests from pages of other sites. Client libraries do not send it.
        names = self.headers.get_all("Host", [])
        host = names[0].strip() if len(names) == 1 else ""
        if not self.server.accepts_host(host):
            raise Fault(403, f"'{host[:100]}' is not a name of this Hub; use {self.server.url}")
        for origin in self.headers.get_all("Origin", []):
            if not _is_same_origin(origin.strip(), host):
                raise Fault(403, f"Pages of '{origin[:100]}' may not use this Hub")
        return host

    def _send(self, response: Response) -> None:
        self.connection.settimeout(_BODY_SECONDS)  # the reader may have set a shorter timeout
        self.send_response_only(response.status)
        self.send_header("Server", self.server_version)
        self.send_header("Date", self.date_time_string())
        for name, value in response.headers.items():
            self.send_header(name, _header_text(value))
        if response.status != 304:
            self.send_header("Content-Length", str(response.length))
        if self.close_connection:
            self.send_header("Connection", "close")
        content = response.content
        if self.command == "HEAD":
            self.end_headers()
        elif isinstance(content, FilePart):
            with open(content.path, "rb") as file:
                self.end_headers()
                if content.count:
                    # The length has been announced. If the file is shorter, closing the connection tells the client so.
                    sent_bytes = self.connection.sendfile(file, content.offset, content.count)
                    self.close_connection |= sent_bytes != content.count
        else:
            self.end_headers()
            self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Sends http.server's own refusals (of malformed requests) in the Hub's form.

        Args:
            code: HTTP status.
            message: The reason, if http.server gives one.
            explain: Ignored.
        """
        self.close_connection = True
        # http.server calls this before it has parsed a command or a version, which `_send` needs.
        if not hasattr(self, "command") or self.command is None:
            self.command = "GET"
        if self.request_version == "HTTP/0.9":
            self.request_version = "HTTP/1.1"
        self._send(_refusal_response(Fault(int(code), message or "The request cannot be read.")))

    def log_message(self, format: str, *args: Any) -> None:
        """Logs a line of the standard library's server.

        Args:
            format: The format string.
            args: Its arguments.
        """
        log.info(format, *args)


def _redact_signature(path: str) -> str:
    """Returns the path for the log, without its signature, which would let anyone who reads the log upload files."""
    return re.sub(r"signature=[^&]*", "signature=...", path)


def _header_text(value: str) -> str:
    """Converts a value to text that a header can hold: one line of printable Latin-1."""
    # Answers quote text that clients sent. A line break in it would let a client add headers.
    line = "".join(char if char.isprintable() else " " for char in value)
    return line.encode("latin-1", "replace").decode("latin-1")


def _refusal_response(fault: Fault) -> Response:
    # The client adds a period to the message of a 403.
    message = fault.message.rstrip(".") if fault.status == 403 else fault.message
    headers = {**fault.headers, "X-Error-Message": message}
    if fault.code:
        headers["X-Error-Code"] = fault.code
    return json_response({"error": fault.message, **fault.body}, status=fault.status, headers=headers)
