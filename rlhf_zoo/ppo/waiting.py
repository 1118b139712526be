"""Lets Ctrl-C and SIGTERM interrupt waits for another program, such as an engine's server."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, NoReturn


class WaitInterrupted(KeyboardInterrupt):
    """A signal ended a wait. All earlier updates are intact."""


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Makes SIGINT and SIGTERM raise WaitInterrupted while this context is open, after their own handlers have run.

    A signal without a Python handler is left alone. Outside of the main thread, which gets all signals, this context
    does nothing.
    """
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        current_handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        handlers = {number: handler for number, handler in current_handlers.items() if callable(handler)}
    try:
        for number, handler in handlers.items():
            signal.signal(number, partial(_raise_after, handler))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _raise_after(handler: Callable[[int, FrameType | None], Any], number: int, frame: FrameType | None) -> NoReturn:
    handler(number, frame)
    raise WaitInterrupted
