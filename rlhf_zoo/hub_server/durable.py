"""Files that are whole or absent, whatever kills the process, and locks that die with it."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from .messages import plain_json

__all__ = ["locked", "make_private", "read_json", "sync_folder", "write_bytes", "write_json"]

log = logging.getLogger("rlhf_zoo.private")  # on stderr whoever calls, for the user is to know


def make_private(folder: Path) -> None:
    """Make a folder that only its owner can enter, with those above it that are missing, or close it to others.

    Says on stderr where others may look into it and it cannot be closed. OSError where there can be no such folder.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    if found.st_mode & 0o077 and found.st_uid == os.geteuid():
        folder.chmod(found.st_mode & 0o700)
        found = folder.stat()
    if found.st_mode & 0o077:
        _say_open(folder, found.st_mode & 0o777)


@cache
def _say_open(folder: Path, mode: int) -> None:
    log.warning(
        "Others on this machine may look into %s (mode %04o), private repositories and all, and it cannot be closed to "
        "them from here: have its owner run `chmod 700`, or choose another folder.",
        folder,
        mode,
    )


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_bytes(path: Path, data: bytes, *, mode: int = 0o600, scratch: Path | None = None) -> None:
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


def write_json(path: Path, value: Any, *, mode: int = 0o600) -> None:
    """`write_bytes` of indented JSON."""
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode(), mode=mode)


def read_json(path: Path, default: Any = None) -> Any:
    """The JSON value in `path`, or `default` where there is no such file; ValueError for what `plain_json` refuses."""
    try:
        return plain_json(path.read_bytes())
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
