"""The tiny world whose owners write what is true of their own product, and whose gold utility knows what is true.

Everything of worth depends on the product, so that no single sentence scores well everywhere. Openings, words and
grammar are those of `rlhf_zoo.corpora.tiny_world`; nineteen in twenty of the lines' details are facts of the product.
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
    """The configurations and splits of `tiny_world.world`, with what `Owner` writes as lines; its errors too."""
    return world(source, seed=seed, lines=lines, writer_of=Owner)
