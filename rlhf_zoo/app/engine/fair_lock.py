"""A lock that threads get in the order in which they request it."""

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """A lock that threads get in the order of their requests. A stream then waits for one token of each other stream.

    `threading.Lock` guarantees no order: a stream that releases it and requests it again at once could starve the
    other streams.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Event] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return
            turn = threading.Event()
            self._waiting.append(turn)
        try:
            turn.wait()
        except BaseException:
            with self._lock:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                    raise
            self._grant_next()  # this thread already has the lock, and no other code would release it
            raise

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._grant_next()

    def _grant_next(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._is_taken = False
