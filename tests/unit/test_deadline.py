"""Time limits on code that is not ours, in the main thread and in others."""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable

import pytest

from rlhf_zoo.modeling import time_limit as module
from rlhf_zoo.modeling.time_limit import LimitExceeded, deadline, shorten_deadlines


def spin() -> None:
    while True:
        try:
            sum(range(1000))
        except Exception:
            continue


def sleep() -> None:
    time.sleep(60)


def wait() -> None:
    threading.Event().wait(60)


def backtrack() -> None:
    """Holds the GIL, so that no other thread runs."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def grow() -> None:
    held = []
    while True:
        held.append(bytearray(2**24))


@pytest.mark.parametrize("code", [spin, sleep, wait, backtrack])
def test_deadline_ends_endless_code(code: Callable[[], None]) -> None:
    signals = signal.SIGURG, signal.SIGVTALRM
    before, start = [signal.getsignal(number) for number in signals], time.monotonic()
    with pytest.raises(LimitExceeded), deadline(0.3):
        code()
    assert 0.3 <= time.monotonic() - start < 5
    assert [signal.getsignal(number) for number in signals] == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_deadline_works_in_other_thread() -> None:
    ended: list[float] = []

    def work() -> None:
        try:
            with deadline(0.3):
                spin()
        except LimitExceeded:
            ended.append(time.monotonic())

    start = time.monotonic()
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(10)
    assert len(ended) == 1 and ended[0] - start < 5


def test_deadline_leaves_timely_code_alone() -> None:
    for seconds in (0.001, 60) * 100:
        with deadline(seconds):
            pass
    time.sleep(0.3)  # nothing is raised later
    with deadline(None):
        time.sleep(0.2)


def test_deadline_bounds_memory() -> None:
    with pytest.raises(LimitExceeded), deadline(60, memory=2**29):
        grow()


def test_interrupt_shortens_deadlines_that_opted_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.2)
    timer = threading.Timer(0.2, shorten_deadlines)
    timer.start()
    with deadline(0.8), pytest.raises(LimitExceeded), deadline(None, shorten_on_interrupt=True):
        sleep()


def test_interrupt_ends_call_that_holds_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.2)
    before = signal.signal(signal.SIGINT, lambda *_: shorten_deadlines())
    sender = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -INT {os.getpid()}"])
    try:
        with pytest.raises(LimitExceeded), deadline(None, shorten_on_interrupt=True):
            backtrack()
    finally:
        signal.signal(signal.SIGINT, before)
        sender.wait()
