"""The votes of a page while it is served: kept and sent by a VoteBox, and what they say together with the Hub's."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..errors import ZooError
from ..evaluation.votes import summary
from ..hub.refusals import client_errors, reason, retry_after
from ..votes.box import INTERVAL, VoteBox, VoteStore
from ..votes.data import HubVotes
from ..votes.vote import Vote, merged

__all__ = ["Figures", "Tally", "TallyStore"]

log = logging.getLogger(__name__)

#: Seconds between two readings of the Hub's votes, of which the second may come sooner after votes were sent.
EVERY, SOONEST = 300.0, 60.0
#: Seconds until the next reading where one failed.
AGAIN = 30.0
#: After each computation of the intervals, so many times its duration without one: they must not take the processor.
REST = 2.0
LONGEST_JOIN = 10.0  # seconds
READING = "they are being read"


class TallyStore(VoteStore, Protocol):
    """Where votes go and come from (`HubVotes`). read: every vote that it has, [] where there is no repository."""

    def read(self) -> list[Vote]: ...


@dataclass(frozen=True)
class Figures:
    """What all known votes say.

    summary: as `evaluation.votes.summary` returns it. `votes`, `counts` and the value of `win_rate` are of every vote;
    intervals, pairs, elo and left are of the `computed` votes that were known when they were last computed, and the
    interval of a first win rate is None until then. exact: whether that was since the last vote.

    due: votes that the Hub has not acknowledged. failing: why the last ones were not sent, or None. unread: why votes
    that only the Hub has may be missing, or None.
    """

    summary: Mapping[str, Any]
    exact: bool
    computed: int
    due: int
    failing: str | None
    unread: str | None


class Tally:
    """The votes of a page, a context manager for the whole time of serving. Threads may share it.

    What is cast is on the disk at once and sent by a thread. Two more threads read the Hub's votes and compute the
    intervals, so that neither the Hub nor the bootstrap is waited for. Leaving sends what is left, as `VoteBox` does.
    """

    def __init__(
        self,
        store: TallyStore,
        journal: Path | None = None,
        *,
        interval: float = INTERVAL,
        every: float = EVERY,
        soonest: float = SOONEST,
        again: float = AGAIN,
    ) -> None:
        """journal, interval: of the VoteBox. every, soonest, again: seconds, see the constants of this module."""
        self.name = store.name
        self._store = store
        self._box = VoteBox(_Telling(store, self._taken), journal, interval=interval)
        self._every, self._soonest, self._again = every, min(soonest, every), again
        # Under _changed: ids that are being written, every known vote, their counts, and the version that both are of.
        self._changed = threading.Condition()
        self._casting: set[str] = set()
        self._votes: dict[str, Vote] = {}
        self._counts = _counts([])
        self._version = 0
        self._summary, self._summary_version = summary([]), 0
        self._due: set[str] = set()
        self._fresh: dict[str, Vote] = {}  # since the Hub's votes were last asked for
        self._unread: str | None = READING
        self._hurried = self._closing = False
        self._quiet = contextlib.ExitStack()
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._read, "votes-read"), (self._compute, "votes-compute"))
        ]

    @classmethod
    def on_hub(cls, repo_id: str, *, journal: Path | None = None, private: bool = False) -> Tally:
        """Over a data set of the Hub that the environment names. Raises ZooError for what is not NAMESPACE/NAME."""
        return cls(HubVotes(repo_id, private=private), journal)

    def __enter__(self) -> Tally:
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

        # One for each reading and each commit would fill the log of the server.
        self._quiet.enter_context(disable_progress_bars())
        self._add(self._box.votes())
        self._due = set(self._box.due())
        self._box.__enter__()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Sends what is left as far as the Hub takes it, and ends the threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        try:
            self._box.__exit__(kind, *rest)
        finally:
            for thread in self._threads:
                thread.join(LONGEST_JOIN)
            self._quiet.close()

    def describe(self) -> dict[str, str]:
        """name: of the data set; address: where the Hub shows it."""
        from huggingface_hub import constants

        return {"name": self.name, "address": f"{constants.ENDPOINT}/datasets/{self.name}"}

    def cast(self, vote: Vote) -> Vote:
        """Keeps a vote, and returns the one that counts: of several with one id, the first.

        It is on the disk, and in `figures`, when this returns. Never waits for the Hub. Raises ZooError where the disk
        refuses: then no vote is kept.
        """
        with self._changed:
            self._changed.wait_for(lambda: vote.id not in self._casting)
            known = self._votes.get(vote.id)
            if known is not None:
                return known
            self._casting.add(vote.id)
            self._due.add(vote.id)  # before the box has it, which may send it at once
        try:
            self._box.cast(vote)
            self._add([vote])
        except ZooError:
            with self._changed:
                self._due.discard(vote.id)
            raise
        finally:
            with self._changed:
                self._casting.discard(vote.id)
                self._changed.notify_all()
        return vote

    def figures(self) -> Figures:
        """The figures so far; waits for nothing."""
        with self._changed:
            found, exact = dict(self._summary), self._summary_version == self._version
            computed = found["votes"]
            if not exact:
                rate = _rate(self._counts)
                if rate is not None:
                    before = found["win_rate"] or {"ci95": None, "prompts": None}
                    rate |= {key: before[key] for key in ("ci95", "prompts")}
                found |= {"votes": len(self._votes), "counts": dict(self._counts), "win_rate": rate}
            return Figures(found, exact, computed, len(self._due), self._box.failing, self._unread)

    def _add(self, votes: Iterable[Vote]) -> None:
        with self._changed:
            new = {vote.id: vote for vote in votes if vote.id not in self._votes}
            if new:
                self._votes |= new
                self._fresh |= new
                for key, count in _counts(new.values()).items():
                    self._counts[key] += count
                self._version += 1
                self._changed.notify_all()

    def _taken(self, votes: Sequence[Vote]) -> None:
        """The Hub has acknowledged votes: others may stand beside them there."""
        with self._changed:
            self._due -= {vote.id for vote in votes}
            self._hurried = True
            self._changed.notify_all()

    def _read(self) -> None:
        while True:
            with self._changed:
                self._fresh, waiting = {}, self._due - self._casting
            pause, why = self._every, None
            try:
                # The journal may be shared: other processes cast votes into it, and send those of this one.
                found, sent = merged(self._store.read(), self._box.votes()), waiting - set(self._box.due())
            except Exception as error:
                if not isinstance(error, (ZooError, *client_errors())):
                    log.exception("The votes of %s are not read for now.", self.name)
                found, sent = [], set()
                pause, why = max(self._again, retry_after(error)), reason(error)
            with self._changed:
                if why is None:
                    self._due -= sent
                    self._replace(found)
                elif self._unread in (None, READING):
                    log.warning("The votes of %s could not be read (%s).", self.name, why)
                self._unread = why
                self._hurried = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closing, min(self._soonest, pause))
                self._changed.wait_for(lambda: self._closing or self._hurried, max(pause - self._soonest, 0.0))
                if self._closing:
                    return

    def _replace(self, votes: Sequence[Vote]) -> None:
        """Takes these for all there are, but for what came since their reading began."""
        known = {vote.id: vote for vote in votes} | self._fresh
        if known.keys() != self._votes.keys():
            self._votes, self._counts = known, _counts(known.values())
            self._version += 1

    def _compute(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._summary_version != self._version)
                if self._closing:
                    return
                version, votes = self._version, list(self._votes.values())
            began = time.monotonic()
            try:
                found = summary(merged(votes))
            except Exception:  # a mistake of ours must not end the thread, nor be tried again at once
                log.exception("Win rate and ratings of %d votes cannot be computed.", len(votes))
                found = None
            took = time.monotonic() - began
            with self._changed:
                if found is not None:
                    self._summary = found
                    self._summary_version = version
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closing, took * REST if found is not None else self._again)


class _Telling:
    """A store that tells what it has taken."""

    def __init__(self, store: VoteStore, taken: Callable[[Sequence[Vote]], None]) -> None:
        self.name = store.name
        self._store, self._taken = store, taken

    def append(self, batch: str, votes: Sequence[Vote]) -> None:
        self._store.append(batch, votes)
        self._taken(votes)


def _counts(votes: Iterable[Vote]) -> dict[str, int]:
    """`counts` of a summary, over votes between a PPO and an SFT model."""
    counts = dict.fromkeys(("ppo", "sft", "tie", "both_bad"), 0)
    for vote in votes:
        if {vote.left.role, vote.right.role} == {"ppo", "sft"}:
            counts[vote.verdict if vote.chosen is None else vote.chosen.role] += 1
    return counts


def _rate(counts: Mapping[str, int]) -> dict[str, Any] | None:
    """`win_rate` of a summary without its interval and its number of prompts; None without votes."""
    n = counts["ppo"] + counts["sft"] + counts["tie"]
    if not n:
        return None
    return {"value": (counts["ppo"] + counts["tie"] / 2) / n, "n": n, "ties": counts["tie"] / n}
