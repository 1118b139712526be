"""Caches values that are expensive to compute from a file, keyed by the file's digest."""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any


class DigestCache:
    """A cache of JSON values by digest. It drops the least recently used values first. Threads may share a cache.

    Args:
        max_bytes: Maximum total size of the values, in bytes of JSON text.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size = 0
        self._entries: OrderedDict[str, bytes] = OrderedDict()
        # Compute one value at a time, so that anonymous requests occupy at most one CPU core.
        self._lock, self._compute_lock = threading.Lock(), threading.Lock()

    def get(self, digest: str, compute: Callable[[], object]) -> Any:
        """Returns the value for a file.

        Args:
            digest: The file's digest.
            compute: Computes the value if it is not in the cache.

        Returns:
            A copy that the caller may change.
        """
        json_bytes = self._find(digest)
        if json_bytes is None:
            with self._compute_lock:
                json_bytes = self._find(digest)  # another thread may have computed it meanwhile
                if json_bytes is None:
                    json_bytes = json.dumps(compute(), separators=(",", ":")).encode()
                    self._store(digest, json_bytes)
        return json.loads(json_bytes)

    def _find(self, digest: str) -> bytes | None:
        with self._lock:
            json_bytes = self._entries.get(digest)
            if json_bytes is not None:
                self._entries.move_to_end(digest)
            return json_bytes

    def _store(self, digest: str, json_bytes: bytes) -> None:
        with self._lock:
            self._entries[digest] = json_bytes
            self._size += len(json_bytes)
            while self._size > self._max_bytes:
                self._size -= len(self._entries.popitem(last=False)[1])
