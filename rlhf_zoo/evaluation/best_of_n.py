"""How often a reward model puts the right completion first among several, on pairs of one's own.

RewardBench 2 asks this of one chosen and three rejected completions of a prompt, which a coin answers in a quarter of
the cases and pairs in half (Malik et al. 2025, arXiv:2506.01937). A pair has one rejected completion, so the others are
rejected completions of the same prompt in other held-out pairs, and where there are too few, of the most similar other
prompts, read behind this one. That the chosen one beats its own rejected one is labeled; that it beats the others too
is taken for granted.
"""

import random
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..modeling.words import words
from .stats import share
from .text import plain

CANDIDATES = 4
#: Choices that are made, and other prompts that are looked through for similar ones, at most.
MOST, LOOKED_AT = 500, 1000


@dataclass(frozen=True)
class Choice:
    """The chosen completion of a pair among wrong ones: the rejected completions of the pairs `wrong`, its own first.

    borrowed: how many of these, the last ones, were written for another prompt.
    """

    pair: int
    wrong: tuple[int, ...]
    borrowed: int


def choices(
    prompts: Sequence[str],
    chosen: Sequence[str],
    rejected: Sequence[str],
    *,
    seed: int,
    candidates: int = CANDIDATES,
    without: Collection[int] = (),
) -> list[Choice]:
    """A choice among `candidates` for each of N pairs, or for MOST of them by chance; [] where too few texts differ.

    Beside the pair's own, no wrong candidate is a text that was chosen for this prompt, or of another prompt one that
    was chosen anywhere, nor is one there twice, up to case and spaces. without: pairs that are ties, of which nothing
    is right.
    """
    rng = random.Random(seed)
    right, wrong = [plain(text) for text in chosen], [plain(text) for text in rejected]
    liked: dict[str, set[str]] = defaultdict(set)
    of_prompt: dict[str, list[int]] = defaultdict(list)
    for pair, prompt in enumerate(prompts):
        liked[prompt].add(right[pair])
        if pair not in without:
            of_prompt[prompt].append(pair)
    usable = [pair for pairs in of_prompt.values() for pair in pairs if wrong[pair] != right[pair]]
    asked = sorted(usable if len(usable) <= MOST else rng.sample(usable, MOST))
    every = list(of_prompt)
    others = every if len(every) <= LOOKED_AT else rng.sample(every, LOOKED_AT)
    anywhere = set(right)
    known = {prompt: set(words(prompt)) for prompt in {*others, *(prompts[pair] for pair in asked)}}
    found = []
    for pair in asked:
        taken, seen = [pair], {wrong[pair], *liked[prompts[pair]]}

        def take(places: Sequence[int], taken: list[int] = taken, seen: set[str] = seen) -> None:
            for place in rng.sample(places, len(places)):
                if len(taken) < candidates - 1 and wrong[place] not in seen:
                    taken.append(place)
                    seen.add(wrong[place])

        take(of_prompt[prompts[pair]])
        own = len(taken)
        if own < candidates - 1:
            seen |= anywhere
            here = known[prompts[pair]]
            order = {prompt: (-_alike(here, known[prompt]), rng.random()) for prompt in others}
            for prompt in sorted(order, key=order.__getitem__):
                if prompt != prompts[pair]:
                    take(of_prompt[prompt])
                if len(taken) == candidates - 1:
                    break
        if len(taken) == candidates - 1:
            found.append(Choice(pair, tuple(taken), len(taken) - own))
    return found


def _alike(a: set[str], b: set[str]) -> float:
    """The share of their words that both have."""
    return len(a & b) / max(len(a | b), 1)


def credits_of(scores: ArrayLike) -> NDArray[np.float64]:
    """(C,) 1 where the first of n scores, (C, n), is the highest, 1/k where it is one of k highest, else 0."""
    table = np.asarray(scores, dtype=float)
    highest = table == table.max(axis=1, keepdims=True)
    return highest[:, 0] / highest.sum(axis=1)


def best_of_n(
    made: Sequence[Choice], scores: ArrayLike, prompts: Sequence[str], *, gold: ArrayLike | None = None
) -> dict[str, Any] | None:
    """What a card says of C choices, as JSON; None where there are none.

    scores: (C, n) of each choice, the chosen completion's first; gold: the utility of the same texts, where the labels
    were drawn from one; prompts: of each pair. The interval is by prompts.
    """
    if not made:
        return None
    table = np.asarray(scores, dtype=float)
    groups = [prompts[choice.pair] for choice in made]
    return {
        "candidates": table.shape[1],
        "chance": 1 / table.shape[1],
        **share(credits_of(table), groups).to_json(),
        "borrowed": sum(choice.borrowed for choice in made) / (len(made) * (table.shape[1] - 1)),
        "gold": None if gold is None else share(credits_of(gold), groups).to_json(),
    }
