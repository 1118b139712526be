"""The outbox of a run: a thread that sends finished files in order while training goes on.

Everything that it knows is on the disk, so a process may be killed at any moment: the next one sends the rest.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from tqdm import tqdm

from ..errors import ZooError
from ..hub.client.refusals import client_errors, is_disk_full, pause_after, reason
from .sender import Sender

log = logging.getLogger(__name__)

#: Seconds without a successful upload after which a finished command stops waiting for the Hub.
PATIENCE = 180.0
LAST_PATIENCE = 10.0
LAST_SENDING = 30.0  # seconds that closing waits for the upload in progress


class Outbox:
    """Sends a run's uploads from a thread of its own; leaving the context manager waits until all are sent.

    `notify` wakes the thread, and `drain` waits until nothing is left. After a failure the Hub is asked again after a
    pause that grows to half a minute, or that the Hub sets (Retry-After).

    Args:
        sender: Knows what is to be sent.
        hub: Name of the Hub, for messages.
        mend: The command that sends what is left, for messages.
        patience: Seconds without a success after which `drain` gives up.
    """

    def __init__(self, sender: Sender, *, hub: str, mend: str, patience: float = PATIENCE) -> None:
        self._sender, self._hub, self._mend, self._patience = sender, hub, mend, patience
        self._changed = threading.Condition()
        self._woken = self._closing = False
        self._idle = True
        self._sent = self._failures = 0
        self._failing: str | None = None
        self._sending: str | None = None
        self._last_success = time.monotonic()
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)

    def __enter__(self) -> Outbox:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.drain()
            elif self._broken is None:
                # After an interruption or an error, send what was saved only as long as the Hub accepts it quickly.
                self.notify()
                self._wait(patience=LAST_PATIENCE, whatever=True)
        finally:
            self.close()

    def notify(self) -> None:
        """Announces something new on the disk. Never raises: training goes on whatever the Hub does."""
        with self._changed:
            self._woken, self._idle = True, False
            self._changed.notify_all()

    def drain(self) -> None:
        """Waits until everything is sent.

        Raises:
            ZooError: The Hub refuses, or no upload has succeeded for `patience` seconds. What is left stays on the
                disk.
        """
        self.notify()
        if not self._wait(patience=self._patience):
            left = self._sender.due()
            raise ZooError(
                f"{len(left)} of the run's releases are not on {self._hub} yet, the first is {left[0]} "
                f"({self._failing}): when it answers, `{self._mend}` sends them."
            )

    def close(self) -> None:
        """Ends the thread after the upload in progress."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=LAST_SENDING)

    def _wait(self, *, patience: float, whatever: bool = False) -> bool:
        """Waits until nothing is left (True), or the Hub fails for `patience` seconds (False).

        With `whatever` a slow success counts as failing too.
        """
        began = time.monotonic()
        with contextlib.ExitStack() as shown:
            bar: tqdm | None = None
            while True:
                if self._broken is not None:
                    raise self._broken
                with self._changed:
                    if self._idle and not self._woken:
                        return True
                    self._changed.wait(0.1)
                    failing_for = time.monotonic() - max(self._last_success, began)
                    if (self._failing is not None or whatever) and failing_for > patience:
                        return False
                    sent, sending = self._sent, self._sending
                if bar is None and time.monotonic() - began > 1:
                    count = len(self._sender.due())
                    bar = shown.enter_context(
                        tqdm(
                            total=count + sent, initial=sent, desc="sending", unit="release", leave=False, disable=None
                        )
                    )
                elif bar is not None:
                    bar.set_description(f"sending {sending}" if sending else "sending", refresh=False)
                    bar.total = max(bar.total, sent)  # an upload may make others due: a card, a tag, a branch
                    bar.update(sent - bar.n)

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except Exception as error:
            if isinstance(error, ZooError):
                log.warning("Nothing more is sent, and training goes on: %s", error)
            else:
                log.exception("Nothing more is sent, and training goes on.")
            with self._changed:
                self._broken = error
                self._changed.notify_all()

    def _step(self) -> bool:
        """Sends one upload, or sleeps until there is one. Returns False when the thread is to end."""
        with self._changed:
            if self._idle:
                self._changed.wait_for(lambda: self._woken or self._closing)
            if self._closing:
                return False
            self._woken = self._idle = False
        upload = self._sender.next()
        if upload is None:
            with self._changed:
                self._idle = not self._woken
                self._changed.notify_all()
            return True
        with self._changed:
            self._sending = upload.what
        try:
            upload.send()
        except client_errors() as error:
            self._failed(upload.what, error)
            return True
        with self._changed:
            self._sent += 1
            self._sending = None
            self._last_success = time.monotonic()
            if self._failing is not None:
                log.warning("%s answers again: %s was sent.", self._hub, upload.what)
            self._failing, self._failures = None, 0
            self._changed.notify_all()
        return True

    def _failed(self, what: str, error: Exception) -> None:
        why = "this machine's disk is full" if is_disk_full(error) else reason(error)
        with self._changed:
            if self._failing is None:
                log.warning("%s was not sent to %s (%s); it will be sent later.", what, self._hub, why)
            self._failing = why
            self._failures += 1
            self._changed.notify_all()
            # A new checkpoint does not cut the pause short; closing does.
            self._changed.wait_for(lambda: self._closing, pause_after(error, self._failures))
