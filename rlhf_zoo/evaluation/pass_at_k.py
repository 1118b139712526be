"""Metrics of several answers to each prompt: accuracy, pass@k, and whether the majority answer is right."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .stats import accuracy, mean_share

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Answers:
    """S answers to each of P prompts.

    Attributes:
        correct: (P, S) 1 for a right answer, else 0.
        parsed: (P, S) the answer parsed from each text: equal for equal answers, None if it could not be parsed.
            Without it there is no majority vote.
        groups: (P,) a key for each prompt; intervals treat prompts with equal keys as one group. None if all differ.
    """

    correct: Floats
    parsed: Sequence[Sequence[Hashable]] | None = None
    groups: Sequence[Hashable] | None = None

    @property
    def samples_per_prompt(self) -> int:
        """The number of answers per prompt, S."""
        return int(self.correct.shape[1])

    def pass_at(self, k: int) -> Floats:
        """Estimates pass@k, the probability that at least one of k answers is right, without bias.

        Args:
            k: Answers drawn without replacement.

        Returns:
            (P,) 1 − C(S − c, k)/C(S, k), where c of the S answers are right.

        Raises:
            ValueError: There are fewer than k answers.

        Source: Chen et al. 2021, arXiv:2107.03374, equation 1.
        """
        size = self.samples_per_prompt
        if size < k:
            raise ValueError(f"pass@{k} needs {k} answers per prompt; there are {size}.")
        # math.comb is exact, and 0 if fewer than k answers are wrong.
        return np.array([1 - math.comb(size - int(c), k) / math.comb(size, k) for c in self.correct.sum(1)])

    def majority_correct(self) -> Floats:
        """Computes whether the most frequent answer is right (self-consistency). Unreadable answers do not vote.

        Returns:
            (P,) 1 or 0; if several answers are equally frequent, the share of them that are right.

        Raises:
            ValueError: `parsed` is missing.

        Source: Wang et al. 2022, arXiv:2203.11171.
        """
        if self.parsed is None:
            raise ValueError("A majority vote needs the parsed answers: pass `parsed`.")
        return np.array(
            [_majority_credit(answers, correct) for answers, correct in zip(self.parsed, self.correct, strict=True)]
        )

    def joint_figures(self) -> dict[str, Floats]:
        """Returns the metrics that need all S answers to a prompt, (P,) each: the majority vote and pass@S."""
        if self.samples_per_prompt < 2:
            return {}
        votes = {} if self.parsed is None else {f"majority of {self.samples_per_prompt}": self.majority_correct()}
        return {**votes, f"pass@{self.samples_per_prompt}": self.pass_at(self.samples_per_prompt)}

    def to_json(self) -> dict[str, Any]:
        """Returns accuracy, pass_at by k (powers of two, and S), and majority_at S, each {value, ci95, n}."""
        groups = range(len(self.correct)) if self.groups is None else self.groups
        samples = self.samples_per_prompt
        sizes = sorted({samples, *(2**power for power in range(samples.bit_length()))})
        figures: dict[str, object] = {
            "accuracy": accuracy(self.correct.ravel(), [group for group in groups for _ in range(samples)]).to_json(),
            "pass_at": {str(k): mean_share(self.pass_at(k), groups).to_json() for k in sizes},
        }
        if self.parsed is not None:
            figures["majority_at"] = {str(samples): mean_share(self.majority_correct(), groups).to_json()}
        return figures


def _majority_credit(answers: Sequence[Hashable], correct: Floats) -> float:
    votes = Counter(answer for answer in answers if answer is not None)
    highest_count = max(votes.values(), default=0)
    # Equal answers are equally right, so only the first copy of each is looked up.
    winner_indices = [answers.index(answer) for answer, count in votes.items() if count == highest_count]
    # A prompt without a readable answer counts as wrong.
    return float(np.mean(correct[winner_indices])) if winner_indices else 0.0
