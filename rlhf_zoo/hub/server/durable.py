"""Private folders, JSON files, and locks that die with the process."""

import errno
import fcntl
import json
import logging
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any

from ...fileio import replace_file, sync_folder
from .messages import plain_json

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


def write_json(path: Path, value: Any, *, mode: int = 0o600) -> None:
    """`replace_file` of indented JSON."""
    replace_file(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode(), mode=mode)


def read_json(path: Path, default: Any = None) -> Any:
    """The JSON value in `path`, or `default` where there is no such file; ValueError for what `plain_json` refuses."""
    try:
        return plain_json(path.read_bytes())
    except FileNotFoundError:
        return default


def check_kinds(value: Any, kinds: Mapping[str, type | UnionType]) -> None:
    """That `value` is a JSON object in which each of these keys has a value of its kind (ValueError otherwise)."""
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.80} is no JSON object")
    for key, kind in kinds.items():
        if not isinstance(value.get(key), kind):
            raise ValueError(f"'{key}' is {value.get(key)!r:.80}" if key in value else f"'{key}' is missing")


class Clock:
    """The time for what may be removed: nothing seems older because somebody sets the clock of the machine."""

    def __init__(self) -> None:
        self._began, self._ticks = time.time(), time.monotonic()

    def now(self) -> float:
        """Seconds since the epoch."""
        return min(time.time(), self._began + time.monotonic() - self._ticks)


def link_tree(source: Path, target: Path) -> None:
    """Make a file or folder appear at `target` too; files by links, for none is ever changed where it lies.

    Nothing happens where there is no such file.
    """
    if source.is_dir():
        target.mkdir(exist_ok=True)
        for path in source.iterdir():
            link_tree(path, target / path.name)
        sync_folder(target)
    elif source.exists():
        link_file(source, target)


def link_file(source: Path, target: Path) -> None:
    """`link_tree` of one file; a copy where the file system has no links, or no more of them."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EMLINK, errno.EXDEV, errno.ENOTSUP):
            raise
        with open(source, "rb") as file, open(target, "xb") as copy:
            shutil.copyfileobj(file, copy, 2**20)
            copy.flush()
            os.fsync(copy.fileno())


@contextmanager
def in_use(path: Path) -> Iterator[None]:
    """Marks a file or folder as being written, for `is_in_use`; the kernel takes the mark away at death."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


def is_in_use(path: Path) -> bool:
    """True while a process, this one or another, is inside `in_use` for it."""
    if path.is_symlink() or not (path.is_file() or path.is_dir()):
        return False
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


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
