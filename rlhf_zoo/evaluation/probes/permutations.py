"""Random assignments of completions to the policy and to SFT: they show how large an effect chance alone makes.

If policy and SFT write the same, the completions of a prompt are exchangeable: any of them could be either side's. Each
permutation therefore assigns the completions of each prompt at random, as many to each side as it has. With one
completion on each side this swaps the two. So a few prompts suffice if there are several completions of each. Two sides
that answer different prompts and are paired by position are exchangeable only as a whole, so there all completions of a
pair of prompts are swapped together.

Prompts that ask the same count as one: their completions are assigned in the same way, the k-th of one prompt as the
k-th of another, so spellings of a question add no assignments.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .texts import Pair

PERMUTATIONS = 2000
#: With fewer different assignments, p cannot reach its level after the correction for several families.
MIN_ASSIGNMENTS = 8192
#: Number of prompts that ask different things, one swap for each, from which there are so many assignments.
MIN_SWAPPED_PROMPTS = math.ceil(math.log2(MIN_ASSIGNMENTS))

_CELLS_AT_ONCE = 4_000_000

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Permutations:
    """Assignments of N completions, the policy's first and then SFT's. The first assignment is the observed one.

    Attributes:
        assigned: (n, N) whether a completion is assigned to the policy.
        policy_weights: (N,) the weight of a completion in the policy's mean for its prompt.
        sft_weights: (N,) the same in SFT's mean.
        prompts: Number of prompts.
        assignments: The natural logarithm of the number of different assignments.
    """

    assigned: NDArray[np.bool_]
    policy_weights: Floats
    sft_weights: Floats
    prompts: int
    assignments: float

    @classmethod
    def of(cls, pair: Pair, *, seed: int, whole_prompts: bool) -> "Permutations":
        """Draws `PERMUTATIONS` assignments.

        Args:
            pair: The completions.
            seed: Seed of the draws.
            whole_prompts: Whether all completions of a prompt are swapped together.
        """
        rng = np.random.default_rng(seed)
        groups = np.concatenate(pair.groups)
        is_policy = np.arange(len(groups)) < len(pair.groups[0])
        counts = [np.bincount(side, minlength=pair.size) for side in pair.groups]
        weights = [(1 / count)[groups] for count in counts]
        if whole_prompts:
            flips = rng.integers(0, 2, (PERMUTATIONS, pair.size)).astype(bool)[:, pair.questions]
            own = np.where(is_policy, weights[0], weights[1])
            assigned = np.vstack([is_policy, flips[:, groups] ^ is_policy])
            return cls(assigned, own, own, pair.size, pair.question_count * math.log(2))
        # In order of the prompts, the first completions of each go to the policy.
        first = np.concatenate([np.arange(ours + theirs) < ours for ours, theirs in zip(*counts, strict=True)])
        assigned = np.empty((1 + PERMUTATIONS, len(groups)), dtype=bool)
        assigned[0] = is_policy
        step = max(1, _CELLS_AT_ONCE // len(groups))
        twins = _twins(pair)
        for start in range(1, len(assigned), step):
            block = assigned[start : start + step]
            # Sorting by prompt and a random number puts the completions of each prompt into a random order. Prompts
            # that ask the same have the same random numbers, and so the same order.
            order = np.argsort(groups + rng.random(block.shape)[:, twins], axis=1)
            np.put_along_axis(block, order, np.broadcast_to(first, block.shape), axis=1)
        logarithms = np.zeros(pair.question_count)
        for question, ours, theirs in zip(pair.questions, *counts, strict=True):
            count = math.lgamma(ours + theirs + 1) - math.lgamma(ours + 1) - math.lgamma(theirs + 1)
            # The assignments of a group follow from those of its prompt with the most.
            logarithms[question] = max(logarithms[question], count)
        return cls(assigned, weights[0], weights[1], pair.size, math.fsum(logarithms))

    @property
    def enough(self) -> bool:
        """Whether there are so many different assignments that p can reach its level."""
        return self.assignments >= math.log(MIN_ASSIGNMENTS) - 1e-9

    def means(self, ours: ArrayLike, theirs: ArrayLike) -> tuple[Floats, Floats]:
        """Computes both sides' means over prompts under every assignment.

        Args:
            ours: (N_policy, …) numbers of the policy's completions.
            theirs: (N_sft, …) numbers of SFT's.

        Returns:
            (n, …) the policy's means, and SFT's.
        """
        values = np.concatenate([np.asarray(ours, dtype=float), np.asarray(theirs, dtype=float)])
        ours_weighted, theirs_weighted = ((weights * values.T).T for weights in (self.policy_weights, self.sft_weights))
        policy, sft = self.sums(ours_weighted), theirs_weighted.sum(0) - self.sums(theirs_weighted)
        return policy / self.prompts, sft / self.prompts

    def sums(self, values: Floats, columns: Sequence[int] | slice = slice(None)) -> Floats:
        """Sums the values that each assignment gives to the policy.

        Args:
            values: (M, …) a value of each completion.
            columns: The M completions, by their numbers.

        Returns:
            (n, …) sums.
        """
        step = max(1, _CELLS_AT_ONCE // len(values))  # converting all assignments to numbers at once takes much memory
        return np.concatenate(
            [
                self.assigned[start : start + step, columns].astype(float) @ values
                for start in range(0, len(self.assigned), step)
            ]
        )

    def pair_sums(self, values: Floats, columns: Sequence[int]) -> Floats:
        """Sums the values of the pairs of completions that each assignment gives to the policy.

        Args:
            values: (M, M) a value of each pair.
            columns: The M completions, by their numbers.

        Returns:
            (n,) sums.
        """
        if not values.any():
            return np.zeros(len(self.assigned))
        chosen = self.assigned[:, columns].astype(float)
        return np.asarray(((chosen @ values) * chosen).sum(1))


def _twins(pair: Pair) -> NDArray[np.intp]:
    """Returns (N,) the completion whose random number each one has: its like of the first such prompt of its group."""
    first: dict[tuple[int, int, int], int] = {}
    twins: list[int] = []
    for side, groups in enumerate(pair.groups):
        counts = [0] * pair.size
        for group in groups.tolist():
            key = (side, int(pair.questions[group]), counts[group])
            twins.append(first.setdefault(key, len(twins)))
            counts[group] += 1
    return np.array(twins, dtype=np.intp)
