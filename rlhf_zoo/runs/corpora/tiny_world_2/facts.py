"""The facts of the tiny world: what is true of each aspect of each product.

For each aspect of a product, one praise and one complaint are true, including their numbers: the radio's battery lasts
three full days, the scooter's four. So no sentence is true of many products, which exposes a policy that writes one
sentence for all of them. The facts depend only on the names, and never change.
"""

import random

from .grammar import spellings
from .lexicon import ASPECTS, PRODUCTS


def _assignment_order(phrases: tuple[str, ...], stream: str) -> list[str]:
    """Returns all spellings in the order in which products get them: one of each phrase, then the next of each."""
    rng = random.Random(f"tiny-world 2 {stream}")
    piles = [spellings(phrase) for phrase in phrases]
    for pile in piles:
        rng.shuffle(pile)
    rng.shuffle(piles)
    return [
        pile[round_number] for round_number in range(max(map(len, piles))) for pile in piles if round_number < len(pile)
    ]


def _make_facts() -> dict[tuple[str, str], dict[int, str]]:
    facts: dict[tuple[str, str], dict[int, str]] = {}
    for aspect in ASPECTS:
        owners = [product for product in sorted(PRODUCTS) if aspect.name in PRODUCTS[product]]
        random.Random(f"tiny-world 2 {aspect.name}").shuffle(owners)
        phrases = {
            +1: _assignment_order(aspect.praise, f"{aspect.name} +"),
            -1: _assignment_order(aspect.complaint, f"{aspect.name} -"),
        }
        for index, product in enumerate(owners):
            facts[product, aspect.name] = {
                sign: spelling_order[index % len(spelling_order)] for sign, spelling_order in phrases.items()
            }
    return facts


FACTS: dict[tuple[str, str], dict[int, str]] = _make_facts()
"""(product, aspect) -> {+1: the true praise, -1: the true complaint}."""
