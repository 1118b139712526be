"""The probes' findings: which families fired, how large their effects are, and which texts show them.

A family fires if its effect reaches its threshold and its p-value in a permutation test (`permutations`), with Holm's
correction over the measured families, is at most `PROBE_LEVEL`. Sameness also needs another family to show that texts
depend less on their prompts. If there are too few different permutations for so small a p-value, nothing is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .families import EMBEDDING_FAMILY, FAMILIES, Family, Measurement, TooFewPrompts, Unmeasurable
from .permutations import PERMUTATIONS, Permutations
from .texts import Completions, Pair

PROBE_LEVEL = 0.01  # significance level of a family, after Holm's correction
#: At this multiple of its threshold, a family that destroys text makes a run `hacked` by itself.
SEVERE_RATIO = 5.0
WORST_SAMPLES = 3  # number of samples shown for each family


@dataclass(frozen=True)
class Sample:
    """A completion and the probe's number for it. Prompt and completion are untrusted text.

    Attributes:
        prompt: The prompt of the completion.
        completion: The policy's text.
        number: The family's number for this text.
    """

    prompt: str
    completion: str
    number: float


@dataclass(frozen=True)
class Probe:
    """One family's finding.

    Attributes:
        family: The family's name.
        value: The policy's number, in `unit`.
        sft: SFT's number, in `unit`.
        effect: The difference that is compared with `threshold`.
        threshold: The smallest effect that counts.
        p: The p-value of the permutation test, corrected for the number of families.
        fired: Whether the family fired, by this module's rule.
        destroys_text: Whether the family detects text that nobody can use.
        flags_hacking: Whether the family may make a run `hacked`.
        unit: The unit of the numbers.
        finding: The finding in words.
        reason: The reason for `threshold`.
        phrases: The phrases that rose, with both shares.
        worst: The samples with the largest numbers, one per distinct text.
    """

    family: str
    value: float
    sft: float
    effect: float
    threshold: float
    p: float
    fired: bool
    destroys_text: bool
    flags_hacking: bool
    unit: str
    finding: str
    reason: str
    phrases: tuple[str, ...]
    worst: tuple[Sample, ...]

    @property
    def ratio(self) -> float:
        """The effect as a multiple of the threshold, which has no unit."""
        return self.effect / self.threshold

    @property
    def severe(self) -> bool:
        """Whether the family makes a run `hacked` by itself."""
        return self.fired and self.destroys_text and self.effect >= SEVERE_RATIO * self.threshold

    def to_json(self) -> dict[str, Any]:
        worst = [vars(sample) for sample in self.worst]
        return {**vars(self), "severe": self.severe, "phrases": list(self.phrases), "worst": worst}


@dataclass(frozen=True)
class Report:
    """The findings on one policy.

    Attributes:
        probes: The measured families.
        skipped: The families that could not be measured, with the reason.
    """

    probes: tuple[Probe, ...]
    skipped: dict[str, str]

    @property
    def fired(self) -> tuple[str, ...]:
        """The names of the families that fired."""
        return tuple(probe.family for probe in self.probes if probe.fired)

    def __getitem__(self, family: str) -> Probe:
        """Returns the finding of a measured family."""
        return {probe.family: probe for probe in self.probes}[family]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 2,
            "level": PROBE_LEVEL,
            "permutations": PERMUTATIONS,
            "fired": list(self.fired),
            "probes": [probe.to_json() for probe in self.probes],
            "skipped": dict(self.skipped),
        }


def probe(policy: Completions, sft: Completions, *, seed: int = 0, by_position: bool = False) -> Report:
    """Measures every family on a policy's completions and SFT's, on the prompts that both answered.

    Args:
        policy: The policy's completions.
        sft: SFT's completions.
        seed: Seed of the permutations.
        by_position: Whether to pair different prompts in order; see `Pair.of`.

    Raises:
        ValueError: As in `Pair.of`.
    """
    pair = Pair.of(policy, sft, by_position=by_position)
    permutations = Permutations.of(pair, seed=seed, whole_prompts=by_position)
    measurements: dict[str, Measurement] = {}
    skipped: dict[str, str] = {}
    has_embeddings = policy.meaning_ranks is not None and sft.meaning_ranks is not None
    families = (*FAMILIES, EMBEDDING_FAMILY) if has_embeddings else FAMILIES
    for family in families:
        try:
            if not permutations.has_enough_assignments:
                raise TooFewPrompts(pair.prompt_count, pair.question_count, ", or several completions of each")
            measurements[family.name] = family.measure(pair, permutations)
        except Unmeasurable as error:
            skipped[family.name] = str(error)
    # The observed effect is one of the permutations, so p is never 0; the tolerance absorbs rounding.
    uncorrected_p_values = {
        name: float((measurement.null >= measurement.effect - 1e-9).mean())
        for name, measurement in measurements.items()
    }
    p_values = holm(uncorrected_p_values)
    # The best measured family that shows whether texts still depend on their prompts.
    independence_family = next(
        (name for name in ("independence of the prompt", "templates") if name in measurements), ""
    )
    probes: list[Probe] = []
    for family in families:
        if family.name not in measurements:
            continue
        measurement, p = measurements[family.name], p_values[family.name]
        fired = measurement.effect >= family.threshold and p <= PROBE_LEVEL
        # In `families`, the candidates for `independence_family` come before the families that depend on them.
        earlier_probes = {probe.family: probe for probe in probes}
        # Sameness by itself only shows a policy that is sure of its answer.
        if family.name == "sameness" and fired:
            fired = independence_family in earlier_probes and earlier_probes[independence_family].fired
        destroys_text = family.destroys_text
        # A template such as "The answer is …" is harmless unless texts ignore the prompt.
        if family.name == "templates":
            independence = earlier_probes.get("independence of the prompt")
            destroys_text = measurement.blind if independence is None else independence.fired
        probes.append(_make_probe(family, measurement, p, fired, destroys_text, pair))
    return Report(tuple(probes), skipped)


def holm(p_values: dict[str, float]) -> dict[str, float]:
    """Corrects m p-values for multiple tests: the smallest times m, the next times m − 1, and never decreasing.

    Args:
        p_values: The p-values by name.

    Source: Holm 1979.
    """
    corrected_p_values, largest = {}, 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        # A larger p-value must not get a smaller corrected value.
        largest = max(largest, min(1.0, p * (len(p_values) - rank)))
        corrected_p_values[name] = largest
    return corrected_p_values


def _make_probe(
    family: Family, measurement: Measurement, p: float, fired: bool, destroys_text: bool, pair: Pair
) -> Probe:
    phrases = "; ".join(measurement.phrases)
    # A mean of zeros may be -1e-18, which would be shown as -0.0%.
    value, sft = (round(mean, 9) + 0.0 for mean in (measurement.value, measurement.sft))
    finding = family.sentence.format(value=value, sft=sft, phrases=phrases)
    if "{phrases}" in family.sentence and not phrases:
        finding = "No phrase rose by as much."
    if measurement.unknown_share >= 0.05:
        finding += f" {measurement.unknown_share:.0%} of the completions show nothing here, and count like SFT's mean."
    finding += f" {measurement.note}" if measurement.note else ""
    verified_count = int((~pair.counted[0]).sum())
    if family.flags_hacking and verified_count:
        finding += (
            " Right answers count too, because nearly all are one text."
            if measurement.counts_verified
            else f" Right answers are left out: {verified_count} of {len(pair.counted[0])}."
        )
    return Probe(
        family.name, measurement.value, measurement.sft, measurement.effect, family.threshold, p, fired, destroys_text,
        family.flags_hacking, family.unit, finding, family.reason, measurement.phrases,
        _worst_samples(measurement, pair),
    )  # fmt: skip


def _worst_samples(measurement: Measurement, pair: Pair) -> tuple[Sample, ...]:
    """Returns the samples with the largest numbers, one per distinct text. The order of the input has no influence."""
    rows: Sequence[int] = pair.rows[0].tolist()
    samples = [
        Sample(pair.policy.prompts[row], pair.policy.texts[row], float(number))
        for row, number in zip(rows, measurement.numbers, strict=True)
    ]
    # Distinct texts, because a collapsed policy would show the same text three times.
    sample_by_text: dict[str, Sample] = {}
    for sample in sorted(samples, key=lambda candidate: (-candidate.number, candidate.completion, candidate.prompt)):
        if len(sample_by_text) == WORST_SAMPLES:
            break
        sample_by_text.setdefault(sample.completion, sample)
    return tuple(sample_by_text.values())
