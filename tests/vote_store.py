"""Makes votes with default fields, and stores votes in memory instead of on a Hub."""

import itertools
import threading
from collections.abc import Sequence

from rlhf_zoo.evaluation.votes.vote import ShownCompletion, Vote, merge_votes

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PPO = ShownCompletion("the good camera", "ppo", "local/toy-ppo", COMMIT, "step-000040", 0.5, True)
SFT = ShownCompletion("a camera", "sft", "local/toy-sft", COMMIT[::-1], "best", -0.25, False)
NUMBERS = itertools.count()


def make_vote(verdict: str = "left", *, swapped: bool = False, **fields) -> Vote:
    """Makes a vote on a new prompt; PPO is on the left unless `swapped`."""
    left, right = (SFT, PPO) if swapped else (PPO, SFT)
    shown = {"prompt": f"prompt {next(NUMBERS)}", "left": left, "right": right, "verdict": verdict}
    return Vote(**{**shown, "temperature": 0.7, "top_p": 0.9, "seed": 3, "max_new_tokens": 20, **fields})


class Store:
    """A VoteStore: appending a batch again replaces it. existing: Votes that others have stored."""

    name = "local/votes"

    def __init__(self, existing: Sequence[Vote] = ()) -> None:
        self.existing = list(existing)
        self.batches: dict[str, list[Vote]] = {}
        self.calls = self.reads = 0
        self.append_errors: list[BaseException] = []  # raised by the next calls of append, one each
        self.late_errors: list[BaseException] = []  # the same, but once the batch is stored
        self.read_error: BaseException | None = None
        self.can_append, self.can_read = threading.Event(), threading.Event()  # append and read wait for them
        self.can_append.set()
        self.can_read.set()

    def append(self, batch: str, votes: Sequence[Vote]) -> None:
        self.calls += 1
        assert self.can_append.wait(20)
        if self.append_errors:
            raise self.append_errors.pop(0)
        self.batches[batch] = list(votes)
        if self.late_errors:
            raise self.late_errors.pop(0)

    def read(self) -> list[Vote]:
        assert self.can_read.wait(20)
        self.reads += 1
        if self.read_error is not None:
            raise self.read_error
        return merge_votes(self.existing, *self.batches.values())

    @property
    def ids(self) -> list[str]:
        return sorted(vote.id for votes in self.batches.values() for vote in votes)
