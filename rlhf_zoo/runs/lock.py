"""The lock of a run directory: one process at a time writes there, and says who it is.

The lock is the operating system's, on the file `.lock` in the directory, so it ends with its process, however that
ends. The file names its holder, and is gone when nobody writes.
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
#: Of a holder's command in a message.
_LONGEST = 120
_HELD: dict[Path, _Held] = {}
_HOLDING = threading.Lock()


@dataclass
class _Held:
    """The lock that this process holds on a directory. made: the folders that are there for the lock alone."""

    lock: FileLock
    made: list[Path]
    count: int = 0


@contextlib.contextmanager
def sole_writer(directory: Path, *, command: str) -> Iterator[None]:
    """Open while a command writes into a run directory; a process may open it several times, from any thread.

    command: what another command is told of this one. Of several processes that work together the first one holds it.
    Raises ZooError where another command writes there, where the directory cannot be locked, and in several processes
    that do not work together.
    """
    if distributed.started() > distributed.count():
        raise ZooError(
            f"WORLD_SIZE is {distributed.started()}, and this command runs in one process: start it without torchrun "
            "or accelerate launch, which are for `rlhf-zoo sft|reward|ppo|eval RECIPE`."
        )
    if not distributed.first():
        yield
        return
    whole = Path(os.path.realpath(directory))
    with _HOLDING:
        held = _HELD.get(whole)
        if held is None:
            held = _HELD[whole] = _take(whole, named=directory, command=command)
        held.count += 1
    try:
        yield
    finally:
        with _HOLDING:
            held.count -= 1
            if not held.count:
                del _HELD[whole]
                _release(held, whole)


def _take(directory: Path, *, named: Path, command: str) -> _Held:
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    lock = FileLock(directory / LOCK, thread_local=False, blocking=False, fallback_to_soft=False)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise ZooError(
            f"{_holder(directory / LOCK)} writes into {named}: wait until it has ended, or choose another directory."
        ) from error
    except (OSError, NotImplementedError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ZooError(
            f"{named} cannot be locked against other commands ({why}): choose a directory that can be written to, on a "
            "file system with locks."
        ) from error
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "command": command, "since": now()}
    # Over what a killed process left. The lock holds also where a full disk has no room for these words.
    with contextlib.suppress(OSError):
        (directory / LOCK).write_text(json.dumps(holder) + "\n", encoding="utf-8")
    return _Held(lock, made)


def _holder(path: Path) -> str:
    """Who holds the lock, as the beginning of a sentence."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        pid, host, command, since = (str(told[key]) for key in ("pid", "host", "command", "since"))
    except (OSError, ValueError, KeyError, TypeError):  # it has only just begun, or could not write
        return "Another command"
    shown = command if len(command) <= _LONGEST else f"{command[: _LONGEST - 3]}..."
    return f"Another command, `{shown}` (process {pid} on {host}, since {since}),"


def _release(held: _Held, directory: Path) -> None:
    """Removes the file while it is still locked, which another that has opened it notices; then its empty folders."""
    with contextlib.suppress(OSError):
        (directory / LOCK).unlink()
    held.lock.release()
    with contextlib.suppress(OSError):
        for folder in held.made:
            folder.rmdir()
