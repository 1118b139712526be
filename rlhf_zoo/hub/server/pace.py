"""Limits how long a client may take to send a request: a fixed time for the head, a minimum speed for the body."""

from __future__ import annotations

import io
import socket
import threading
import time
from contextlib import suppress
from typing import Any

#: Minimum average speed of a body in bytes per second, apart from the allowance that each sender has.
MIN_BYTES_PER_SECOND = 4096


class MinimumRateReader(io.RawIOBase):
    """Reads a connection, and raises TimeoutError if the sender is too slow.

    A time limit for each read would not be enough: a client could occupy its thread for days by sending a byte now and
    then.

    Args:
        connection: The socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._is_in_body = False
        self._deadline = self._head_seconds = 0.0
        self._allowance = self._seconds_left = 0.0

    def expect_head(self, idle: float, seconds: float) -> None:
        """Sets the time limits for the next reads, which read a request's head.

        Args:
            idle: Seconds until the head's first byte must arrive.
            seconds: Seconds after that until the head must be complete.
        """
        self._is_in_body = False
        self._deadline, self._head_seconds = time.monotonic() + idle, seconds

    def expect_body(self, allowance: float) -> None:
        """Sets the time limit for the next reads, which read a request's body.

        Args:
            allowance: Seconds that the sender may fall behind MIN_BYTES_PER_SECOND in total; also the maximum wait for
                the next bytes.
        """
        self._is_in_body = True
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
        timeout = min(self._allowance, self._seconds_left) if self._is_in_body else self._deadline - start
        if timeout <= 0:
            raise TimeoutError("the sender is too slow")
        self._connection.settimeout(timeout)
        count = self._connection.recv_into(buffer)
        if self._is_in_body:
            # This budget of seconds shrinks by the time spent waiting and grows with each byte. The time that the
            # server takes to write the bytes to the disk does not count against the sender.
            self._seconds_left += count / MIN_BYTES_PER_SECOND - (time.monotonic() - start)
        elif self._head_seconds:  # a head's first byte starts the time limit for the complete head
            self._deadline, self._head_seconds = time.monotonic() + self._head_seconds, 0.0
        return count


class PendingConnections:
    """The connections that have not sent a complete head yet, oldest first. Threads may share this collection."""

    def __init__(self) -> None:
        # The values are unused: a dict keeps the order of insertion, which a set does not.
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, None] = {}

    def add(self, connection: socket.socket) -> None:
        """Adds a connection that waits for a head.

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
        """Closes the connection that has waited longest, if any. Its thread then ends and frees the slot."""
        with self._lock:
            connection = next(iter(self._connections), None)
            if connection is not None:
                del self._connections[connection]
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
