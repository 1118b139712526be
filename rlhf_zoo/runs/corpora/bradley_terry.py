"""A simulated buyer with a known utility."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class BradleyTerry:
    """Chooses between two texts with P(a) = 1 / (1 + exp((u(b) − u(a)) / temperature)), Bradley & Terry 1952.

    A reward model that is trained on these choices can also be compared with the utility.

    Attributes:
        utility: The function u of a text, which is prompt and completion together.
        temperature: Noise of the choices, in units of utility; 0.1 chooses more consistently than 1.
    """

    utility: Callable[[str], float]
    temperature: float

    def probability(self, text_a: str, text_b: str) -> float:
        """Returns the probability that a text is preferred to another.

        Args:
            text_a: The text that may be preferred.
            text_b: The other text.

        Returns:
            P(a), 0 to 1.
        """
        scaled_gap = (self.utility(text_b) - self.utility(text_a)) / self.temperature
        return 1.0 / (1.0 + math.exp(scaled_gap)) if scaled_gap < 700 else 0.0

    def __call__(self, text_a: str, text_b: str, rng: random.Random) -> int:
        """Chooses a text.

        Args:
            text_a: A text, prompt and completion together.
            text_b: Another text.
            rng: The source of randomness.

        Returns:
            0 if ``text_a`` is preferred, 1 if ``text_b``.
        """
        return 0 if rng.random() < self.probability(text_a, text_b) else 1
