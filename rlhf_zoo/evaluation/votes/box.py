"""Stores votes on disk when they are cast, and sends them from a thread, even if the Hub fails meanwhile.

The journal is a folder, which several processes may share. Every vote is on disk at all times:

    votes/ID.json       votes that are in no batch yet
    batches/NAME.json   what one commit sends: NAME and content are fixed before it is sent, so that sending a batch
                        again, after a crash or a lost answer, changes nothing
    sent/NAME.json      batches that the Hub has acknowledged
    lock                held by the process that sends
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TextIO

from ...errors import ZooError
from ...fileio import now, sync_folder, write_text
from ...hub.client.refusals import client_errors, is_disk_full, pause_after, reason
from .vote import Vote, merge_votes

log = logging.getLogger(__name__)

#: Seconds between two commits of a box, so that a busy Space does not make one for every vote.
SEND_INTERVAL = 30.0
PATIENCE = 180.0  # seconds without progress after which `drain` gives up
ERROR_PATIENCE = 10.0  # the same while an exception ends the program
CLOSE_SECONDS = 30.0  # how long closing waits for the batch that is being sent
MAX_BATCH_VOTES = 1000  # votes in one commit
POLL_SECONDS = 0.2  # seconds between checks while another process sends


class VoteStore(Protocol):
    """The destination of batches. Appending a batch of the same name and votes again changes nothing."""

    name: str

    def append(self, batch: str, votes: Sequence[Vote]) -> None:
        """Stores a batch.

        Args:
            batch: The name of the batch.
            votes: Its votes.
        """
        ...


def default_journal(repo_id: str) -> Path:
    """Returns the default journal of a repository's votes: next to the client's cache, which is separate for each Hub.

    Args:
        repo_id: The data set NAMESPACE/NAME.
    """
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "rlhf-zoo-votes" / repo_id.replace("/", "--")


class _Journal:
    """The folder that the module's docstring describes. Several threads and processes may call its methods."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._batch_votes: dict[Path, tuple[Vote, ...]] = {}  # cached, because a batch never changes

    def write(self, vote: Vote) -> None:
        write_text(self.path / "votes" / f"{vote.id}.json", _dump_row(vote.to_row()))

    @contextlib.contextmanager
    def try_lock(self) -> Iterator[bool]:
        """Yields whether this process may send now. One process sends at a time; a killed one releases the lock."""
        with self._lock_file() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another process sends
                yield False
                return
            yield True

    def _lock_file(self) -> TextIO:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return (self.path / "lock").open("a")
        except OSError as error:
            # A full disk may be freed while the page runs; the caller tries again.
            if is_disk_full(error):
                raise
            raise ZooError(
                f"The file 'lock' in {self.path}, where votes wait, cannot be opened ({error.strerror}): make that "
                "folder writable."
            ) from error

    def next_batch(self) -> tuple[str, list[Vote]] | None:
        """Returns the name and votes of the batch to send; None if no votes wait. Call only under the lock."""
        batches = self._files("batches")
        if not batches:
            sent = self._vote_ids("sent")
            unsent = [vote for vote in self.votes_without_batch() if vote.id not in sent]
            if unsent:
                self._create_batch(unsent[:MAX_BATCH_VOTES])
            batches = self._files("batches")
        self._delete_copies()
        if not batches:
            return None
        votes = self._read_batch(batches[0])
        return (_batch_name(batches[0]), list(votes)) if votes else None

    def acknowledge(self, name: str) -> None:
        """Moves a batch into the folder `sent`. Call only under the lock."""
        source, target = (self.path / folder / f"{name.replace('/', '_')}.json" for folder in ("batches", "sent"))
        target.parent.mkdir(exist_ok=True)
        # A rename is atomic: after a crash the batch is in one folder or the other, never in both or neither.
        os.replace(source, target)
        for folder in (source.parent, target.parent):
            sync_folder(folder)

    def votes_without_batch(self) -> list[Vote]:
        """Returns the votes in the folder `votes`, oldest first. After a crash, a batch may have some of them too."""
        votes = []
        for path in self._files("votes"):
            with contextlib.suppress(FileNotFoundError):  # another process has just put it into a batch
                votes += _load_votes(path)
        return merge_votes(votes)

    def unsent_ids(self) -> set[str]:
        """Returns the ids of the votes that the Hub has not acknowledged."""
        # Read the folders in the order in which votes move, so that no moving vote is missed.
        without_batch = {path.stem for path in self._files("votes")}
        return (without_batch | self._vote_ids("batches")) - self._vote_ids("sent")

    def votes(self) -> list[Vote]:
        """Returns every vote that was cast here, sent or not."""
        without_batch = self.votes_without_batch()
        batches = (self._read_batch(path) for folder in ("batches", "sent") for path in self._files(folder))
        return merge_votes(without_batch, *batches)

    def _create_batch(self, votes: Sequence[Vote]) -> None:
        day, time_of_day = now()[:19].split("T")
        # Date and time sort batches by age; the random part keeps two processes apart.
        name = f"{day}_{time_of_day.replace(':', '')}-{uuid.uuid4().hex[:8]}.json"
        write_text(self.path / "batches" / name, "".join(_dump_row(vote.to_row()) for vote in votes))

    def _delete_copies(self) -> None:
        """Deletes single votes that a batch also holds: those of a new batch, and copies that a crash left."""
        ids_in_batches = self._vote_ids("batches") | self._vote_ids("sent")
        for path in self._files("votes"):
            if path.stem in ids_in_batches:
                path.unlink(missing_ok=True)

    def _files(self, folder: str) -> list[Path]:
        """Returns the .json files of a folder of the journal, sorted by name. A folder among them is set aside."""
        paths = sorted((self.path / folder).glob("*.json"))
        for path in paths:
            # Reading a folder as a file would fail on every attempt and block the others.
            if path.is_dir():
                _set_aside(path, "it is a folder")
        return [path for path in paths if path.is_file()]

    def _vote_ids(self, folder: str) -> set[str]:
        return {vote.id for path in self._files(folder) for vote in self._read_batch(path)}

    def _read_batch(self, path: Path) -> tuple[Vote, ...]:
        # The key leaves out the folder, so a batch is not read again after it moves from `batches` to `sent`.
        key = path.parent.parent / path.name
        if key not in self._batch_votes:
            with contextlib.suppress(FileNotFoundError):  # acknowledged meanwhile, by another process
                self._batch_votes[key] = tuple(_load_votes(path))
        return self._batch_votes.get(key, ())


