"""Votes on their way: on the disk once they are cast, then sent by a thread, whatever the Hub does.

The journal is a folder, which several processes may share, and nothing of a vote is only in memory:

    votes/ID.json       cast, in no batch yet
    batches/NAME.json   what one commit sends: NAME and content are settled before it is sent, so that sending a batch
                        again, after a kill or an answer that was lost, changes nothing
    sent/NAME.json      what the Hub has acknowledged
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
from typing import Any, Protocol, TextIO

from ...errors import ZooError
from ...fileio import now, sync_folder, write_text
from ...hub.client.refusals import client_errors, is_disk_full, pause_after, reason
from .vote import Vote, merged

log = logging.getLogger(__name__)

#: Seconds between two commits of a box, so that a busy Space does not make one for every vote.
INTERVAL = 30.0
PATIENCE = 180.0
LAST_PATIENCE = 10.0
LAST_SENDING = 30.0  # seconds that closing waits for what is being sent
LARGEST_BATCH = 1000
LOOK_AGAIN = 0.2  # seconds, where another process sends


class VoteStore(Protocol):
    """Where batches go. append: called again with the same name and votes, it changes nothing."""

    name: str

    def append(self, batch: str, votes: Sequence[Vote]) -> None: ...


def journal_of(repo_id: str) -> Path:
    """Where the votes for a repository wait by default: beside the client's cache, which each Hub has its own of."""
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "rlhf-zoo-votes" / repo_id.replace("/", "--")


