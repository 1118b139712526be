"""Limits how long a client may take: a fixed time for a request's head, and a minimum speed for its body."""

from __future__ import annotations

import io
import socket
import threading
import time
from contextlib import suppress
from typing import Any

#: Minimum average speed of a body in bytes per second, not counting each sender's allowance.
MIN_BYTES_PER_SECOND = 4096


class MinimumRateReader(io.RawIOBase):
    """Reads a connection, and raises TimeoutError if the sender is too slow.

    A time limit for each read would not be enough: by sending a byte now and then, a client could occupy its thread for
    days.

    Args:
        connection: The socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._in_body = False
        self._deadline = self._head_seconds = 0.0
        self._allowance = self._seconds_left = 0.0

    def expect_head(self, idle: float, seconds: float) -> None:
        """Sets the limits for a request's head, which the next reads wait for.

        Args:
            idle: Seconds that its first byte may take.
            seconds: Seconds that the rest of its head may take after that.
        """
        self._in_body = False
        self._deadline, self._head_seconds = time.monotonic() + idle, seconds

    def expect_body(self, allowance: float) -> None:
        """Sets the limit for a body, which the next reads wait for.

        Args:
            allowance: Seconds that the sender may lag behind MIN_BYTES_PER_SECOND in total; also the limit on one
                pause.
        """
        self._in_body = True
        self._allowance = self._seconds_left = allowance

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads the bytes that have arrived.

        Args:
            buffer: Receives the bytes.

        Raises:
            TimeoutError: The sender is too slow.
        """
        start = time.monotonic()
        timeout = min(self._allowance, self._seconds_left) if self._in_body else self._deadline - start
        if timeout <= 0:
            raise TimeoutError("the sender is too slow")
        self._connection.settimeout(timeout)
        count = self._connection.recv_into(buffer)
        if self._in_body:
            # A budget of seconds, which shrinks by the time spent waiting, and grows with each byte. The time that we
            # take to write the bytes to the disk does not count against the sender.
            self._seconds_left += count / MIN_BYTES_PER_SECOND - (time.monotonic() - start)
        elif self._head_seconds:  # the first byte of a head: now the limit for the whole head starts
            self._deadline, self._head_seconds = time.monotonic() + self._head_seconds, 0.0
        return count


class PendingConnections:
    """The connections that have not sent a complete head yet, oldest first. Threads may share it."""

    def __init__(self) -> None:
        # The values are unused: a dict keeps the order of insertion, which a set does not.
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, None] = {}

    def add(self, connection: socket.socket) -> None:
        """Adds a connection that starts to wait.

        Args:
            connection: The connection.
        """
        with self._lock:
            self._connections[connection] = None

    def remove(self, connection: socket.socket) -> None:
        """Removes a connection whose head is complete, or that has ended.

        Args:
            connection: The connection.
        """
        with self._lock:
            self._connections.pop(connection, None)

    def close_oldest(self) -> None:
        """Closes the connection that has waited longest, if there is one. Its thread then ends and makes room."""
        with self._lock:
            connection = next(iter(self._connections), None)
            if connection is not None:
                del self._connections[connection]
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