def _batch_name(path: Path) -> str:
    """Turns DATE_TIME-RANDOM.json into DATE/TIME-RANDOM, so that the repository has a folder for each day."""
    return path.stem.replace("_", "/")


def _dump_row(row: Mapping[str, object]) -> str:
    """Returns the row as one line of ASCII, whatever line breaks a text contains."""
    return json.dumps(row, allow_nan=False) + "\n"


def _load_votes(path: Path) -> list[Vote]:
    """Reads a journal file. Files appear complete or not at all, so an unreadable file is set aside."""
    try:
        return [Vote.from_row(json.loads(line)) for line in path.read_bytes().splitlines()]
    except (ValueError, RecursionError, ZooError) as error:
        _set_aside(path, str(error))
    except FileNotFoundError:
        raise
    except OSError as error:
        _set_aside(path, error.strerror or type(error).__name__)
    return []


def _set_aside(path: Path, problem: str) -> None:
    """Renames a file that is not a vote, so that it is not read again. If that fails, every read skips it."""
    new_path = path.with_suffix(".unreadable")
    if new_path.exists():
        new_path = path.with_suffix(f".{uuid.uuid4().hex[:8]}.unreadable")
    try:
        os.replace(path, new_path)
    except FileNotFoundError:  # another process has set it aside
        return
    except OSError as error:
        log.error("%s is not a vote (%s), and cannot be set aside (%s); it is not sent.", path, problem, error.strerror)
        return
    log.error("%s is not a vote (%s); it is kept as %s and not sent.", path, problem, new_path.name)


