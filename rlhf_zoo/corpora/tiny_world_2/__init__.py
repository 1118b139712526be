"""The second version of the tiny world: its owners write what is true of their own product, and the gold utility knows.

In the first version one sentence for every prompt, or one for each aspect, scores as well as a policy that PPO trained:
nothing in it depends on the product. Here everything of worth does. Openings, words and grammar are the first's
(`rlhf_zoo.corpora.tiny_world`); the lines are others, as nineteen in twenty of their details are facts of the product.
"""

from typing import Any

from ..tiny_world import Writer, world
from ..tiny_world.grammar import spellings
from .facts import FACTS
from .utility import PARTS, TEMPERATURE, explain, gold, judge, preference, utility

__all__ = [
    "FACTS",
    "PARTS",
    "TEMPERATURE",
    "Owner",
    "explain",
    "gold",
    "judge",
    "preference",
    "prepare",
    "utility",
]

MISTAKEN = 0.05


class Owner(Writer):
    """Writes facts of the product, but for a mistake now and then."""

    def detail(self, polarity: int) -> None:
        if self.rng.random() < MISTAKEN:
            phrases = self.aspect.praise if polarity > 0 else self.aspect.complaint
            self.add(self.rng.choice(spellings(self.rng.choice(phrases))))
        else:
            self.add(FACTS[self.product, self.aspect.name][polarity])


def prepare(source: str | None = None, *, seed: int, lines: int = 12_000) -> dict[str, dict[str, Any]]:
    """The first version's configurations, splits and openings, and what `Owner` writes as lines; its errors too."""
    return world(source, seed=seed, lines=lines, writer_of=Owner)
