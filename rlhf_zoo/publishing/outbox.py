"""The outbox of a run: a thread that uploads finished files in order while training continues.

The remaining uploads are read from disk, so if this process is killed, the next one can send them.
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

#: Seconds without a successful upload after which a finished command stops waiting if the last attempt failed.
PATIENCE = 180.0
#: The same limit after an interruption or an error, when the command should end soon. Slow uploads count as failures.
LAST_PATIENCE = 10.0
CLOSE_TIMEOUT = 30.0  # seconds for which `close` waits for the upload in progress


class Outbox:
    """Sends a run's uploads from its own thread.

    Leaving the context calls `drain`. After an exception, it waits only as long as the Hub accepts uploads quickly.
    `notify` wakes the thread, and `drain` waits until nothing is left. The thread repeats a failed upload after a pause
    that grows to 30 seconds, or is longer if the Hub asks for it (Retry-After).

    Args:
        sender: Provides the uploads.
        hub_name: Name of the Hub, for messages.
        resume_command: The command that sends the remaining files, for messages.
        patience: Seconds without a successful upload after which `drain` gives up, if the last attempt failed.
    """

    def __init__(self, sender: Sender, *, hub_name: str, resume_command: str, patience: float = PATIENCE) -> None:
        self._sender, self._hub_name, self._resume_command, self._patience = sender, hub_name, resume_command, patience
        self._changed = threading.Condition()
        self._woken = self._closing = False  # called since the thread last looked: notify, close
        self._idle = True
        self._sent = self._failures = 0  # uploads sent; failures in a row
        self._failure_reason: str | None = None  # of the last attempt; None if it succeeded
        self._sending: str | None = None  # description of the upload in progress
        self._last_success = time.monotonic()
        self._fatal_error: BaseException | None = None  # the error that ended the thread
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)

    def __enter__(self) -> Outbox:
        self._thread.start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        try:
            if error_type is None:
                self.drain()
            elif self._fatal_error is None:
                # After an interruption or an error, send only what the Hub accepts quickly.
                self.notify()
                self._wait(patience=LAST_PATIENCE, slow_is_failure=True)
        finally:
            self.close()

    def notify(self) -> None:
        """Announces new files on disk. Never raises, because training must continue whatever the Hub does."""
        with self._changed:
            self._woken, self._idle = True, False
            self._changed.notify_all()

    def drain(self) -> None:
        """Waits until everything is sent.

        Raises:
            ZooError: The Hub fails, and no upload has succeeded for `patience` seconds. The remaining files stay on
                disk.
            Exception: The error that ended the thread, such as a ZooError for a damaged checkpoint.
        """
        self.notify()
        if not self._wait(patience=self._patience):
            uploads = self._sender.remaining_uploads()
            raise ZooError(
                f"{len(uploads)} uploads of the run are not on {self._hub_name} yet, starting with {uploads[0]} "
                f"({self._failure_reason}): run `{self._resume_command}` when the Hub answers."
            )

    def close(self) -> None:
        """Stops the thread after the upload in progress. Waits at most `CLOSE_TIMEOUT` for that upload."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=CLOSE_TIMEOUT)

    def _wait(self, *, patience: float, slow_is_failure: bool = False) -> bool:
        """Waits until nothing is left (True), or until the Hub has failed for `patience` seconds (False).

        With `slow_is_failure`, an upload that takes longer counts as a failure too.
        """
        start = time.monotonic()
        with contextlib.ExitStack() as stack:
            bar: tqdm | None = None
            while True:
                if self._fatal_error is not None:
                    raise self._fatal_error
                with self._changed:
                    if self._idle and not self._woken:
                        return True
                    self._changed.wait(0.1)
                    failing_seconds = time.monotonic() - max(self._last_success, start)
                    if (self._failure_reason is not None or slow_is_failure) and failing_seconds > patience:
                        return False
                    sent, sending = self._sent, self._sending
                if bar is None and time.monotonic() - start > 1:
                    count = len(self._sender.remaining_uploads())
                    bar = stack.enter_context(
                        tqdm(total=count + sent, initial=sent, desc="sending", unit="upload", leave=False, disable=None)
                    )
                elif bar is not None:
                    bar.set_description(f"sending {sending}" if sending else "sending", refresh=False)
                    bar.total = max(bar.total, sent)  # one upload can add others: a card, a tag, a branch
                    bar.update(sent - bar.n)

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except Exception as error:
            if isinstance(error, ZooError):
                log.warning("Uploads stopped; training continues: %s", error)
            else:
                log.exception("Uploads stopped; training continues.")
            with self._changed:
                self._fatal_error = error
                self._changed.notify_all()

    def _step(self) -> bool:
        """Sends one upload, or sleeps until there may be one. Returns False when the thread should stop."""
        with self._changed:
            if self._idle:
                self._changed.wait_for(lambda: self._woken or self._closing)
            if self._closing:
                return False
            self._woken = self._idle = False
        upload = self._sender.next_upload()
        if upload is None:
            with self._changed:
                self._idle = not self._woken
                self._changed.notify_all()
            return True
        with self._changed:
            self._sending = upload.description
        try:
            upload.send()
        except client_errors() as error:
            self._record_failure(upload.description, error)
            return True
        with self._changed:
            self._sent += 1
            self._sending = None
            self._last_success = time.monotonic()
            if self._failure_reason is not None:
                log.warning("%s answers again: %s was sent.", self._hub_name, upload.description)
            self._failure_reason, self._failures = None, 0
            self._changed.notify_all()
        return True

    def _record_failure(self, description: str, error: Exception) -> None:
        cause = "this machine's disk is full" if is_disk_full(error) else reason(error)
        with self._changed:
            if self._failure_reason is None:
                log.warning("%s was not sent to %s (%s); it will be sent later.", description, self._hub_name, cause)
            self._failure_reason = cause
            self._failures += 1
            self._changed.notify_all()
            # Closing ends the pause early, but a new checkpoint does not, because the Hub would fail again.
            self._changed.wait_for(lambda: self._closing, pause_after(error, self._failures))
