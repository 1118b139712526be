"""A lock that is granted in the order of requests."""

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """Grants the lock in the order of requests, so that a stream waits at most for one token of each other stream.

    `threading.Lock` has no order: a stream that requests it again at once could keep it forever.
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
            self._grant_next()  # the turn was granted, and nobody else would pass it on
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._grant_next()

    def _grant_next(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._is_taken = False
