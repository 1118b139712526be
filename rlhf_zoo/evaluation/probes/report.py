"""The probes' findings: each a number with its threshold, three worst samples, and a sentence."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .completions import Completions, tabulate
from .lexicons import Lexicons
from .measures import MEASURES, Measure, Reading
from .nulls import Thresholds

__all__ = ["CAPABILITY", "Likelihoods", "Probe", "Report", "Sample", "capability_loss", "probe"]

CAPABILITY = "capability_loss"
LEAST_LOSS = math.log(2)
"""One bit per token: the policy is as unsure of SFT's data as if every choice had twice as many options."""
WORST = 3


@dataclass(frozen=True)
class Sample:
    """A completion with the probe's own number for it. Prompt and completion are untrusted text."""

    prompt: str
    completion: str
    number: float


@dataclass(frozen=True)
class Probe:
    """One probe's finding. It fires when `value` lies beyond `threshold`: above it, or in size where it is two-sided.

    value, sft, threshold: in `unit`. noise: the part of the threshold that SFT differs from itself by; least: the part
    that a difference must have to matter, for the reason `because`; the larger counts. worst: its samples with the
    largest numbers, distinct texts, fewer than three only where there are fewer.
    """

    name: str
    family: str
    value: float
    sft: float
    threshold: float
    fired: bool
    unit: str
    meaning: str
    because: str
    noise: float
    least: float
    two_sided: bool
    n: int
    worst: tuple[Sample, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"worst": [asdict(sample) for sample in self.worst]}


@dataclass(frozen=True)
class Report:
    """All probes of one policy. skipped: the probes that could not be read, with the reason."""

    probes: tuple[Probe, ...]
    skipped: dict[str, str]
    rate: float

    @property
    def fired(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.probes if each.fired)

    def __getitem__(self, name: str) -> Probe:
        return {each.name: each for each in self.probes}[name]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "rate": self.rate,
            "fired": list(self.fired),
            "probes": [each.to_json() for each in self.probes],
            "skipped": dict(self.skipped),
        }


@dataclass(frozen=True)
class Likelihoods:
    """How a policy and SFT rate the same held-out texts of SFT's data: (M,) sums of −log p in nats, (M,) token counts.

    texts: (M,) those texts, for the samples shown. Raises ValueError where lengths differ, a number is not finite, or
    there is no token.
    """

    policy: ArrayLike
    sft: ArrayLike
    tokens: ArrayLike
    texts: Sequence[str] | None = None

    def __post_init__(self) -> None:
        shape = np.shape(self.policy)
        if len(shape) != 1 or np.shape(self.sft) != shape or np.shape(self.tokens) != shape:
            raise ValueError("Likelihoods need one number per text from the policy, from SFT, and of tokens.")
        if self.texts is not None and len(self.texts) != shape[0]:
            raise ValueError(f"There are {len(self.texts)} texts and {shape[0]} likelihoods.")
        if not all(np.isfinite(np.asarray(side, dtype=float)).all() for side in (self.policy, self.sft, self.tokens)):
            raise ValueError("Not all likelihoods are finite.")
        if np.any(np.asarray(self.tokens) < 0) or not np.any(np.asarray(self.tokens) > 0):
            raise ValueError("Likelihoods need texts with tokens.")


def probe(
    policy: Completions,
    sft: Completions,
    thresholds: Thresholds,
    *,
    likelihoods: Likelihoods | None = None,
    lexicons: Lexicons | None = None,
) -> Report:
    """Reads every probe on a policy's completions beside SFT's, for the same prompts and equally many of each.

    Raises ValueError where the prompts differ.
    """
    if Counter(policy.prompts) != Counter(sft.prompts):
        raise ValueError("Policy and SFT have other prompts, or more completions of one: sample both for the same.")
    if (policy.tokens is None) != (sft.tokens is None) or (policy.lengths is None) != (sft.lengths is None):
        raise ValueError("Give tokens and lengths of both the policy and SFT, or of neither.")
    ours, theirs = tabulate([policy, sft], lexicons)
    probes = []
    skipped = {}
    for measure in MEASURES:
        if measure.needs_rewards and (policy.rewards is None or sft.rewards is None):
            skipped[measure.name] = "No rewards were given."
        elif measure.name not in thresholds.noise:
            skipped[measure.name] = "The SFT completions that the thresholds come from had no rewards."
        else:
            reading = measure.read(ours, theirs)
            noise = thresholds.of(measure.name, completions=len(policy))
            probes.append(_probe(measure, reading, noise, policy))
    if likelihoods is None:
        skipped[CAPABILITY] = "No likelihoods of SFT's data were given."
    else:
        probes.append(capability_loss(likelihoods, rate=thresholds.rate_each))
    return Report(tuple(probes), skipped, thresholds.rate)


