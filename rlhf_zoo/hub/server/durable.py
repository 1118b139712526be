"""Files that are whole or absent, whatever kills the process, and locks that die with it."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["locked", "read_json", "sync_folder", "write_bytes", "write_json"]


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_bytes(path: Path, data: bytes, *, mode: int = 0o644, scratch: Path | None = None) -> None:
    """Replace `path` in one step: readers see the old content or the new, never a part.

    The new content is first written to a `*.tmp` file in `scratch` (the file's own folder by default).
    """
    fd, temporary = tempfile.mkstemp(dir=scratch or path.parent, prefix=f".{path.name[:40]}-", suffix=".tmp")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Any, *, mode: int = 0o644) -> None:
    """`write_bytes` of indented JSON."""
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode(), mode=mode)


def read_json(path: Path, default: Any = None) -> Any:
    """The JSON value in `path`, or `default` where there is no such file."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return default


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` against every thread and every process; the kernel frees it at death.

    Lock files stay: removing one would let two holders lock two different files of the same name.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
