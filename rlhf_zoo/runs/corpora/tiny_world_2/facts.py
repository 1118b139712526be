"""The facts of the tiny world: what is true of each aspect of each product.

For each aspect of a product, one praise and one complaint are true, including their numbers: the radio's battery lasts
three full days, the scooter's four. No sentence is true of many products, so a policy that writes one sentence for all
products scores badly. The facts depend only on the names of products and aspects, and never change.
"""

import random

from .grammar import spellings
from .lexicon import ASPECTS, PRODUCTS


def _assignment_order(phrases: tuple[str, ...], stream: str) -> list[str]:
    """Returns all spellings in the order of assignment to products: one of each phrase, then a second, and so on."""
    rng = random.Random(f"tiny-world 2 {stream}")
    shuffled_spellings = [spellings(phrase) for phrase in phrases]
    for phrase_spellings in shuffled_spellings:
        rng.shuffle(phrase_spellings)
    rng.shuffle(shuffled_spellings)
    return [
        phrase_spellings[round_number]
        for round_number in range(max(map(len, shuffled_spellings)))
        for phrase_spellings in shuffled_spellings
        if round_number < len(phrase_spellings)
    ]


def _make_facts() -> dict[tuple[str, str], dict[int, str]]:
    facts: dict[tuple[str, str], dict[int, str]] = {}
    for aspect in ASPECTS:
        products = [product for product in sorted(PRODUCTS) if aspect.name in PRODUCTS[product]]
        random.Random(f"tiny-world 2 {aspect.name}").shuffle(products)
        spelling_orders = {
            +1: _assignment_order(aspect.praise, f"{aspect.name} +"),
            -1: _assignment_order(aspect.complaint, f"{aspect.name} -"),
        }
        for index, product in enumerate(products):
            facts[product, aspect.name] = {
                sign: spelling_order[index % len(spelling_order)] for sign, spelling_order in spelling_orders.items()
            }
    return facts


FACTS: dict[tuple[str, str], dict[int, str]] = _make_facts()
"""(product, aspect) -> {+1: the true praise, -1: the true complaint}."""
