"""Random assignments of completions to the policy and to SFT, which show how large an effect chance alone makes.

If policy and SFT write alike, the completions of a prompt are exchangeable: either side could have written any of them.
Each permutation therefore assigns the completions of each prompt at random, as many to each side as that side wrote.
With one completion per side, the two are swapped or not. With several, a few prompts already allow many assignments. If
the two sides answer different prompts, paired by position, single completions are not exchangeable. Then all
completions of the policy's prompt are swapped with all those of SFT's prompt, or none are.

Prompts that ask the same question count as one. Their completions are assigned in the same way: the k-th of one prompt
like the k-th of another. So other wordings of a question add no assignments.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .texts import Pair

PERMUTATIONS = 2000
#: With fewer different assignments, p may be unable to reach its level after the correction for several families.
MIN_ASSIGNMENTS = 8192
#: So many assignments need at least this many prompts that ask different things, if each prompt allows only one swap.
MIN_SWAPPED_PROMPTS = math.ceil(math.log2(MIN_ASSIGNMENTS))

_CELLS_AT_ONCE = 4_000_000  # assignments × completions

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Permutations:
    """Assignments of N completions: the policy's, followed by SFT's. Assignment 0 is the observed one.

    Attributes:
        assignments: (n, N) whether each completion is assigned to the policy.
        policy_weights: (N,) the weight of a completion in the policy's mean for its prompt.
        sft_weights: (N,) the same in SFT's mean.
        prompt_count: Number of prompts.
        log_count: The natural logarithm of the number of different assignments.
    """

    assignments: NDArray[np.bool_]
    policy_weights: Floats
    sft_weights: Floats
    prompt_count: int
    log_count: float

    @classmethod
    def of(cls, pair: Pair, *, seed: int, whole_prompts: bool) -> "Permutations":
        """Draws `PERMUTATIONS` assignments.

        Args:
            pair: The completions.
            seed: Seed of the draws.
            whole_prompts: Whether all completions of a prompt are swapped together.
        """
        rng = np.random.default_rng(seed)
        prompt_ids = np.concatenate(pair.prompt_ids)
        is_policy = np.arange(len(prompt_ids)) < len(pair.prompt_ids[0])
        counts = [np.bincount(side, minlength=pair.prompt_count) for side in pair.prompt_ids]
        weights = [(1 / count)[prompt_ids] for count in counts]
        if whole_prompts:
            is_swapped = rng.integers(0, 2, (PERMUTATIONS, pair.prompt_count)).astype(bool)[:, pair.questions]
            own_weights = np.where(is_policy, weights[0], weights[1])
            assignments = np.vstack([is_policy, is_swapped[:, prompt_ids] ^ is_policy])
            return cls(assignments, own_weights, own_weights, pair.prompt_count, pair.question_count * math.log(2))
        # After sorting by prompt, the first completions of each prompt go to the policy.
        to_policy = np.concatenate(
            [np.arange(n_policy + n_sft) < n_policy for n_policy, n_sft in zip(*counts, strict=True)]
        )
        assignments = np.empty((1 + PERMUTATIONS, len(prompt_ids)), dtype=bool)
        assignments[0] = is_policy
        step = max(1, _CELLS_AT_ONCE // len(prompt_ids))
        draw_indices = _draw_indices(pair)
        for start in range(1, len(assignments), step):
            block = assignments[start : start + step]
            # Sorting by prompt and a random number puts the completions of each prompt into a random order. Prompts
            # that ask the same question have the same random numbers, and so the same order.
            order = np.argsort(prompt_ids + rng.random(block.shape)[:, draw_indices], axis=1)
            np.put_along_axis(block, order, np.broadcast_to(to_policy, block.shape), axis=1)
        log_counts = np.zeros(pair.question_count)
        for question, n_policy, n_sft in zip(pair.questions, *counts, strict=True):
            log_count = math.lgamma(n_policy + n_sft + 1) - math.lgamma(n_policy + 1) - math.lgamma(n_sft + 1)
            # The prompt with the most assignments determines those of all prompts of its group.
            log_counts[question] = max(log_counts[question], log_count)
        return cls(assignments, weights[0], weights[1], pair.prompt_count, math.fsum(log_counts))

    @property
    def has_enough_assignments(self) -> bool:
        """Whether there are enough different assignments for p to reach its level."""
        return self.log_count >= math.log(MIN_ASSIGNMENTS) - 1e-9

    def means(self, policy: ArrayLike, sft: ArrayLike) -> tuple[Floats, Floats]:
        """Computes both sides' means over prompts under every assignment.

        Args:
            policy: (N_policy, …) numbers of the policy's completions.
            sft: (N_sft, …) numbers of SFT's completions.

        Returns:
            (policy, sft): (n, …) means each.
        """
        values = np.concatenate([np.asarray(policy, dtype=float), np.asarray(sft, dtype=float)])
        policy_weighted, sft_weighted = ((weights * values.T).T for weights in (self.policy_weights, self.sft_weights))
        policy_sums, sft_sums = self.sums(policy_weighted), sft_weighted.sum(0) - self.sums(sft_weighted)
        return policy_sums / self.prompt_count, sft_sums / self.prompt_count

    def sums(self, values: Floats, columns: Sequence[int] | slice = slice(None)) -> Floats:
        """Sums the values that each assignment gives to the policy.

        Args:
            values: (M, …) a value of each completion.
            columns: (M,) the indices of these completions.

        Returns:
            (n, …) sums.
        """
        step = max(1, _CELLS_AT_ONCE // len(values))  # converting all assignments to numbers at once takes much memory
        return np.concatenate(
            [
                self.assignments[start : start + step, columns].astype(float) @ values
                for start in range(0, len(self.assignments), step)
            ]
        )

    def pair_sums(self, values: Floats, columns: Sequence[int]) -> Floats:
        """Sums the values of the pairs of completions that each assignment gives to the policy.

        Args:
            values: (M, M) a value of each pair.
            columns: (M,) the indices of these completions.

        Returns:
            (n,) sums.
        """
        if not values.any():
            return np.zeros(len(self.assignments))
        is_policy = self.assignments[:, columns].astype(float)
        return np.asarray(((is_policy @ values) * is_policy).sum(1))


def _draw_indices(pair: Pair) -> NDArray[np.intp]:
    """Returns (N,) the random number that each completion uses: the k-th completions of a group share theirs."""
    first_indices: dict[tuple[int, int, int], int] = {}
    indices: list[int] = []
    for side, prompt_ids in enumerate(pair.prompt_ids):
        counts = [0] * pair.prompt_count
        for prompt_id in prompt_ids.tolist():
            key = (side, int(pair.questions[prompt_id]), counts[prompt_id])
            indices.append(first_indices.setdefault(key, len(indices)))
            counts[prompt_id] += 1
    return np.array(indices, dtype=np.intp)
