"""Counts the votes of a page while it is served. A VoteBox stores and sends them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ...errors import ZooError
from ...evaluation.votes.box import INTERVAL, VoteBox, VoteStore
from ...evaluation.votes.limits import PER_HOUR, VoteLimits
from ...evaluation.votes.ratings import summary
from ...evaluation.votes.vote import Vote, merge_votes
from ...hub.client.connect import CLIENT
from ...hub.client.refusals import client_errors, reason, retry_after

log = logging.getLogger(__name__)

#: Seconds between two reads of the Hub's votes; SOONEST applies after votes were sent.
EVERY, SOONEST = 300.0, 60.0
#: Seconds until the next read after a failure.
AGAIN = 30.0
#: After computing the intervals, pause this many times as long, so that they do not occupy the processor.
REST_FACTOR = 2.0
LONGEST_JOIN = 10.0  # seconds
READING = "they are being read"


class TallyStore(VoteStore, Protocol):
    """Stores votes and reads them back (`HubVotes`).

    `read` returns all stored votes; [] if there is no repository.
    """

    def read(self) -> list[Vote]: ...


@dataclass(frozen=True)
class Figures:
    """The figures of the votes so far.

    Attributes:
        summary: The result of `evaluation.votes.summary`. `votes`, `counts` and the value of `win_rate` include every
            vote. Intervals, pairs, elo and left include the first `computed` votes; until they are computed, the
            interval of a win rate is None.
        exact: Whether every figure includes every vote.
        computed: Number of votes in the intervals.
        due: Number of votes waiting on the disk while sending fails; 0 otherwise.
        failing: Why the last votes were not sent; None if they were.
        unread: Why votes on the Hub may be missing; None if none are.
    """

    summary: Mapping[str, Any]
    exact: bool
    computed: int
    due: int
    failing: str | None
    unread: str | None


class Tally:
    """The votes of a page: a context manager that is open while the page is served. Threads may share it.

    A cast vote is written to disk at once, and a thread sends it. Two more threads read the Hub's votes and compute the
    intervals, so that no visitor waits for the Hub or the bootstrap. Leaving the context sends the remaining votes.

    Args:
        store: Stores the votes.
        journal: Folder of the VoteBox.
        interval: Seconds between two sends of the VoteBox.
        per_hour: Largest number of votes per hour from one address.
        every: Seconds between two reads of the Hub's votes.
        soonest: Seconds until the next read after votes were sent.
        again: Seconds until the next read after a failure.
    """

    def __init__(
        self,
        store: TallyStore,
        journal: Path | None = None,
        *,
        interval: float = INTERVAL,
        per_hour: int = PER_HOUR,
        every: float = EVERY,
        soonest: float = SOONEST,
        again: float = AGAIN,
    ) -> None:

        self.name = store.name
        self._store = store
        self._box = VoteBox(self, journal, interval=interval)  # it sends by calling `append`
        self._every, self._soonest, self._again = every, min(soonest, every), again
        self._casting = threading.Lock()  # one vote at a time
        self._limits = VoteLimits(per_hour)
        # Guarded by _changed: every vote by its id, in a dictionary that is replaced and never changed; the summary,
        # and the dictionary that it was computed from.
        self._changed = threading.Condition()
        self._votes: Mapping[str, Vote] = {}
        self._summary = summary([])
        self._summarized: Mapping[str, Vote] = self._votes
        self._fresh: dict[str, Vote] = {}  # cast or read since the last read of the Hub began
        self._unread: str | None = READING
        self._hurried = self._closing = False
        self._quiet = contextlib.ExitStack()
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._read, "votes-read"), (self._compute, "votes-compute"))
        ]

    def __enter__(self) -> Tally:
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

        # A progress bar for each read and commit would fill the server's log.
        self._quiet.enter_context(disable_progress_bars())
        self._add(self._box.votes())
        self._box.__enter__()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Sends the remaining votes if the Hub accepts them, and stops the threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        try:
            self._box.__exit__(kind, *exception)
        finally:
            for thread in self._threads:
                thread.join(LONGEST_JOIN)
            self._quiet.close()

    def describe(self) -> dict[str, str]:
        """Returns the name and the address of the data set."""
        return {"name": self.name, "address": f"{CLIENT.address}/datasets/{self.name}"}

    def append(self, batch: str, votes: Sequence[Vote]) -> None:
        """Stores votes from the box. The Hub is then read soon, because others may have voted too.

        Args:
            batch: The name of the file.
            votes: The votes in it.
        """
        self._store.append(batch, votes)
        with self._changed:
            self._hurried = True
            self._changed.notify_all()

    def cast(self, vote: Vote, address: str | None = None) -> Vote:
        """Casts a vote, which is on disk and in `figures` when this returns. Never waits for the Hub.

        Args:
            vote: The vote.
            address: The voter's address from `voter_address`, for `VoteLimits`; None for no limits.

        Returns:
            The vote that counts: the first of several with the same id.

        Raises:
            ZooError: The disk cannot be written. TooManyVotesError if a limit is reached. The vote is not stored then.
        """
        pair = (vote.prompt, *sorted(f"{side.role} {side.repo} {side.commit}" for side in (vote.left, vote.right)))
        with self._casting:
            before = self._votes.get(vote.id)
            if before is None:
                if address is not None:
                    self._limits.check(address, pair)
                self._box.cast(vote)
                if address is not None:
                    self._limits.count(address, pair)
                self._add([vote])
            return before or vote

    def figures(self) -> Figures:
        """Returns the figures so far, without waiting."""
        failing = self._box.failing
        due = len(self._box.due()) if failing is not None else 0
        with self._changed:
            votes, summary, exact = self._votes, dict(self._summary), self._summarized is self._votes
            unread = self._unread
        computed = summary["votes"]
        if not exact:
            counts = _counts(votes.values())
            rate = _rate(counts)
            if rate is not None:
                before = summary["win_rate"] or {"ci95": None, "prompts": None}
                rate |= {key: before[key] for key in ("ci95", "prompts")}
            summary |= {"votes": len(votes), "counts": counts, "win_rate": rate}
        return Figures(summary, exact, computed, due, failing, unread)

    def _add(self, votes: Iterable[Vote]) -> None:
        with self._changed:
            new = {vote.id: vote for vote in votes if vote.id not in self._votes}
            if new:
                self._votes = {**self._votes, **new}
                self._fresh |= new
                self._changed.notify_all()

    def _read(self) -> None:
        while True:
            with self._changed:
                self._fresh = {}
            pause, why = self._every, None
            read: list[Vote] = []
            try:
                # Other processes may share the journal: they add votes to it, and send those of this process.
                read = merge_votes(self._store.read(), self._box.votes())
            except Exception as error:
                if not isinstance(error, (ZooError, *client_errors())):
                    log.exception("The votes of %s could not be read; trying again later.", self.name)
                pause, why = max(self._again, retry_after(error)), reason(error)
            with self._changed:
                if why is None:
                    # These are all votes, except those that arrived after the read began.
                    votes = {vote.id: vote for vote in read} | self._fresh
                    if votes.keys() != self._votes.keys():
                        self._votes = votes
                elif self._unread in (None, READING):
                    log.warning("The votes of %s could not be read (%s).", self.name, why)
                self._unread = why
                self._hurried = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closing, min(self._soonest, pause))
                self._changed.wait_for(lambda: self._closing or self._hurried, max(pause - self._soonest, 0.0))
                if self._closing:
                    return

    def _compute(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._summarized is not self._votes)
                if self._closing:
                    return
                votes = self._votes
            began, pause = time.monotonic(), self._again
            try:
                computed = summary(merge_votes(votes.values()))
            except Exception:  # a bug must neither end the thread nor be retried at once
                log.exception("Cannot compute the win rate and ratings of %d votes.", len(votes))
            else:
                pause = REST_FACTOR * (time.monotonic() - began)
                with self._changed:
                    self._summary, self._summarized = computed, votes
            with self._changed:
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closing, pause)


def _counts(votes: Iterable[Vote]) -> dict[str, int]:
    """Counts the verdicts between a PPO and an SFT model, as `counts` of a summary."""
    counts = dict.fromkeys(("ppo", "sft", "tie", "both_bad"), 0)
    for vote in votes:
        if {vote.left.role, vote.right.role} == {"ppo", "sft"}:
            counts[vote.verdict if vote.chosen is None else vote.chosen.role] += 1
    return counts


def _rate(counts: Mapping[str, int]) -> dict[str, Any] | None:
    """Computes `win_rate` of a summary without its interval and number of prompts; None without votes."""
    n = counts["ppo"] + counts["sft"] + counts["tie"]
    if not n:
        return None
    return {"value": (counts["ppo"] + counts["tie"] / 2) / n, "n": n, "ties": counts["tie"] / n}
