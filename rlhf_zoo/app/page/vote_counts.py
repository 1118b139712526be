"""Counts the votes on a page while the page is served. A VoteBox stores and sends the votes."""

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
from ...evaluation.votes.box import SEND_INTERVAL, VoteBox, VoteStore
from ...evaluation.votes.limits import VOTES_PER_HOUR, VoteLimits
from ...evaluation.votes.ratings import summarize_votes
from ...evaluation.votes.vote import Vote, merge_votes
from ...hub.client.connect import DEFAULT_HUB
from ...hub.client.refusals import client_errors, reason, retry_after

log = logging.getLogger(__name__)

#: Seconds between two reads of the Hub's votes. The shorter interval applies after votes were sent.
READ_INTERVAL, READ_INTERVAL_AFTER_SENDING = 300.0, 60.0
#: Seconds until the next try after a failure.
RETRY_DELAY = 30.0
#: The pause after computing the intervals, as a multiple of the computing time. It leaves the processor to visitors.
PAUSE_FACTOR = 2.0
JOIN_TIMEOUT = 10.0  # seconds
#: `VoteFigures.read_problem` until the first read is done.
NOT_YET_READ = "they are being read"


class TallyStore(VoteStore, Protocol):
    """Stores votes and reads them back (`HubVotes`).

    `read` returns all stored votes; [] if the data set does not exist yet.
    """

    def read(self) -> list[Vote]: ...


@dataclass(frozen=True)
class VoteFigures:
    """The figures of the votes so far.

    Attributes:
        summary: The result of `summarize_votes`. Its `votes`, `counts` and the value of `win_rate` include every vote.
            Its intervals, `prompts`, `pairs`, `elo` and `left` lag behind: they include only `votes_in_intervals`
            votes. The interval of the win rate is None until it is first computed.
        is_exact: Whether every figure includes every vote.
        votes_in_intervals: Number of votes that the intervals include.
        unsent_count: Number of votes that wait on disk because sending fails; 0 otherwise.
        send_problem: Why the last votes were not sent; None if they were sent.
        read_problem: Why votes on the Hub may be missing; None if none are.
    """

    summary: Mapping[str, Any]
    is_exact: bool
    votes_in_intervals: int
    unsent_count: int
    send_problem: str | None
    read_problem: str | None


