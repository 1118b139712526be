"""Time limits for user code: reward functions, and chat templates of downloaded models.

The code runs in the calling thread, as it would without a limit, because some libraries need the main thread, and
gradient mode and the current device belong to a thread. A second thread watches the clock and raises `Expired` in the
first. In the main thread, a signal also interrupts a wait for a network or a lock, and a system timer interrupts calls
that hold the GIL, such as a regular expression that backtracks. A single call into C that never checks for signals is
not interrupted.
"""

import contextlib
import ctypes
import functools
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: Seconds that code under `deadline(..., shorten_on_interrupt=True)` still has after `hurry`.
GRACE = 10.0
_TICK = 0.1
# Seconds before memory is checked, because allocations of other threads count too.
_MEMORY_GRACE = 0.5
_STATM = Path("/proc/self/statm")
# Interrupts a system call in the main thread. By default this signal does nothing.
_WAKING = getattr(signal, "SIGURG", None)
# Sent each time this process has computed for _CPU_TICK seconds. The watching thread cannot run while a call such as
# `re.match` holds the GIL, but such calls run signal handlers.
_COMPUTING = getattr(signal, "SIGVTALRM", None)
_CPU_TICK = 0.25


class Expired(BaseException):
    """Time or memory is used up. Not an Exception, so that `except Exception` in the limited code does not catch it."""


@dataclass
class _Watch:
    thread: int
    main: bool
    began: float
    ends: float
    shorten_on_interrupt: bool
    memory: int | None
    fired: bool = False

    def is_over(self, now: float) -> bool:
        if now >= self.ends:
            return True
        return self.memory is not None and now - self.began > _MEMORY_GRACE and _resident() > self.memory


class _Watcher:
    """A thread that watches deadlines."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.watches: list[_Watch] = []
        self.awake = threading.Event()
        threading.Thread(target=self._run, name="deadlines", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.awake.wait()
            time.sleep(_TICK)
            with self.lock:
                now = time.monotonic()
                for watch in [watch for watch in self.watches if watch.fired or watch.is_over(now)]:
                    self.watches.remove(watch)
                    if watch.fired:  # by the timer
                        continue
                    watch.fired = True
                    _raise_in(watch.thread, Expired)
                    if watch.main and _WAKING is not None:
                        signal.pthread_kill(watch.thread, _WAKING)
                if not self.watches:
                    self.awake.clear()

    def on_timer(self, *_: object) -> None:
        """Raises `Expired` in the main thread. Does not take the lock, because the interrupted code may hold it."""
        now = time.monotonic()
        for watch in list(self.watches):
            if watch.main and not watch.fired and watch.is_over(now):
                watch.fired = True
                raise Expired


@functools.cache
def _watcher(process_id: int) -> _Watcher:
    """Returns the watcher of this process. Each process needs its own, because a fork copies no threads."""
    return _Watcher()


@contextlib.contextmanager
def deadline(seconds: float | None, *, memory: int | None = None, shorten_on_interrupt: bool = False) -> Iterator[None]:
    """Raises `Expired` in the code that runs while this context is open, if it takes too long.

    Args:
        seconds: The limit; None for no limit.
        memory: Bytes by which this process may grow meanwhile. Checked on Linux, after half a second.
        shorten_on_interrupt: Whether the deadline is at most GRACE seconds away once `hurry` is called.

    Raises:
        Expired: Time or memory is used up.
    """
    watcher, now, main = _watcher(os.getpid()), time.monotonic(), threading.current_thread() is threading.main_thread()
    most = None if memory is None or not _STATM.exists() else _resident() + memory
    ends = now + seconds if seconds is not None else float("inf")
    watch = _Watch(threading.get_ident(), main, now, ends, shorten_on_interrupt, most)
    with _signals(watcher) if main else contextlib.nullcontext():
        try:
            with watcher.lock:
                watcher.watches.append(watch)
                watcher.awake.set()
            yield
        finally:
            with watcher.lock:
                if watch in watcher.watches:
                    watcher.watches.remove(watch)
            if watch.fired:
                _raise_in(watch.thread, None)  # the code may have ended before the exception reached it


@contextlib.contextmanager
def _signals(watcher: _Watcher) -> Iterator[None]:
    """Lets signals interrupt the main thread, and restores the previous handlers and timer afterwards."""
    if _WAKING is None or _COMPUTING is None:  # Windows
        yield
        return
    waking = signal.signal(_WAKING, lambda *_: None)
    computing = signal.signal(_COMPUTING, watcher.on_timer)
    timer = signal.setitimer(signal.ITIMER_VIRTUAL, _CPU_TICK, _CPU_TICK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(_COMPUTING, signal.SIG_IGN)  # drops a pending one, whose default action would end the process
        signal.signal(_COMPUTING, computing)
        signal.setitimer(signal.ITIMER_VIRTUAL, *timer)
        signal.signal(_WAKING, waking)


def hurry() -> None:
    """Shortens every deadline with `shorten_on_interrupt` to GRACE seconds from now. A handler of Ctrl-C calls it."""
    watcher, ends = _watcher(os.getpid()), time.monotonic() + GRACE
    # Do not take the lock, because the interrupted thread may hold it. Reading a list and setting a number are atomic.
    for watch in list(watcher.watches):
        if watch.shorten_on_interrupt:
            watch.ends = min(watch.ends, ends)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    value = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), value)


def _resident() -> int:
    """Returns how many bytes of this process are in memory."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