class VoteBox:
    """Takes votes at any time and sends them from a thread of its own; a context manager.

    After a failure the Hub is tried again. The pause grows to half a minute, or is as long as Retry-After demands.
    Votes that a killed process had not sent are sent by the next box with the same journal.

    Args:
        store: The destination (`HubVotes`).
        journal: The folder where votes wait; None for `default_journal` of the store.
        interval: Seconds between two commits.
        patience: Seconds without progress after which `drain` gives up.
    """

    def __init__(
        self,
        store: VoteStore,
        journal: Path | None = None,
        *,
        interval: float = SEND_INTERVAL,
        patience: float = PATIENCE,
    ) -> None:
        self._store = store
        self._journal = _Journal(journal if journal is not None else default_journal(store.name))
        self._interval, self._patience = interval, patience
        self._changed = threading.Condition()
        self._wake, self._closing = True, False  # whether to look for votes to send, and whether to end
        self._drains = 0  # calls of `drain` in progress, during which the interval does not apply
        self._send_problem: str | None = None  # why the last attempt failed
        self._failures = 0  # attempts that failed in a row
        self._thread = threading.Thread(target=self._keep_sending, name="votes", daemon=True)

    def __enter__(self) -> VoteBox:
        self._thread.start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Sends the remaining votes. Those that the Hub does not accept stay on the disk, with a warning."""
        try:
            # After an exception the program should end soon.
            self.drain(self._patience if error_type is None else min(self._patience, ERROR_PATIENCE))
        except ZooError as error:
            log.warning("%s", error)
        finally:
            self.close()

    def cast(self, vote: Vote) -> None:
        """Stores a vote on the disk, without waiting for the Hub. A vote that is cast twice counts once.

        Raises:
            ZooError: The disk refuses, and the vote is not stored.
        """
        # The disk comes first, so that no vote is lost once this method has returned.
        self._journal.write(vote)
        with self._changed:
            self._wake = True
            self._changed.notify_all()

    def unsent_ids(self) -> list[str]:
        """Returns the ids of the votes in the journal that the Hub has not acknowledged."""
        return sorted(self._journal.unsent_ids())

    def votes(self) -> list[Vote]:
        """Returns every vote that was cast into this journal, sent or not, oldest first."""
        return self._journal.votes()

    @property
    def send_problem(self) -> str | None:
        """Why the last attempt to send failed; None if it succeeded."""
        return self._send_problem

    def drain(self, patience: float | None = None) -> None:
        """Waits until every vote cast so far is sent, regardless of the interval.

        Args:
            patience: Seconds without progress after which to give up; None for the patience of the box.

        Raises:
            ZooError: The Hub accepted nothing for that long. The votes stay on the disk.
        """
        patience = self._patience if patience is None else patience
        # Only the votes cast so far: on a busy page, waiting for an empty journal might never end.
        unsent, last_progress = self._journal.unsent_ids(), time.monotonic()
        with self._changed:
            self._drains += 1
            self._wake = True
            self._changed.notify_all()
        try:
            while unsent:
                with self._changed:
                    self._changed.wait(0.1)
                previous, unsent = unsent, unsent & self._journal.unsent_ids()
                if unsent != previous:  # sent by this box, or by another box with the same journal
                    last_progress = time.monotonic()
                elif time.monotonic() - last_progress > patience:
                    count = len(self._journal.unsent_ids())
                    raise ZooError(
                        f"{count} vote{'s' * (count > 1)} for {self._store.name} are not on the Hub yet "
                        f"({self._send_problem or 'it is slow'}): they are kept in {self._journal.path} and will be "
                        "sent when the page is opened again."
                    )
        finally:
            with self._changed:
                self._drains -= 1

    def close(self) -> None:
        """Ends the thread after its current batch."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        # With a timeout, because a request that hangs must not keep the page from closing.
        if self._thread.is_alive():
            self._thread.join(timeout=CLOSE_SECONDS)

    def _keep_sending(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wake or self._closing)
                if self._closing:
                    return
                self._wake = False
            try:
                sent = self._send_batch()
            except Exception as error:
                # Expected failures are logged once by `_record_failure`; anything else gets its traceback.
                if not isinstance(error, (ZooError, OSError, *client_errors())):
                    log.exception("Votes are not sent for now.")
                self._wait(self._record_failure(error))
            else:
                self._wait(self._interval if sent else 0.0, unless_draining=True)

    def _send_batch(self) -> bool:
        """Sends a batch if one waits, and returns whether it did."""
        with self._journal.try_lock() as may_send:
            batch = self._journal.next_batch() if may_send else None
            if batch is not None:
                name, votes = batch
                # After a crash between these two lines, the batch is sent again, which changes nothing.
                self._store.append(name, votes)
                self._journal.acknowledge(name)
        if not may_send:
            self._wait(POLL_SECONDS)
        with self._changed:
            if batch is None:
                self._wake |= not may_send  # another process sends now, so try again
                return False
            if self._send_problem is not None:
                log.warning("%s answers again: votes are sent.", self._store.name)
            self._send_problem, self._failures = None, 0
            self._wake = True  # there may be more votes
            self._changed.notify_all()
        return True

    def _wait(self, seconds: float, *, unless_draining: bool = False) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or (unless_draining and self._drains > 0), seconds)

    def _record_failure(self, error: Exception) -> float:
        """Records a failure and returns the seconds to wait before the next attempt."""
        problem = "this machine's disk is full" if is_disk_full(error) else reason(error)
        with self._changed:
            if self._send_problem is None:
                log.warning("Votes were not sent to %s (%s); they will be later.", self._store.name, problem)
            self._send_problem = problem
            self._failures += 1
            self._wake = True
        return pause_after(error, self._failures)
