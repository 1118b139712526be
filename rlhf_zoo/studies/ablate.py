"""The runs of an ablation: one recipe, one SFT and reward model, and a PPO run for each value of one key.

runs/RECIPE/ablation/NAME/ holds the stages ppo and eval of a run, and ablation.json, which says what it belongs to;
what comes before PPO lies in runs/RECIPE, as for the recipe's own run.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from ..errors import ZooError
from ..record import StageRecord, read_json, write_json
from ..release.plots import plot_ablation
from ..runs.listed import listed_numbers

#: In a run's directory: the variant it is, and where the stages before it lie.
ABLATION = "ablation.json"
FOLDER = "ablation"
SAMPLES = 4
_FIGURES = ("reward", "judge", "kl", "length", "eos_rate", "distinct_2", "repetition")


@dataclass(frozen=True)
class Variant:
    """One value of the key that is ablated. key: of the PPO stage. seed: of PPO, None for the recipe's own."""

    key: str
    value: float
    seed: int | None = None

    @property
    def name(self) -> str:
        """Of its directory, and in its repository's name."""
        return f"{self.key.replace('_', '-')}-{self.value:g}" + (f"-seed-{self.seed}" if self.seed is not None else "")

    @property
    def setting(self) -> str:
        """The value, as it reads."""
        return f"β = {self.value:g}" if self.key == "kl_coef" else f"{self.key} = {self.value:g}"

    @property
    def label(self) -> str:
        return self.setting + (f", seed {self.seed}" if self.seed is not None else "")

    def directory(self, run: Path) -> Path:
        return run / FOLDER / self.name

    def flags(self, given: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """The flags of its run."""
        flags = {stage: dict(keys) for stage, keys in given.items()}
        flags.setdefault("ppo", {})[self.key] = self.value
        if self.key == "kl_coef" and self.value == 0:  # what β buys is compared by KL
            flags["ppo"].setdefault("reference", True)
        if self.seed is not None:
            flags["ppo"]["seed"] = self.seed
        return flags

    def note(self, run: Path) -> None:
        """Writes what the directory of its run belongs to."""
        folder = self.directory(run)
        write_json(folder / ABLATION, {"schema": 1, "variant": self.name, "base": "../.."})


def variants(key: str, listed: str, *, given: Mapping[str, Any], seeds: int = 1, first: int = 1) -> list[Variant]:
    """The variants of "0,0.02,0.1", each once, in that order. given: the other flags of PPO.

    seeds: how many runs of each value, the first with the seed that it has anyway, which is `first`. Raises ZooError
    for what is no list of numbers that are not negative, and where `given` has the key too.
    """
    if key in given:
        raise ZooError(f"--ppo.{key} is given and --{key} lists values: leave --ppo.{key} out.")
    values = listed_numbers(f"--{key}", listed, example="0,0.02,0.1")
    made = [Variant(key, value, first + more if more else None) for value in values for more in range(seeds)]
    return list({variant.name: variant for variant in made}.values())


def ablation_of(directory: Path) -> dict[str, Any]:
    """{base, variant} of `RunContext` for the directory of a run; {} where it is no run of an ablation."""
    path = directory / ABLATION
    if not path.is_file():
        return {}
    document = read_json(path)
    return {"base": directory / document["base"], "variant": document["variant"]}


@dataclass(frozen=True)
class Outcome:
    """What came of a run. figures: of PPO on held-out prompts, {value, ci95, n}; rows: of its training.

    samples: (prompt, completion, reward, judge) of the first held-out prompts. verdict: over its checkpoints, None
    where there is none; fired: the families of the probes that fire at its end.
    """

    variant: Variant
    repo: str | None
    figures: Mapping[str, Mapping[str, Any]]
    win_rate: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    samples: Sequence[tuple[str, str, float, float]]
    verdict: str | None = None
    fired: Sequence[str] = ()


def outcome(variant: Variant, run: Path) -> Outcome:
    """Reads the directory of a finished run."""
    folder = variant.directory(run)
    record = StageRecord(folder / "ppo")
    evaluation = read_json(folder / "eval" / "evaluation.json")
    probes = ((evaluation.get("over_training") or {}).get("probes") or {}).get("probes", [])
    return Outcome(
        variant,
        (record.read().get("repo") or {}).get("id"),
        {name: evaluation["ppo"][name] for name in _FIGURES},
        evaluation["win_rate"],
        record.metrics(),
        list(_samples(folder / "eval" / "samples.jsonl")),
        evaluation.get("verdict"),
        list(dict.fromkeys(probe["family"] for probe in probes if probe["fired"])),
    )


def spread(outcomes: Sequence[Outcome]) -> list[tuple[str, dict[str, tuple[float, float, float]], list[Outcome]]]:
    """(setting, {figure: (mean, lowest, highest)}, its runs) of each value, over its seeds, in their order."""
    groups: dict[str, list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault(one.variant.setting, []).append(one)
    found = []
    for setting, runs in groups.items():
        values = {name: [run.figures[name]["value"] for run in runs] for name in _FIGURES}
        values["win_rate"] = [run.win_rate["value"] for run in runs]
        found.append((setting, {name: (fmean(each), min(each), max(each)) for name, each in values.items()}, runs))
    return found


def _samples(path: Path) -> Iterator[tuple[str, str, float, float]]:
    """The first sample of the first prompts; equal prompts and random numbers in every run."""
    with path.open(encoding="utf-8") as lines:
        first = (row for row in map(json.loads, lines) if row["sample"] == 0)
        for row in islice(first, SAMPLES):
            one = row["ppo"]
            yield row["prompt"], one["completion"], one["reward"], one["judge"]


def write_overview(run: Path, recipe: str, outcomes: Sequence[Outcome]) -> tuple[Path, Path]:
    """Writes overview.json and overview.png beside the runs; returns both paths."""
    folder = run / FOLDER
    document = {
        "schema": 1,
        "recipe": recipe,
        "key": outcomes[0].variant.key,
        "runs": [
            {
                "value": one.variant.value,
                "seed": one.variant.seed,
                "directory": one.variant.name,
                "repo": one.repo,
                "figures": dict(one.figures),
                "win_rate": dict(one.win_rate),
                "verdict": one.verdict,
                "fired": list(one.fired),
            }
            for one in outcomes
        ],
        "over_seeds": [
            {
                "value": runs[0].variant.value,
                "seeds": len(runs),
                "figures": {name: {"mean": mean, "range": [low, high]} for name, (mean, low, high) in figures.items()},
                "verdicts": [run.verdict for run in runs],
            }
            for _, figures, runs in spread(outcomes)
        ],
    }
    write_json(folder / "overview.json", document)
    plot_ablation({one.variant.label: one.rows for one in outcomes}, folder / "overview.png")
    return folder / "overview.json", folder / "overview.png"
