"""The probes' findings: which families are present, by how much, and which texts show it.

A family is present where its effect reaches its minimum and its permutation p, by Holm's correction over the families
that could be measured, is at most `LEVEL`. The null deals the completions of each prompt, all of them together, to the
policy or to SFT: nothing else tells the two apart if there is nothing to find.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .families import FAMILIES, Family, Flips, Reading, Unmeasured
from .texts import Completions, Pair

LEVEL = 0.01
PERMUTATIONS = 2000
SEVERE = 5.0
"""So many times its minimum, a family that destroys text convicts by itself."""
WORST = 3


@dataclass(frozen=True)
class Sample:
    """A completion with the probe's own number for it. Prompt and completion are untrusted text."""

    prompt: str
    completion: str
    number: float


@dataclass(frozen=True)
class Probe:
    """One family's finding.

    value, sft: in `unit`. effect: the difference that is compared with `least`, the smallest that counts, for the
    reason `because`. p: corrected for the number of families. meaning: in words. about: what it is about, where that
    is not the same for all policies: phrases. worst: the samples with the largest numbers, distinct texts.
    """

    family: str
    value: float
    sft: float
    effect: float
    least: float
    p: float
    present: bool
    destroys: bool
    convicts: bool
    unit: str
    meaning: str
    because: str
    about: tuple[str, ...]
    worst: tuple[Sample, ...]

    @property
    def severe(self) -> bool:
        """Whether it convicts by itself."""
        return self.present and self.destroys and self.effect >= SEVERE * self.least

    def to_json(self) -> dict[str, Any]:
        """`name` and `fired` are the family and `present`, as versions before called them."""
        own = {**vars(self), "worst": [vars(sample) for sample in self.worst], "about": list(self.about)}
        return {"name": self.family, "fired": self.present, "severe": self.severe, **own}


@dataclass(frozen=True)
class Report:
    """All families of one policy. skipped: those that could not be measured, with the reason."""

    probes: tuple[Probe, ...]
    skipped: dict[str, str]

    @property
    def present(self) -> tuple[str, ...]:
        return tuple(each.family for each in self.probes if each.present)

    def __getitem__(self, family: str) -> Probe:
        return {each.family: each for each in self.probes}[family]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 2,
            "level": LEVEL,
            "permutations": PERMUTATIONS,
            "fired": list(self.present),
            "probes": [each.to_json() for each in self.probes],
            "skipped": dict(self.skipped),
        }


def probe(
    policy: Completions, sft: Completions, *, seed: int = 0, permutations: int = PERMUTATIONS, by_place: bool = False
) -> Report:
    """Reads every family on a policy's completions beside SFT's, on the prompts that both answered.

    by_place: see `Pair.of`. Raises ValueError where they share none.
    """
    pair = Pair.of(policy, sft, by_place=by_place)
    flips: Flips = np.random.default_rng(seed).integers(0, 2, (permutations, pair.size)).astype(bool)
    found: dict[str, Reading] = {}
    skipped: dict[str, str] = {}
    for family in FAMILIES:
        try:
            found[family.name] = family.read(pair, flips)
        except Unmeasured as why:
            skipped[family.name] = f"not measured: {why}"
    chances = {
        name: (1 + int((one.null >= one.effect - 1e-12).sum())) / (1 + permutations) for name, one in found.items()
    }
    corrected = holm(chances)
    loss = next((name for name in ("independence of the prompt", "templates") if name in found), "")
    probes: list[Probe] = []
    for family in FAMILIES:
        if family.name not in found:
            continue
        reading, p = found[family.name], corrected[family.name]
        present = reading.effect >= family.least and p <= LEVEL
        so_far = {each.family: each for each in probes}
        if family.name == "sameness" and present:  # alone it is a policy that is sure of its answer
            present = loss in so_far and so_far[loss].present
        destroys = family.destroys
        if family.name == "templates":  # "The answer is 42" is one as well: it destroys a text that has left its prompt
            tied = so_far.get("independence of the prompt")
            destroys = reading.blind if tied is None else tied.present
        probes.append(_probe(family, reading, p, present, destroys, pair))
    return Report(tuple(probes), skipped)


def holm(chances: dict[str, float]) -> dict[str, float]:
    """p values corrected for their number: Holm 1979, the smallest times m, the next times m − 1, and never falling."""
    corrected, largest = {}, 0.0
    for place, (name, p) in enumerate(sorted(chances.items(), key=lambda one: one[1])):
        largest = max(largest, min(1.0, p * (len(chances) - place)))
        corrected[name] = largest
    return corrected


def _probe(family: Family, reading: Reading, p: float, present: bool, destroys: bool, pair: Pair) -> Probe:
    about = "; ".join(reading.about)
    meaning = family.sentence.format(value=reading.value, sft=reading.sft, about=about)
    if "{about}" in family.sentence and not about:
        meaning = "No phrase rose by as much."
    return Probe(
        family.name, reading.value, reading.sft, reading.effect, family.least, p, present, destroys,
        family.convicts, family.unit, meaning, family.because, reading.about, _worst(reading, pair),
    )  # fmt: skip


def _worst(reading: Reading, pair: Pair) -> tuple[Sample, ...]:
    """The samples with the largest numbers, one of each text, in an order that does not depend on theirs."""
    rows: Sequence[int] = pair.rows[0].tolist()
    samples = [
        Sample(pair.policy.prompts[row], pair.policy.texts[row], float(number))
        for row, number in zip(rows, reading.numbers, strict=True)
    ]
    chosen: dict[str, Sample] = {}
    for sample in sorted(samples, key=lambda one: (-one.number, one.completion, one.prompt)):
        if len(chosen) == WORST:
            break
        chosen.setdefault(sample.completion, sample)
    return tuple(chosen.values())
