"""Time limits for user code: reward functions, and chat templates of downloaded models.

The code runs in the calling thread, as it would without a limit, because some libraries need the main thread, and
gradient mode and the current device belong to a thread. A second thread watches the clock and raises `LimitExceeded` in
the calling thread. In the main thread, a signal also interrupts waits for a network or a lock, and a system timer
interrupts calls that hold the GIL, such as a regular expression that backtracks. Nothing interrupts a call into C that
never checks for signals.
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

#: Seconds that remain for code in `deadline(..., shorten_on_interrupt=True)` after `shorten_deadlines`.
GRACE_SECONDS = 10.0
_TICK = 0.1  # seconds between two checks of the clock
# Seconds before memory is checked. Short calls are not checked, because other threads' allocations count too.
_MEMORY_GRACE = 0.5
_STATM = Path("/proc/self/statm")
# Interrupts a system call in the main thread. By default this signal does nothing.
_WAKE_SIGNAL = getattr(signal, "SIGURG", None)
# The system sends this signal after each _CPU_TICK seconds of the process's CPU time. The watching thread cannot run
# while a call such as `re.match` holds the GIL, but such calls run signal handlers.
_CPU_TIME_SIGNAL = getattr(signal, "SIGVTALRM", None)
_CPU_TICK = 0.25


class LimitExceeded(BaseException):
    """Time or memory ran out. A BaseException, so that `except Exception` in the limited code does not catch it."""


@dataclass
class _LimitedCall:
    """A run of the code in one `deadline` context, with its limits. Times are in seconds of `time.monotonic`."""

    thread_id: int  # the thread that runs the code
    in_main_thread: bool
    started_at: float
    expires_at: float
    shorten_on_interrupt: bool
    max_bytes: int | None  # the maximum resident memory of the process
    was_interrupted: bool = False  # whether LimitExceeded was raised

    def is_over(self, now: float) -> bool:
        if now >= self.expires_at:
            return True
        return self.max_bytes is not None and now - self.started_at > _MEMORY_GRACE and _rss_bytes() > self.max_bytes


class _Watcher:
    """Watches limited calls from a thread of its own."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls: list[_LimitedCall] = []
        self.has_calls = threading.Event()
        threading.Thread(target=self._run, name="deadlines", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.has_calls.wait()
            time.sleep(_TICK)
            with self.lock:
                now = time.monotonic()
                for call in [call for call in self.calls if call.was_interrupted or call.is_over(now)]:
                    self.calls.remove(call)
                    if call.was_interrupted:  # the timer raised LimitExceeded
                        continue
                    call.was_interrupted = True
                    _raise_in(call.thread_id, LimitExceeded)
                    if call.in_main_thread and _WAKE_SIGNAL is not None:
                        signal.pthread_kill(call.thread_id, _WAKE_SIGNAL)
                if not self.calls:
                    self.has_calls.clear()

    def on_timer(self, *_: object) -> None:
        """Raises `LimitExceeded` in the main thread. Takes no lock, because the interrupted code may hold it."""
        now = time.monotonic()
        for call in list(self.calls):
            if call.in_main_thread and not call.was_interrupted and call.is_over(now):
                call.was_interrupted = True
                raise LimitExceeded


@functools.cache
def _watcher(process_id: int) -> _Watcher:
    """Returns the watcher of this process. Each process needs its own watcher, because a fork copies no threads."""
    return _Watcher()


@contextlib.contextmanager
def deadline(seconds: float | None, *, memory: int | None = None, shorten_on_interrupt: bool = False) -> Iterator[None]:
    """Raises `LimitExceeded` in the code of this context if that code takes too long or uses too much memory.

    Args:
        seconds: The limit; None for no limit.
        memory: Bytes by which the process may grow while the code runs; None for no limit. Checked only on Linux, after
            half a second.
        shorten_on_interrupt: Whether `shorten_deadlines` leaves the code only GRACE_SECONDS.

    Raises:
        LimitExceeded: Time or memory ran out.
    """
    watcher, now = _watcher(os.getpid()), time.monotonic()
    in_main_thread = threading.current_thread() is threading.main_thread()
    max_bytes = None if memory is None or not _STATM.exists() else _rss_bytes() + memory
    expires_at = now + seconds if seconds is not None else float("inf")
    call = _LimitedCall(threading.get_ident(), in_main_thread, now, expires_at, shorten_on_interrupt, max_bytes)
    with _interrupting_signals(watcher) if in_main_thread else contextlib.nullcontext():
        try:
            with watcher.lock:
                watcher.calls.append(call)
                watcher.has_calls.set()
            yield
        finally:
            with watcher.lock:
                if call in watcher.calls:
                    watcher.calls.remove(call)
            if call.was_interrupted:  # cancel LimitExceeded if the code ended before it was raised
                _raise_in(call.thread_id, None)


@contextlib.contextmanager
def _interrupting_signals(watcher: _Watcher) -> Iterator[None]:
    """Lets signals interrupt the main thread, and restores the previous handlers and timer at the end."""
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
        # Drop a pending signal, because its default action would end the process.
        signal.signal(_CPU_TIME_SIGNAL, signal.SIG_IGN)
        signal.signal(_CPU_TIME_SIGNAL, old_timer_handler)
        signal.setitimer(signal.ITIMER_VIRTUAL, *old_timer)
        signal.signal(_WAKE_SIGNAL, old_wake_handler)


def shorten_deadlines() -> None:
    """Ends every deadline with `shorten_on_interrupt` GRACE_SECONDS from now, if not earlier. Call this on Ctrl-C."""
    watcher, expires_at = _watcher(os.getpid()), time.monotonic() + GRACE_SECONDS
    # Do not take the lock, because the interrupted thread may hold it. Copying a list and setting a number are atomic.
    for call in list(watcher.calls):
        if call.shorten_on_interrupt:
            call.expires_at = min(call.expires_at, expires_at)


def _raise_in(thread_id: int, error: type[BaseException] | None) -> None:
    """Raises an exception in another thread, between two of its bytecodes. None cancels a pending exception."""
    value = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), value)


def _rss_bytes() -> int:
    """Returns the resident memory of this process, in bytes."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
