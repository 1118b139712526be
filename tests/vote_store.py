"""A vote with what a test does not care about filled in, and a Hub for votes in memory."""

import itertools
import threading
from collections.abc import Sequence

from rlhf_zoo.evaluation.votes.vote import ShownCompletion, Vote, merge_votes

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PPO = ShownCompletion("the good camera", "ppo", "local/toy-ppo", COMMIT, "step-000040", 0.5, True)
SFT = ShownCompletion("a camera", "sft", "local/toy-sft", COMMIT[::-1], "best", -0.25, False)
NUMBERS = itertools.count()


def make_vote(verdict: str = "left", *, swapped: bool = False, **fields) -> Vote:
    """On a prompt of its own; PPO stands on the left unless swapped."""
    left, right = (SFT, PPO) if swapped else (PPO, SFT)
    told = {"prompt": f"prompt {next(NUMBERS)}", "left": left, "right": right, "verdict": verdict}
    return Vote(**{**told, "temperature": 0.7, "top_p": 0.9, "seed": 3, "max_new_tokens": 20, **fields})


class Store:
    """By the contract of VoteStore: a batch that comes again replaces itself. there: what was on it before."""

    name = "local/votes"

    def __init__(self, there: Sequence[Vote] = ()) -> None:
        self.there = list(there)
        self.batches: dict[str, list[Vote]] = {}
        self.calls = self.reads = 0
        self.refuse: list[BaseException] = []  # one for each append, before it is stored
        self.after: list[BaseException] = []  # one for each append, once it is stored
        self.unreadable: BaseException | None = None
        self.gate, self.shelf = threading.Event(), threading.Event()  # append and read wait for them
        self.gate.set()
        self.shelf.set()

    def append(self, batch: str, votes: Sequence[Vote]) -> None:
        self.calls += 1
        assert self.gate.wait(20)
        if self.refuse:
            raise self.refuse.pop(0)
        self.batches[batch] = list(votes)
        if self.after:
            raise self.after.pop(0)

    def read(self) -> list[Vote]:
        assert self.shelf.wait(20)
        self.reads += 1
        if self.unreadable is not None:
            raise self.unreadable
        return merge_votes(self.there, *self.batches.values())

    @property
    def ids(self) -> list[str]:
        return sorted(vote.id for votes in self.batches.values() for vote in votes)