def _probe(measure: Measure, reading: Reading, noise: float, policy: Completions) -> Probe:
    least = measure.least(reading.sft)
    margin = max(noise, least)
    effect = abs(reading.effect) if measure.two_sided else reading.effect
    meaning = measure.sentence.format(value=reading.value, sft=reading.sft, about=repr(reading.about))
    if "{about}" in measure.sentence and reading.about is None:
        meaning = "Nothing that it is about was found."
    return Probe(
        name=measure.name,
        family=measure.family,
        value=reading.value,
        sft=reading.sft,
        threshold=reading.sft + margin,
        fired=effect > margin,
        unit=measure.unit,
        meaning=meaning,
        because=measure.because,
        noise=noise,
        least=least,
        two_sided=measure.two_sided,
        n=len(policy),
        worst=_worst(reading.numbers, policy.prompts, policy.texts),
    )


def _worst(numbers: NDArray[np.float64], prompts: Sequence[str], texts: Sequence[str]) -> tuple[Sample, ...]:
    """The samples with the largest numbers, one of each text, in an order that does not depend on theirs."""
    rows = sorted(range(len(texts)), key=lambda row: (-numbers[row], texts[row], prompts[row]))
    chosen: dict[str, Sample] = {}
    for row in rows:
        if len(chosen) == WORST:
            break
        chosen.setdefault(texts[row], Sample(prompts[row], texts[row], float(numbers[row])))
    return tuple(chosen.values())


def capability_loss(likelihoods: Likelihoods, *, rate: float) -> Probe:
    """The policy's perplexity on SFT's data against SFT's own.

    SFT against SFT is exact here, the same weights on the same texts, so the null has no spread but that of the texts:
    noise is the normal (1 − rate) quantile of the ratio's error over texts. What the policy was trained to avoid costs
    perplexity rightly, at the few tokens that decide it; the minimum leaves room for that.
    """
    ours, theirs, tokens = (
        np.asarray(side, dtype=float) for side in (likelihoods.policy, likelihoods.sft, likelihoods.tokens)
    )
    total = tokens.sum()
    gap = ours - theirs
    loss = float(gap.sum() / total)
    residual = gap - loss * tokens
    size = len(tokens)
    error = math.sqrt(size / max(1, size - 1) * float(np.square(residual).sum())) / float(total)
    noise = NormalDist().inv_cdf(1 - rate) * error
    base = float(theirs.sum() / total)
    value, sft, threshold = (_perplexity(at) for at in (base + loss, base, base + max(noise, LEAST_LOSS)))
    texts = likelihoods.texts if likelihoods.texts is not None else [f"text {place}" for place in range(size)]
    return Probe(
        name=CAPABILITY,
        family="capability",
        value=value,
        sft=sft,
        threshold=threshold,
        fired=loss > max(noise, LEAST_LOSS),
        unit="perplexity on SFT's data",
        meaning=f"The policy's perplexity on SFT's data is {value:.2f} (SFT {sft:.2f}).",
        because="Twice the perplexity is one bit lost at every token: as if every choice had twice as many options.",
        noise=sft * math.expm1(min(noise, _LARGEST)),
        least=sft,
        two_sided=False,
        n=size,
        worst=_worst(gap / np.maximum(tokens, 1.0), [""] * size, texts),
    )


_LARGEST = 300.0


def _perplexity(nats: float) -> float:
    return math.exp(min(nats, _LARGEST))  # JSON has no infinity
