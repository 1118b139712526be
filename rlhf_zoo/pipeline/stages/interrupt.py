"""Ctrl-C that waits for the step under way; a second one aborts."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from ...modeling import distributed
from ...modeling.time_limit import hurry
from ...ppo.waiting import WaitEnded

STDERR = 2


class Stopped(KeyboardInterrupt):
    """The run was interrupted and what it had done is saved."""


class EvaluationEnded(WaitEnded):
    """Ctrl-C ended an evaluation between two batches, in every process."""

    agreed = True


class Interruptible:
    """While open, the first SIGINT or SIGTERM sets `requested`; the second SIGINT raises KeyboardInterrupt at once.

    A reward function that runs at the first one has `deadline.GRACE` seconds left.

    Signals reach only the main thread; elsewhere this changes nothing.
    """

    def __init__(self, what: str) -> None:
        self.requested = False
        self._what = what
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interruptible:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        if distributed.first():
            # A signal may come while a progress bar is being written, when stderr's own buffer refuses a second write.
            message = (
                f"\nSaving {self._what} after the step under way, or after this batch of an evaluation; "
                "Ctrl-C again aborts at once.\n"
            )
            os.write(STDERR, message.encode())
        hurry()  # a reward function that hangs keeps no finished update from being saved
