"""Several answers to each prompt: how many are right, whether one of k is, and whether the majority's is."""

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

    Attributes:
        right: (P, S), 1 or 0.
        readings: (P, S), the parsed answer in each text: equal for equal answers, None if nothing could be parsed.
            Without it there is no majority vote.
        prompts: (P,) keys that tell prompts apart, where some may be equal; intervals resample equal ones together.
    """

    right: Floats
    readings: Sequence[Sequence[Hashable]] | None = None
    prompts: Sequence[Hashable] | None = None

    @property
    def samples(self) -> int:
        """The number of answers per prompt, S."""
        return int(self.right.shape[1])

    def passed(self, k: int) -> Floats:
        """Estimates pass@k, the chance that one of k answers is right, without bias.

        Args:
            k: Answers drawn without replacement.

        Returns:
            (P,) 1 − C(S − c, k)/C(S, k), where c of the S answers are right.

        Raises:
            ValueError: There are fewer than k answers.

        Source: Chen et al. 2021, arXiv:2107.03374, equation 1.
        """
        size = self.samples
        if size < k:
            raise ValueError(f"pass@{k} needs {k} answers per prompt; there are {size}.")
        # math.comb is exact, and 0 where fewer than k answers are wrong.
        return np.array([1 - math.comb(size - int(c), k) / math.comb(size, k) for c in self.right.sum(1)])

    def voted(self) -> Floats:
        """Computes whether the most frequent answer is right (self-consistency). Unreadable answers do not vote.

        Returns:
            (P,) 1 or 0; between equally frequent answers, the share of them that are right.

        Raises:
            ValueError: The readings are missing.

        Source: Wang et al. 2022, arXiv:2203.11171.
        """
        if self.readings is None:
            raise ValueError("A majority vote needs the reading of each answer.")
        return np.array([_voted(answers, right) for answers, right in zip(self.readings, self.right, strict=True)])

    def of_all(self) -> dict[str, Floats]:
        """Returns, by name, the (P,) figures that need all S answers together: the majority vote and pass@S."""
        if self.samples < 2:
            return {}
        votes = {} if self.readings is None else {f"majority of {self.samples}": self.voted()}
        return {**votes, f"pass@{self.samples}": self.passed(self.samples)}

    def to_json(self) -> dict[str, Any]:
        """Returns accuracy, pass_at by k (powers of two, and S), and majority_at S, each {value, ci95, n}."""
        prompts = range(len(self.right)) if self.prompts is None else self.prompts
        most = self.samples
        # Powers of two up to S, and S itself.
        sizes = sorted({most, *(2**power for power in range(most.bit_length()))})
        figures: dict[str, object] = {
            "accuracy": accuracy(self.right.ravel(), [prompt for prompt in prompts for _ in range(most)]).to_json(),
            "pass_at": {str(k): share(self.passed(k), prompts).to_json() for k in sizes},
        }
        if self.readings is not None:
            figures["majority_at"] = {str(most): share(self.voted(), prompts).to_json()}
        return figures


def _voted(readings: Sequence[Hashable], right: Floats) -> float:
    votes = Counter(answer for answer in readings if answer is not None)
    # Unreadable answers do not vote.
    most = max(votes.values(), default=0)
    # Equal readings are equally right, so the first answer of each stands for all.
    first = [readings.index(answer) for answer, count in votes.items() if count == most]
    # No readable answer at all counts as wrong.
    return float(np.mean([right[place] for place in first])) if first else 0.0
