"""The lock of a run directory: only one process at a time writes there.

The lock is an operating-system lock on the file `.lock`, so it is released when its process ends, even if the process
is killed. The file names the command that holds the lock, and is removed when that command ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import ZooError
from ..fileio import now
from ..modeling import distributed

LOCK = ".lock"
#: Longest command shown in a message, in characters.
_MAX_COMMAND = 120
_HELD_LOCKS: dict[Path, _HeldLock] = {}
_HELD_LOCKS_GUARD = threading.Lock()


@dataclass
class _HeldLock:
    """A lock that this process holds.

    Attributes:
        lock: The operating-system lock.
        new_folders: Folders that were created only for the lock file.
        count: Number of `sole_writer` blocks that hold the lock now.
    """

    lock: FileLock
    new_folders: list[Path]
    count: int = 0


@contextlib.contextmanager
def sole_writer(directory: Path, *, command: str) -> Iterator[None]:
    """Locks a run directory while a command writes to it.

    A process may lock the same directory several times, from any thread. In distributed training the main process
    holds the lock.

    Args:
        directory: The run directory.
        command: The command, shown to another command that finds the directory locked.

    Raises:
        ZooError: Another command writes to the directory, the directory cannot be locked, or several processes were
            started for a command that runs in one.
    """
    if distributed.launched_count() > distributed.process_count():
        raise ZooError(
            f"WORLD_SIZE is {distributed.launched_count()}, but this command runs in one process: start it without "
            "torchrun or accelerate launch, which are for `rlhf-zoo sft|reward|ppo|eval RECIPE`."
        )
    if not distributed.is_main_process():
        yield
        return
    # Two names of one directory must share one lock.
    real_path = Path(os.path.realpath(directory))
    with _HELD_LOCKS_GUARD:
        held_lock = _HELD_LOCKS.get(real_path)
        if held_lock is None:
            held_lock = _HELD_LOCKS[real_path] = _acquire(real_path, shown_path=directory, command=command)
        held_lock.count += 1
    try:
        yield
    finally:
        with _HELD_LOCKS_GUARD:
            held_lock.count -= 1
            if not held_lock.count:
                del _HELD_LOCKS[real_path]
                _release(held_lock, real_path)


def _acquire(directory: Path, *, shown_path: Path, command: str) -> _HeldLock:
    new_folders = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    lock = FileLock(directory / LOCK, thread_local=False, blocking=False, fallback_to_soft=False)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise ZooError(
            f"{_describe_holder(directory / LOCK)} writes into {shown_path}: wait until it has ended, or choose "
            "another directory."
        ) from error
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ZooError(
            f"{shown_path} cannot be locked against other commands ({reason}): choose a directory that you can write "
            "to, on a file system with locks."
        ) from error
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "command": command, "since": now()}
    # This replaces the text of a killed process. A failed write on a full disk is harmless: the lock does not need it.
    with contextlib.suppress(OSError):
        (directory / LOCK).write_text(json.dumps(holder) + "\n", encoding="utf-8")
    return _HeldLock(lock, new_folders)


def _describe_holder(path: Path) -> str:
    """Describes the command that holds the lock, as the beginning of a sentence."""
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        pid, host, command, since = (str(holder[key]) for key in ("pid", "host", "command", "since"))
    except (OSError, ValueError, KeyError, TypeError):  # not written yet, or the disk was full
        return "Another command"
    excerpt = command if len(command) <= _MAX_COMMAND else f"{command[: _MAX_COMMAND - 3]}..."
    return f"Another command, `{excerpt}` (process {pid} on {host}, since {since}),"


def _release(held_lock: _HeldLock, directory: Path) -> None:
    """Removes the lock file, releases the lock, and removes the empty folders that were created for it.

    The file is removed while it is still locked, because a process that has already opened it notices the removal.
    """
    with contextlib.suppress(OSError):
        (directory / LOCK).unlink()
    held_lock.lock.release()
    with contextlib.suppress(OSError):
        for folder in held_lock.new_folders:
            folder.rmdir()
