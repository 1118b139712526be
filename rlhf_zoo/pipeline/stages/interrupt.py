"""Handles Ctrl-C. After the first Ctrl-C the current step is finished and saved; the second Ctrl-C aborts."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from ...modeling import distributed
from ...modeling.time_limit import shorten_deadlines
from ...ppo.waiting import WaitInterrupted

STDERR_FD = 2


class Stopped(KeyboardInterrupt):
    """The run was interrupted, and its finished steps were saved."""


class EvaluationInterrupted(WaitInterrupted):
    """Ctrl-C ended an evaluation between two batches, in every process."""

    raised_on_all_processes = True


class Interruptible:
    """A context in which the first SIGINT or SIGTERM sets `requested`, and a second SIGINT aborts.

    After the first signal, a running reward function has at most `modeling.time_limit.GRACE_SECONDS` left. Python
    handles signals only in the main thread, so in other threads this context has no effect.

    Args:
        subject: What is saved after a signal, for the message.
    """

    def __init__(self, subject: str) -> None:
        self.requested = False
        self._subject = subject
        self._previous_handlers: dict[int, object] = {}

    def __enter__(self) -> Interruptible:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous_handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        if distributed.is_main_process():
            # The signal may interrupt a write of the progress bar, and stderr's buffer refuses a nested write.
            message = (
                f"\nSaving {self._subject} after this step, or after this batch of an evaluation; "
                "press Ctrl-C again to abort.\n"
            )
            os.write(STDERR_FD, message.encode())
        shorten_deadlines()  # a hanging reward function must not prevent finished updates from being saved
