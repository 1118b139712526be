"""How long a client may take: for the head of a request as a whole, and for its body by the bytes that have come."""

from __future__ import annotations

import io
import socket
import threading
import time
from contextlib import suppress
from typing import Any

#: Bytes a second that a body comes with at least, once it has had the seconds that any sender is given.
SLOWEST = 4096


class PacedReader(io.RawIOBase):
    """The bytes of a connection. A read that the sender lets wait for too long raises TimeoutError.

    A time limit on each read alone lets a sender keep its thread for days, by a byte now and then.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._in_body = False
        self._deadline = self._head_seconds = 0.0
        self._patience = self._left = 0.0

    def await_head(self, idle: float, seconds: float) -> None:
        """From here on: `idle` seconds until a byte comes, and from then on `seconds` for all of a request's head."""
        self._in_body = False
        self._deadline, self._head_seconds = time.monotonic() + idle, seconds

    def await_body(self, patience: float) -> None:
        """From here on: `patience` seconds without a byte, and as many in all beyond what SLOWEST allows for them."""
        self._in_body = True
        self._patience = self._left = patience

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what has come (TimeoutError for a sender that is too slow)."""
        began = time.monotonic()
        left = min(self._patience, self._left) if self._in_body else self._deadline - began
        if left <= 0:
            raise TimeoutError("the sender is too slow")
        self._connection.settimeout(left)
        count = self._connection.recv_into(buffer)
        if self._in_body:  # only the time that the sender lets pass counts, not that of the disk
            self._left += count / SLOWEST - (time.monotonic() - began)
        elif self._head_seconds:
            self._deadline, self._head_seconds = time.monotonic() + self._head_seconds, 0.0
        return count


class Waiting:
    """The connections that have sent no whole head yet, the one that has waited longest first. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, None] = {}

    def add(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections[connection] = None

    def remove(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.pop(connection, None)

    def end_one(self) -> None:
        """Close the one that has waited longest, where there is one: its thread ends and makes room."""
        with self._lock:
            connection = next(iter(self._connections), None)
            if connection is not None:
                del self._connections[connection]
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
