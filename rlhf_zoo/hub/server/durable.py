"""Private folders, JSON files that are written atomically, and locks that the kernel releases when a process dies."""

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
from .messages import parse_plain_json

# This logger is not below rlhf_zoo.hub.server, which is silent by default: the user has to see the warning.
log = logging.getLogger("rlhf_zoo.private")


def make_private(folder: Path) -> None:
    """Makes sure that a folder exists and that only its owner can open it.

    Also creates missing parent folders. Logs a warning if others can still open the folder: it belongs to another
    user, or its file system ignores modes.

    Args:
        folder: The folder.

    Raises:
        OSError: The folder cannot be created, its path is a file, or changing its mode fails.
    """
    # Create the folders one by one, because mkdir(parents=True) ignores `mode` for parent folders.
    missing_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing_folders):
        path.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    if status.st_mode & 0o077 and status.st_uid == os.geteuid():
        folder.chmod(status.st_mode & 0o700)
        status = folder.stat()  # some file systems accept chmod and ignore it
    if status.st_mode & 0o077:
        _warn_not_private(folder, status.st_mode & 0o777)


@cache  # warn once for each folder and mode, even if a process runs several commands
def _warn_not_private(folder: Path, mode: int) -> None:
    log.warning(
        "Other users of this machine can read %s (mode %04o), including private repositories, and its mode cannot be "
        "changed: have its owner run `chmod 700`, or choose another folder.",
        folder,
        mode,
    )


def write_json(path: Path, value: object, *, mode: int = 0o600) -> None:
    """Writes indented JSON atomically, by `replace_file`.

    Args:
        path: The file.
        value: The JSON value.
        mode: The file's permissions.
    """
    replace_file(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode(), mode=mode)


def read_json(path: Path, default: object = None) -> Any:
    """Reads a JSON file.

    Args:
        path: The file.
        default: The value to return if there is no such file.

    Raises:
        ValueError: The file is not JSON that `parse_plain_json` accepts.
    """
    try:
        return parse_plain_json(path.read_bytes())
    except FileNotFoundError:
        return default


def check_types(value: object, types: Mapping[str, type | UnionType]) -> None:
    """Checks the types in a JSON object.

    Args:
        value: The JSON value.
        types: Key -> the type of its value. Each key is required; other keys are allowed.

    Raises:
        ValueError: The value is not an object, a key is missing, or its value has another type.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.80} is not a JSON object")
    for key, expected_type in types.items():
        if not isinstance(value.get(key), expected_type):
            raise ValueError(f"'{key}' is {value.get(key)!r:.80}" if key in value else f"'{key}' is missing")


class Clock:
    """A clock for deciding which files are old. If the machine's clock is set forward, files do not become older."""

    def __init__(self) -> None:
        self._start_time, self._start_ticks = time.time(), time.monotonic()

    def now(self) -> float:
        """Returns the seconds since the epoch."""
        return min(time.time(), self._start_time + time.monotonic() - self._start_ticks)


def link_tree(source: Path, target: Path) -> None:
    """Copies a file or folder with hard links, which is safe because stored files never change in place.

    Args:
        source: The file or folder. If it does not exist, nothing happens.
        target: The path of the copy. If a folder exists there, files are added to it.
    """
    if source.is_dir():
        target.mkdir(exist_ok=True)
        for path in source.iterdir():
            link_tree(path, target / path.name)
        sync_folder(target)
    elif source.exists():
        link_file(source, target)


def link_file(source: Path, target: Path) -> None:
    """Links one file to a new name. Copies it if the file system cannot link.

    Args:
        source: The file.
        target: The new name.

    Raises:
        OSError: There is no such file, the new name is taken, or copying fails.
    """
    try:
        os.link(source, target)
    except OSError as error:
        # The file system has no links, this file has too many, or the target is on another file system.
        if error.errno not in (errno.EPERM, errno.EMLINK, errno.EXDEV, errno.ENOTSUP):
            raise
        with open(source, "rb") as file, open(target, "xb") as copy:
            shutil.copyfileobj(file, copy, 2**20)
            copy.flush()
            os.fsync(copy.fileno())


@contextmanager
def mark_in_use(path: Path) -> Iterator[None]:
    """Marks a file or folder as in use, for `is_in_use`. The kernel removes the mark if the process dies.

    Args:
        path: The file or folder; it exists.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


def is_in_use(path: Path) -> bool:
    """Whether this or another process has marked a file or folder with `mark_in_use`.

    Args:
        path: The file or folder.
    """
    # This server never writes links, sockets or devices, and opening one may have side effects.
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
    """Holds a lock that excludes every other thread and process. The kernel releases it if the process dies.

    Args:
        path: The lock file, created if it does not exist.
    """
    # A flock belongs to an open file. Each call opens the file again, so that threads also exclude each other. The file
    # is never removed: two processes could otherwise lock different files of the same name.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