class _Journal:
    """The folder; see the module's head. Its methods may be called by several threads and processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: dict[Path, tuple[Vote, ...]] = {}  # batches, which never change

    def write(self, vote: Vote) -> None:
        write_text(self.path / "votes" / f"{vote.id}.json", _dump(vote.to_row()))

    @contextlib.contextmanager
    def sending(self) -> Iterator[bool]:
        """Whether this process may send now: one does at a time, and a killed one no longer."""
        with self._lock_file() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def _lock_file(self) -> TextIO:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return (self.path / "lock").open("a")
        except OSError as error:
            if is_disk_full(error):
                raise
            raise ZooError(
                f"Votes wait in {self.path}, whose file 'lock' cannot be opened ({error.strerror}): mend that folder."
            ) from error

    def next_batch(self) -> tuple[str, list[Vote]] | None:
        """(name, votes) of what is to be sent, None where nothing waits. Only while `sending`."""
        begun = self._files("batches")
        if not begun:
            known = self._ids("sent")
            waiting = [vote for vote in self.waiting() if vote.id not in known]
            if waiting:
                self._begin(waiting[:LARGEST_BATCH])
            begun = self._files("batches")
        self._forget_copies()
        if not begun:
            return None
        votes = self._votes(begun[0])
        return (_batch_name(begun[0]), list(votes)) if votes else None

    def acknowledge(self, name: str) -> None:
        """Counts a batch as sent. Only while `sending`."""
        source, target = (self.path / folder / f"{name.replace('/', '_')}.json" for folder in ("batches", "sent"))
        target.parent.mkdir(exist_ok=True)
        os.replace(source, target)
        for folder in (source.parent, target.parent):
            sync_folder(folder)

    def waiting(self) -> list[Vote]:
        """The votes that are in no batch yet, or are still there beside their batch, oldest first."""
        found = []
        for path in self._files("votes"):
            with contextlib.suppress(FileNotFoundError):  # another process has just put it into a batch
                found += _load(path)
        return merged(found)

    def due(self) -> set[str]:
        """Ids of votes that were not acknowledged."""
        # In the order in which a vote moves on, so that none is missed on its way.
        cast = {path.stem for path in self._files("votes")}
        return (cast | self._ids("batches")) - self._ids("sent")

    def votes(self) -> list[Vote]:
        """Every vote that was cast here, sent or not."""
        waiting = self.waiting()
        return merged(waiting, *(self._votes(path) for kind in ("batches", "sent") for path in self._files(kind)))

    def _begin(self, votes: Sequence[Vote]) -> None:
        day, clock = now()[:19].split("T")
        name = f"{day}_{clock.replace(':', '')}-{uuid.uuid4().hex[:8]}.json"
        write_text(self.path / "batches" / name, "".join(_dump(vote.to_row()) for vote in votes))

    def _forget_copies(self) -> None:
        """Deletes the single votes that a batch holds: after a kill they may lie there twice."""
        held = self._ids("batches") | self._ids("sent")
        for path in self._files("votes"):
            if path.stem in held:
                path.unlink(missing_ok=True)

    def _files(self, folder: str) -> list[Path]:
        """The files of one of its folders, by name; what has such a name and is no file is set aside."""
        paths = sorted((self.path / folder).glob("*.json"))
        for path in paths:
            if path.is_dir():
                _set_aside(path, "it is a folder")
        return [path for path in paths if path.is_file()]

    def _ids(self, folder: str) -> set[str]:
        return {vote.id for path in self._files(folder) for vote in self._votes(path)}

    def _votes(self, path: Path) -> tuple[Vote, ...]:
        known = path.parent.parent / path.name
        if known not in self._read:
            with contextlib.suppress(FileNotFoundError):  # acknowledged meanwhile, by another process
                self._read[known] = tuple(_load(path))
        return self._read.get(known, ())


def _batch_name(path: Path) -> str:
    """DATE_TIME-RANDOM.json -> DATE/TIME-RANDOM: a folder of the repository for every day."""
    return path.stem.replace("_", "/")


def _dump(row: Mapping[str, Any]) -> str:
    """One line of ASCII, whatever line breaks a text holds."""
    return json.dumps(row, allow_nan=False) + "\n"


def _load(path: Path) -> list[Vote]:
    """The votes of a file of the journal, which is whole or absent; one that a disk has spoilt is set aside."""
    try:
        return [Vote.from_row(json.loads(line)) for line in path.read_bytes().splitlines()]
    except (ValueError, RecursionError, ZooError) as error:
        _set_aside(path, str(error))
    except FileNotFoundError:
        raise
    except OSError as error:
        _set_aside(path, error.strerror or type(error).__name__)
    return []


def _set_aside(path: Path, why: str) -> None:
    """Gives what holds no vote a name that nothing reads; where it must stay, it is read in vain each time."""
    aside = path.with_suffix(".unreadable")
    if aside.exists():
        aside = path.with_suffix(f".{uuid.uuid4().hex[:8]}.unreadable")
    try:
        os.replace(path, aside)
    except FileNotFoundError:  # by another process
        return
    except OSError as error:
        log.error("%s is no vote (%s), and cannot be set aside (%s); it is not sent.", path, why, error.strerror)
        return
    log.error("%s is no vote (%s); it is kept as %s and not sent.", path, why, aside.name)


class VoteBox:
    """Takes votes at any time, and sends them from a thread of its own; a context manager.

    store: where they go (`HubVotes`); journal: the folder that they wait in, `journal_of` by default. interval: seconds
    between two commits. A Hub that fails is asked again after a pause that grows to half a minute, or as long as it
    says (Retry-After). What a process that was killed had not sent, the next box over the same journal sends.
    """

    def __init__(
        self, store: VoteStore, journal: Path | None = None, *, interval: float = INTERVAL, patience: float = PATIENCE
    ) -> None:
        self._store = store
        self._journal = _Journal(journal if journal is not None else journal_of(store.name))
        self._interval, self._patience = interval, patience
        self._changed = threading.Condition()
        self._woken, self._hurried, self._closing = True, 0, False
        self._failing: str | None = None
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="votes", daemon=True)

    def __enter__(self) -> VoteBox:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Sends what is left as far as the Hub takes it; what it does not stays on the disk, and is said."""
        try:
            self.drain(self._patience if kind is None else min(self._patience, LAST_PATIENCE))
        except ZooError as error:
            log.warning("%s", error)
        finally:
            self.close()

    def cast(self, vote: Vote) -> None:
        """Keeps a vote: once this returns, it is on the disk. A vote that is cast twice counts once.

        Never waits for the Hub. Raises ZooError where the disk refuses: then the vote is not kept.
        """
        self._journal.write(vote)
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def due(self) -> list[str]:
        """Ids of the votes in the journal that the Hub has not acknowledged yet."""
        return sorted(self._journal.due())

    def votes(self) -> list[Vote]:
        """Every vote that was cast into this journal, sent or not, oldest first."""
        return self._journal.votes()

    @property
    def failing(self) -> str | None:
        """Why the last attempt to send failed; None where it did not."""
        return self._failing

    def drain(self, patience: float | None = None) -> None:
        """Waits until all that was cast so far is sent, without regard to the interval.

        Raises ZooError when the Hub has not taken anything for `patience` seconds; votes stay on the disk.
        """
        patience = self._patience if patience is None else patience
        left, progress = self._journal.due(), time.monotonic()
        with self._changed:
            self._hurried += 1
            self._woken = True
            self._changed.notify_all()
        try:
            while left:
                with self._changed:
                    self._changed.wait(0.1)
                before, left = left, left & self._journal.due()
                if left != before:  # by this box, or by another one over this journal
                    progress = time.monotonic()
                elif time.monotonic() - progress > patience:
                    count = len(self._journal.due())
                    raise ZooError(
                        f"{count} vote{'s' * (count > 1)} for {self._store.name} are not on the Hub yet "
                        f"({self._failing or 'it is slow'}): they are kept in {self._journal.path}, and sent when the "
                        "page is opened again."
                    )
        finally:
            with self._changed:
                self._hurried -= 1

    def close(self) -> None:
        """Ends the thread after what it is sending now."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=LAST_SENDING)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._woken or self._closing)
                if self._closing:
                    return
                self._woken = False
            try:
                sent = self._step()
            except Exception as error:
                if not isinstance(error, (ZooError, OSError, *client_errors())):
                    log.exception("Votes are not sent for now.")
                self._wait(self._failed(error))
            else:
                self._wait(self._interval if sent else 0.0, unless_hurried=True)

    def _step(self) -> bool:
        """Sends a batch if one waits; returns whether it did."""
        with self._journal.sending() as mine:
            batch = self._journal.next_batch() if mine else None
            if batch is not None:
                name, votes = batch
                self._store.append(name, votes)
                self._journal.acknowledge(name)
        if not mine:
            self._wait(LOOK_AGAIN)
        with self._changed:
            if batch is None:
                self._woken |= not mine
                return False
            if self._failing is not None:
                log.warning("%s answers again: votes are sent.", self._store.name)
            self._failing, self._failures = None, 0
            self._woken = True  # there may be more
            self._changed.notify_all()
        return True

    def _wait(self, seconds: float, *, unless_hurried: bool = False) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or (unless_hurried and self._hurried > 0), seconds)

    def _failed(self, error: Exception) -> float:
        """Notes a failure. Returns the seconds to wait before the next try."""
        why = "this machine's disk is full" if is_disk_full(error) else reason(error)
        with self._changed:
            if self._failing is None:
                log.warning("Votes were not sent to %s (%s); they will be later.", self._store.name, why)
            self._failing = why
            self._failures += 1
            self._woken = True
        return pause_after(error, self._failures)
