"""The outbox thread: in order, again after a failure, never in the way of training, and honest about what is left."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.refusals import retry_after
from rlhf_zoo.publishing import outbox as module
from rlhf_zoo.publishing.outbox import Outbox
from rlhf_zoo.publishing.sender import Upload


class Disk:
    """What a Sender would find: names still to be sent; `before(name)` may fail."""

    def __init__(self, *names: str, before: Callable[[str], None] = lambda name: None) -> None:
        self.left = list(names)
        self.sent: list[str] = []
        self.tries: list[str] = []
        self._before = before

    def remaining_uploads(self) -> list[str]:
        return list(self.left)

    def next_upload(self) -> Upload | None:
        return Upload(self.left[0], self._send) if self.left else None

    def _send(self) -> None:
        name = self.left[0]
        self.tries.append(name)
        self._before(name)
        self.sent.append(self.left.pop(0))


def failing(times: int, error: Exception) -> Callable[[str], None]:
    """Fails so many times, then no more."""
    count = [0]

    def before(name: str) -> None:
        count[0] += 1
        if count[0] <= times:
            raise error

    return before


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("rlhf_zoo.hub.client.refusals.FIRST_PAUSE", 0.01)
    monkeypatch.setattr("rlhf_zoo.hub.client.refusals.MAX_PAUSE", 0.05)


def outbox(disk: Disk, patience: float = 5.0) -> Outbox:
    return Outbox(disk, hub_name="the Hub", resume_command="rlhf-zoo push --resume run", patience=patience)  # type: ignore[arg-type]


def test_outbox_sends_in_order_once_notified():
    disk, threads = Disk("one", "two", "three"), threading.active_count()
    with outbox(disk) as box:
        time.sleep(0.1)
        assert disk.sent == []
        box.notify()
        box.drain()
        assert disk.sent == ["one", "two", "three"]
        disk.left += ["four"]
        box.notify()
    assert disk.sent == ["one", "two", "three", "four"] and threading.active_count() == threads


def test_notify_does_not_wait_for_uploads():
    going, done = threading.Event(), threading.Event()

    def slow(name: str) -> None:
        going.set()
        assert done.wait(10)

    disk = Disk("one", before=slow)
    with outbox(disk) as box:
        box.notify()
        assert going.wait(10)
        for _ in range(100):
            box.notify()
        assert disk.sent == []
        done.set()
    assert disk.sent == ["one"]


def test_failed_upload_is_retried_and_logged_once(caplog):
    disk = Disk("one", "two", before=failing(3, OSError("the line is cut")))
    with outbox(disk) as box:
        box.notify()
    assert disk.sent == ["one", "two"] and disk.tries == ["one", "one", "one", "one", "two"]
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "one was not sent to the Hub (the line is cut); it will be sent later.",
        "the Hub answers again: one was sent.",
    ]


def test_outbox_gives_up_after_patience_and_says_how_to_resume():
    disk = Disk("step 5 of ppo", "step 10 of ppo", before=failing(10**6, OSError("no route to host")))
    began = time.monotonic()
    with pytest.raises(ZooError) as caught, outbox(disk, patience=0.3):
        pass
    assert time.monotonic() - began < 5
    assert str(caught.value) == (
        "2 uploads of the run are not on the Hub yet, starting with step 5 of ppo (no route to host): run `rlhf-zoo "
        "push --resume run` when the Hub answers."
    )


def test_refusal_is_raised_only_at_the_end(caplog):
    disk = Disk("one", before=failing(10**6, ZooError("local/x holds another run.")))
    box = outbox(disk).__enter__()
    box.notify()
    time.sleep(0.2)
    box.notify()
    with pytest.raises(ZooError, match="holds another run"):
        box.__exit__(None)
    assert disk.tries == ["one"]
    assert "training continues: local/x holds another run." in caplog.text


def test_unexpected_exception_is_raised(caplog):
    disk = Disk("one", before=failing(10**6, KeyError("a defect")))
    with pytest.raises(KeyError, match="a defect"), outbox(disk) as box:
        box.notify()
    assert "Traceback" in caplog.text


def test_interrupted_outbox_sends_saved_files_and_reraises():
    disk = Disk("one", "two")
    with pytest.raises(KeyboardInterrupt), outbox(disk):
        raise KeyboardInterrupt
    assert disk.sent == ["one", "two"]


def test_interrupted_outbox_does_not_wait_for_unreachable_hub(monkeypatch):
    monkeypatch.setattr(module, "LAST_PATIENCE", 0.2)
    disk = Disk("one", before=failing(10**6, OSError("away")))
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), outbox(disk, patience=60):
        raise KeyboardInterrupt
    assert time.monotonic() - began < 5 and disk.left == ["one"]


def busy(**headers: str) -> OSError:
    error = OSError("429")
    error.response = SimpleNamespace(headers=headers)  # type: ignore[attr-defined]
    return error


def test_outbox_waits_for_retry_after():
    for said, seconds in (("7", 7.0), ("99999", 600.0), ("soon", 0.0)):
        assert retry_after(busy(**{"Retry-After": said})) == seconds
    assert retry_after(busy()) == retry_after(OSError("no answer")) == 0.0
    error = busy(**{"Retry-After": "1"})
    disk = Disk("one", before=failing(1, error))
    began = time.monotonic()
    with outbox(disk) as box:
        box.notify()
    assert 1.0 <= time.monotonic() - began < 5 and disk.sent == ["one"]
