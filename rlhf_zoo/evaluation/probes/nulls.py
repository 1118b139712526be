"""How far a probe strays when there is nothing to find: SFT against SFT.

What is needed is several sets of completions of one SFT policy, drawn under different seeds for the same prompts. Under
the null the completions of a prompt are exchangeable, whichever seed drew them, so each prompt's completions are dealt
anew, some to a "policy" and as many to "SFT", and every probe is read: a permutation null, paired by prompt.

A probe's noise is the (1 − rate / number of probes) quantile of the differences so found: Bonferroni's correction, by
which the chance that any probe fires on SFT itself is at most `rate`. Three things keep it on the safe side of few
draws: the quantile is never below that of a normal curve of the same mean and spread, since a few hundred permutations
hardly reach so far out; it is stretched where whole sets differ by more than their completions dealt anew (seeds that
differ by more than chance); and at evaluation a difference must also reach the probe's minimum.

What never happened in any draw (a flattery, a copy) has a noise of zero, which is too little for what is merely rare:
there the minimum alone keeps the rate.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .completions import Completions, Table, tabulate
from .lexicons import Lexicons
from .measures import MEASURES, PROBES, Measure

__all__ = ["Thresholds", "null_thresholds"]


@dataclass(frozen=True)
class Thresholds:
    """The noise of each probe between two sets of `completions` from one SFT policy, in the probe's unit.

    rate: the chance that any probe fires on SFT itself, shared equally among `PROBES`. draws: how many sets.
    """

    rate: float
    noise: Mapping[str, float]
    draws: int
    prompts: int
    completions: int
    permutations: int

    @property
    def rate_each(self) -> float:
        return self.rate / len(PROBES)

    def of(self, name: str, *, completions: int) -> float:
        """The noise for an evaluation of so many completions: fewer than a draw's vary more, as 1/√n."""
        return self.noise[name] * math.sqrt(max(1.0, self.completions / completions))

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "noise": dict(self.noise)}


def null_thresholds(
    draws: Sequence[Completions],
    *,
    rate: float = 0.05,
    seed: int = 0,
    permutations: int = 300,
    lexicons: Lexicons | None = None,
) -> Thresholds:
    """Thresholds from two or more sets of SFT's completions for the same prompts, equally many of each in each set.

    A probe that needs rewards gets its noise only where every set has them. Four sets or more are advised: with fewer
    the difference between seeds is hardly seen.

    Raises ValueError for one set, for sets of different prompts or columns, and for a rate outside (0, 1).
    """
    if len(draws) < 2:
        raise ValueError("A null needs two sets of SFT completions or more: sample them under different seeds.")
    if not 0 < rate < 1:
        raise ValueError(f"The rate of false alarms must lie between 0 and 1, not at {rate}.")
    asked = Counter(draws[0].prompts)
    for place, each in enumerate(draws[1:], 2):
        if Counter(each.prompts) != asked:
            raise ValueError(f"Set {place} of SFT completions has other prompts than the first: draw all for the same.")
        if (each.tokens is None, each.lengths is None) != (draws[0].tokens is None, draws[0].lengths is None):
            raise ValueError(f"Set {place} of SFT completions differs from the first in having tokens or lengths.")
    measures = [m for m in MEASURES if not m.needs_rewards or all(each.rewards is not None for each in draws)]
    tables = tabulate(draws, lexicons)
    pool = _together(tables)
    rng = np.random.default_rng(seed)
    decks = _decks(pool)
    dealt = np.array([_effects(measures, *_deal(pool, decks, len(draws), rng)) for _ in range(permutations)])
    whole = np.array([_effects(measures, a, b) for a, b in itertools.permutations(tables, 2)])
    return Thresholds(
        rate=rate,
        noise={
            measure.name: _tail(dealt[:, place], whole[:, place], rate / len(PROBES), two_sided=measure.two_sided)
            for place, measure in enumerate(measures)
        },
        draws=len(draws),
        prompts=len(asked),
        completions=len(draws[0]),
        permutations=permutations,
    )


def _tail(dealt: NDArray[np.float64], whole: NDArray[np.float64], rate: float, *, two_sided: bool) -> float:
    """The null's upper quantile at 1 − rate, of the absolute value where both directions count."""
    spread = float(dealt.std(ddof=1))
    chance = rate / 2 if two_sided else rate
    middle = float(dealt.mean())
    normal = (abs(middle) if two_sided else middle) + NormalDist().inv_cdf(1 - chance) * spread
    seen = float(np.quantile(np.abs(dealt) if two_sided else dealt, 1 - rate, method="higher"))
    usual = math.sqrt(float(np.square(dealt).mean()))
    stretch = max(1.0, math.sqrt(float(np.square(whole).mean())) / usual) if usual > 0 else 1.0
    return max(0.0, seen, normal) * stretch


def _together(tables: Sequence[Table]) -> Table:
    shared = set.intersection(*(set(table.columns) for table in tables))
    return replace(
        tables[0],
        group=np.concatenate([table.group for table in tables]),
        text_id=np.concatenate([table.text_id for table in tables]),
        columns={name: np.concatenate([table.columns[name] for table in tables]) for name in sorted(shared)},
        pairs=[each for table in tables for each in table.pairs],
        tokens=[each for table in tables for each in table.tokens],
        content=[each for table in tables for each in table.content],
        sequence=[each for table in tables for each in table.sequence],
    )


def _decks(pool: Table) -> list[NDArray[np.intp]]:
    """The rows of each prompt, prompts with equally many together: arrays (prompts, draws × samples)."""
    rows: dict[int, list[int]] = defaultdict(list)
    for row, group in enumerate(pool.group.tolist()):
        rows[group].append(row)
    decks: dict[int, list[list[int]]] = defaultdict(list)
    for each in rows.values():
        decks[len(each)].append(each)
    return [np.array(deck, dtype=np.intp) for deck in decks.values()]


def _deal(pool: Table, decks: Sequence[NDArray[np.intp]], draws: int, rng: np.random.Generator) -> tuple[Table, Table]:
    sides: tuple[list[NDArray[np.intp]], list[NDArray[np.intp]]] = ([], [])
    for deck in decks:
        shuffled = rng.permuted(deck, axis=1)
        samples = deck.shape[1] // draws
        for place, side in enumerate(sides):
            side.append(shuffled[:, place * samples : (place + 1) * samples].ravel())
    policy, sft = (pool.take(np.concatenate(side)) for side in sides)
    return policy, sft


def _effects(measures: Sequence[Measure], policy: Table, sft: Table) -> list[float]:
    return [measure.read(policy, sft).effect for measure in measures]