class Tally:
    """The votes on a page: a context manager that stays open while the page is served. Threads may share it.

    A vote is written to disk when it is cast, and a thread of the VoteBox sends it. Two more threads read the Hub's
    votes and compute the intervals, so that no visitor waits for the Hub or the bootstrap. Leaving the context sends
    the remaining votes.

    Args:
        store: The data set of the votes.
        journal: Folder of the VoteBox; None for the default folder.
        send_interval: Seconds between two sends of the VoteBox.
        per_hour: Largest number of votes per hour from one address.
        read_interval: Seconds between two reads of the Hub's votes.
        read_interval_after_sending: Seconds between two reads if votes were sent since the last read.
        retry_delay: Seconds until the next try after a failure.
    """

    def __init__(
        self,
        store: TallyStore,
        journal: Path | None = None,
        *,
        send_interval: float = SEND_INTERVAL,
        per_hour: int = VOTES_PER_HOUR,
        read_interval: float = READ_INTERVAL,
        read_interval_after_sending: float = READ_INTERVAL_AFTER_SENDING,
        retry_delay: float = RETRY_DELAY,
    ) -> None:
        self.name = store.name
        self._store = store
        self._box = VoteBox(self, journal, interval=send_interval)  # it sends votes by calling our `append`
        self._read_interval, self._retry_delay = read_interval, retry_delay
        self._read_interval_after_sending = min(read_interval_after_sending, read_interval)
        self._cast_lock = threading.Lock()  # one vote at a time
        self._limits = VoteLimits(per_hour)
        self._condition = threading.Condition()  # guards the attributes from _votes to _is_closing
        self._votes: Mapping[str, Vote] = {}  # by id; never changed in place, so a thread may read it without the lock
        self._summary = summarize_votes([])
        self._summarized_votes: Mapping[str, Vote] = self._votes  # the votes in _summary
        self._new_votes: dict[str, Vote] = {}  # the votes that arrived since the last read of the Hub began
        self._read_problem: str | None = NOT_YET_READ
        self._has_sent_since_read = self._is_closing = False
        self._exit_stack = contextlib.ExitStack()
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._keep_reading, "votes-read"), (self._keep_computing, "votes-compute"))
        ]

    def __enter__(self) -> Tally:
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

        # A progress bar for each read and commit would fill the server's log.
        self._exit_stack.enter_context(disable_progress_bars())
        self._add(self._box.votes())
        self._box.__enter__()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *exception: object) -> None:
        """Sends the remaining votes if the Hub accepts them, and stops the threads."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        try:
            self._box.__exit__(error_type, *exception)
        finally:
            for thread in self._threads:
                thread.join(JOIN_TIMEOUT)
            self._exit_stack.close()

    @property
    def address(self) -> str:
        """The address of the data set on the Hub."""
        return f"{DEFAULT_HUB.address}/datasets/{self.name}"

    def append(self, batch: str, votes: Sequence[Vote]) -> None:
        """Stores votes from the VoteBox. Reads the Hub's votes soon after, because other pages may have sent votes too.

        Args:
            batch: The name of the batch.
            votes: The votes in it.
        """
        self._store.append(batch, votes)
        with self._condition:
            self._has_sent_since_read = True
            self._condition.notify_all()

    def cast(self, vote: Vote, address: str | None = None) -> Vote:
        """Casts a vote. When this returns, the vote is on disk and in `figures`. It never waits for the Hub.

        Args:
            vote: The vote.
            address: The voter's address from `voter_address`, for the rate limits; None to apply no limits.

        Returns:
            The vote that counts: the first of several with the same id.

        Raises:
            ZooError: The disk cannot be written, so the vote is not stored.
            TooManyVotesError: A rate limit is reached, so the vote is not stored.
        """
        matchup = (vote.prompt, *sorted(f"{side.role} {side.repo} {side.commit}" for side in (vote.left, vote.right)))
        with self._cast_lock:
            earlier_vote = self._votes.get(vote.id)
            if earlier_vote is None:
                if address is not None:
                    self._limits.check(address, matchup)
                self._box.cast(vote)
                if address is not None:
                    self._limits.count(address, matchup)
                self._add([vote])
            return earlier_vote or vote

    def figures(self) -> VoteFigures:
        """Returns the figures so far, without waiting."""
        send_problem = self._box.send_problem
        unsent_count = len(self._box.unsent_ids()) if send_problem is not None else 0
        with self._condition:
            votes, summary, is_exact = self._votes, dict(self._summary), self._summarized_votes is self._votes
            read_problem = self._read_problem
        votes_in_intervals = summary["votes"]
        if not is_exact:
            counts = _count_verdicts(votes.values())
            win_rate = _win_rate(counts)
            if win_rate is not None:
                earlier_rate = summary["win_rate"] or {"ci95": None, "prompts": None}
                win_rate |= {key: earlier_rate[key] for key in ("ci95", "prompts")}
            summary |= {"votes": len(votes), "counts": counts, "win_rate": win_rate}
        return VoteFigures(summary, is_exact, votes_in_intervals, unsent_count, send_problem, read_problem)

    def _add(self, votes: Iterable[Vote]) -> None:
        with self._condition:
            new_votes = {vote.id: vote for vote in votes if vote.id not in self._votes}
            if new_votes:
                self._votes = {**self._votes, **new_votes}
                self._new_votes |= new_votes
                self._condition.notify_all()

    def _keep_reading(self) -> None:
        while True:
            with self._condition:
                self._new_votes = {}
            pause, problem = self._read_interval, None
            stored_votes: list[Vote] = []
            try:
                # Other processes may share the journal: they add votes to it, and send those of this process.
                stored_votes = merge_votes(self._store.read(), self._box.votes())
            except Exception as error:
                if not isinstance(error, (ZooError, *client_errors())):
                    log.exception("The votes of %s could not be read; trying again later.", self.name)
                pause, problem = max(self._retry_delay, retry_after(error)), reason(error)
            with self._condition:
                if problem is None:
                    # The read may miss votes that arrived after it began. Any other vote that it misses was deleted.
                    votes = {vote.id: vote for vote in stored_votes} | self._new_votes
                    if votes.keys() != self._votes.keys():
                        self._votes = votes
                elif self._read_problem in (None, NOT_YET_READ):  # only the first of several failures is logged
                    log.warning("The votes of %s could not be read (%s).", self.name, problem)
                self._read_problem = problem
                self._has_sent_since_read = False
                self._condition.notify_all()
                min_pause = min(self._read_interval_after_sending, pause)
                self._condition.wait_for(lambda: self._is_closing, min_pause)
                self._condition.wait_for(lambda: self._is_closing or self._has_sent_since_read, pause - min_pause)
                if self._is_closing:
                    return

    def _keep_computing(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._is_closing or self._summarized_votes is not self._votes)
                if self._is_closing:
                    return
                votes = self._votes
            start_time, pause = time.monotonic(), self._retry_delay
            try:
                new_summary = summarize_votes(merge_votes(votes.values()))
            except Exception:  # a bug must not end the thread, nor be retried without a pause
                log.exception("Cannot compute the win rate and ratings of %d votes.", len(votes))
            else:
                pause = PAUSE_FACTOR * (time.monotonic() - start_time)
                with self._condition:
                    self._summary, self._summarized_votes = new_summary, votes
            with self._condition:
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._is_closing, pause)


def _count_verdicts(votes: Iterable[Vote]) -> dict[str, int]:
    """Computes `counts` of a summary: the number of each verdict on a PPO and an SFT model."""
    counts = dict.fromkeys(("ppo", "sft", "tie", "both_bad"), 0)
    for vote in votes:
        if {vote.left.role, vote.right.role} == {"ppo", "sft"}:
            counts[vote.verdict if vote.chosen is None else vote.chosen.role] += 1
    return counts


def _win_rate(counts: Mapping[str, int]) -> dict[str, Any] | None:
    """Computes `win_rate` of a summary, without its interval and number of prompts; None if no vote counts for it."""
    n = counts["ppo"] + counts["sft"] + counts["tie"]
    if not n:
        return None
    return {"value": (counts["ppo"] + counts["tie"] / 2) / n, "n": n, "ties": counts["tie"] / n}
