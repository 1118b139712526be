"""What was read out of files that cost time to read, kept by the files' digests."""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any


class Digested:
    """Results by digest, as JSON text of at most `most` bytes together; threads may share it.

    One result is read at a time, so that requests of strangers for what is not known yet wait for each other, and take
    one processor and not all.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = 0
        self._known: OrderedDict[str, bytes] = OrderedDict()
        self._lock, self._reading = threading.Lock(), threading.Lock()

    def get(self, digest: str, read: Callable[[], Any]) -> Any:
        """The result for the file of that digest, a JSON value; `read` is called where it is not known."""
        raw = self._find(digest)
        if raw is None:
            with self._reading:
                raw = self._find(digest)  # another thread may have read it meanwhile
                if raw is None:
                    raw = json.dumps(read(), separators=(",", ":")).encode()
                    self._keep(digest, raw)
        return json.loads(raw)

    def _find(self, digest: str) -> bytes | None:
        with self._lock:
            raw = self._known.get(digest)
            if raw is not None:
                self._known.move_to_end(digest)
            return raw

    def _keep(self, digest: str, raw: bytes) -> None:
        with self._lock:
            self._known[digest] = raw
            self._size += len(raw)
            while self._size > self._most:
                self._size -= len(self._known.popitem(last=False)[1])
