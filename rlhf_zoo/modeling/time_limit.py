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

#: Seconds that code under `deadline(..., shorten_on_interrupt=True)` still gets after `shorten_deadlines`.
GRACE = 10.0
_TICK = 0.1  # seconds between two checks of the clock
# Seconds before memory is checked. Short calls are not checked, because allocations of other threads count too.
_MEMORY_GRACE = 0.5
_STATM = Path("/proc/self/statm")
# Interrupts a system call in the main thread. By default this signal does nothing.
_WAKE_SIGNAL = getattr(signal, "SIGURG", None)
# A signal after each _CPU_TICK seconds of this process's CPU time. The watching thread cannot run while a call such as
# `re.match` holds the GIL, but such calls run signal handlers.
_CPU_TIME_SIGNAL = getattr(signal, "SIGVTALRM", None)
_CPU_TICK = 0.25


class Expired(BaseException):
    """Time or memory is used up. A BaseException, so that `except Exception` in the limited code does not catch it."""


@dataclass
class _Deadline:
    """The limits of one call. Times are in seconds of `time.monotonic`."""

    thread_id: int  # of the thread whose code is limited
    is_main: bool
    started_at: float
    expires_at: float
    shorten_on_interrupt: bool
    memory: int | None  # the maximum resident memory of the process, in bytes
    fired: bool = False  # whether Expired was raised

    def is_over(self, now: float) -> bool:
        if now >= self.expires_at:
            return True
        return self.memory is not None and now - self.started_at > _MEMORY_GRACE and _resident() > self.memory


class _Watcher:
    """Watches deadlines in a thread of its own."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.deadlines: list[_Deadline] = []
        self.has_deadlines = threading.Event()
        threading.Thread(target=self._run, name="deadlines", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.has_deadlines.wait()
            time.sleep(_TICK)
            with self.lock:
                now = time.monotonic()
                for entry in [entry for entry in self.deadlines if entry.fired or entry.is_over(now)]:
                    self.deadlines.remove(entry)
                    if entry.fired:  # by the timer
                        continue
                    entry.fired = True
                    _raise_in(entry.thread_id, Expired)
                    if entry.is_main and _WAKE_SIGNAL is not None:
                        signal.pthread_kill(entry.thread_id, _WAKE_SIGNAL)
                if not self.deadlines:
                    self.has_deadlines.clear()

    def on_timer(self, *_: object) -> None:
        """Raises `Expired` in the main thread. Does not take the lock, because the interrupted code may hold it."""
        now = time.monotonic()
        for entry in list(self.deadlines):
            if entry.is_main and not entry.fired and entry.is_over(now):
                entry.fired = True
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
        memory: Bytes by which this process may grow meanwhile; None for no limit. Checked only on Linux, after half a
            second.
        shorten_on_interrupt: Whether `shorten_deadlines` brings the deadline forward to GRACE seconds after that call.

    Raises:
        Expired: Time or memory is used up.
    """
    watcher, now = _watcher(os.getpid()), time.monotonic()
    is_main = threading.current_thread() is threading.main_thread()
    max_resident = None if memory is None or not _STATM.exists() else _resident() + memory
    expires_at = now + seconds if seconds is not None else float("inf")
    entry = _Deadline(threading.get_ident(), is_main, now, expires_at, shorten_on_interrupt, max_resident)
    with _signals(watcher) if is_main else contextlib.nullcontext():
        try:
            with watcher.lock:
                watcher.deadlines.append(entry)
                watcher.has_deadlines.set()
            yield
        finally:
            with watcher.lock:
                if entry in watcher.deadlines:
                    watcher.deadlines.remove(entry)
            if entry.fired:
                _raise_in(entry.thread_id, None)  # cancels Expired if the code ended before it was raised


@contextlib.contextmanager
def _signals(watcher: _Watcher) -> Iterator[None]:
    """Lets signals interrupt the main thread, and restores the previous handlers and timer afterwards."""
    if _WAKE_SIGNAL is None or _CPU_TIME_SIGNAL is None:  # Windows
        yield
        return
    old_wake_handler = signal.signal(_WAKE_SIGNAL, lambda *_: None)
    old_timer_handler = signal.signal(_CPU_TIME_SIGNAL, watcher.on_timer)
    old_timer = signal.setitimer(signal.ITIMER_VIRTUAL, _CPU_TICK, _CPU_TICK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        # Drop a pending signal, whose default action would end the process.
        signal.signal(_CPU_TIME_SIGNAL, signal.SIG_IGN)
        signal.signal(_CPU_TIME_SIGNAL, old_timer_handler)
        signal.setitimer(signal.ITIMER_VIRTUAL, *old_timer)
        signal.signal(_WAKE_SIGNAL, old_wake_handler)


def shorten_deadlines() -> None:
    """Brings every deadline with `shorten_on_interrupt` forward to GRACE seconds from now. Call it on Ctrl-C."""
    watcher, expires_at = _watcher(os.getpid()), time.monotonic() + GRACE
    # Do not take the lock, because the interrupted thread may hold it. Reading a list and setting a number are atomic.
    for entry in list(watcher.deadlines):
        if entry.shorten_on_interrupt:
            entry.expires_at = min(entry.expires_at, expires_at)


def _raise_in(thread_id: int, error: type[BaseException] | None) -> None:
    """Raises an exception in another thread, between two of its bytecodes. None cancels a pending exception."""
    value = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), value)


def _resident() -> int:
    """Returns the resident memory of this process, in bytes."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
