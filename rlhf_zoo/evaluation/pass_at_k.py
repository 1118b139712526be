"""Several answers to each prompt: how many are right, whether one of k is, and whether what most of them say is."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .stats import accuracy, share

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Answers:
    """S answers to each of P prompts.

    right: (P, S), 1 or 0. said: P times S, what each was read as, equal where two answers are the same, None where
    there was nothing to read; without it no vote is held. prompts: (P,) what tells them apart, where some may be equal:
    intervals resample equal ones together.
    """

    right: Floats
    said: Sequence[Sequence[Hashable]] | None = None
    prompts: Sequence[Hashable] | None = None

    @property
    def samples(self) -> int:
        return int(self.right.shape[1])

    def passed(self, k: int) -> Floats:
        """(P,) the chance that one of k is right: 1 − C(S − c, k)/C(S, k) where c are, unbiased.

        Chen et al. 2021, arXiv:2107.03374, eq. 1. Raises ValueError where there are fewer than k.
        """
        size = self.samples
        if size < k:
            raise ValueError(f"pass@{k} needs {k} answers a prompt, and there are {size}.")
        return np.array([1 - math.comb(size - int(c), k) / math.comb(size, k) for c in self.right.sum(1)])

    def voted(self) -> Floats:
        """(P,) whether the answer is right that most of them give; of equally many, the share of these that are.

        Wang et al. 2022, arXiv:2203.11171 (self-consistency). What could not be read has no vote.
        """
        if self.said is None:
            raise ValueError("A vote needs to know what each answer was read as.")
        return np.array([_voted(said, right) for said, right in zip(self.said, self.right, strict=True)])

    def of_all(self) -> dict[str, Floats]:
        """What is made of all S answers together, by what it is called: (P,)."""
        if self.samples < 2:
            return {}
        votes = {} if self.said is None else {f"majority of {self.samples}": self.voted()}
        return {**votes, f"pass@{self.samples}": self.passed(self.samples)}

    def to_json(self) -> dict[str, Any]:
        """accuracy, pass_at by k, a power of two or S, and majority_at S: {value, ci95, n}."""
        prompts = range(len(self.right)) if self.prompts is None else self.prompts
        most = self.samples
        sizes = sorted({most, *(2**power for power in range(most.bit_length()))})
        found: dict[str, Any] = {
            "accuracy": accuracy(self.right.ravel(), [one for one in prompts for _ in range(most)]).to_json(),
            "pass_at": {str(k): share(self.passed(k), prompts).to_json() for k in sizes},
        }
        if self.said is not None:
            found["majority_at"] = {str(most): share(self.voted(), prompts).to_json()}
        return found


def _voted(said: Sequence[Hashable], right: Floats) -> float:
    votes = Counter(one for one in said if one is not None)
    most = max(votes.values(), default=0)
    first = [said.index(one) for one, count in votes.items() if count == most]
    return float(np.mean([right[place] for place in first])) if first else 0.0
