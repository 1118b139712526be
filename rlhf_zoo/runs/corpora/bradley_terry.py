"""A simulated buyer whose utility is known."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class BradleyTerry:
    """Chooses between two texts with P(a) = 1 / (1 + exp((u(b) − u(a)) / temperature)), Bradley & Terry 1952.

    utility: u of a whole text, prompt and completion. A reward model of its choices is measured against it, too.
    """

    utility: Callable[[str], float]
    temperature: float

    def probability(self, text_a: str, text_b: str) -> float:
        """P(a is preferred to b)."""
        gap = (self.utility(text_b) - self.utility(text_a)) / self.temperature
        return 1.0 / (1.0 + math.exp(gap)) if gap < 700 else 0.0

    def __call__(self, text_a: str, text_b: str, rng: random.Random) -> int:
        """0 if ``text_a`` is preferred, 1 if ``text_b``."""
        return 0 if rng.random() < self.probability(text_a, text_b) else 1
