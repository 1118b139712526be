"""The runs of an ablation: one recipe, one SFT and reward model, and a PPO run for each value of one key. Those of a
sweep are such runs too, over several keys (`pipeline.experiments.sweep`).

runs/RECIPE/ablation/NAME/ holds the stages ppo and eval of a run, and ablation.json, which says what it belongs to;
what comes before PPO lies in runs/RECIPE, as for the recipe's own run.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ...errors import ZooError
from ...evaluation.stats import Spread, over_seeds
from ...fileio import read_json, write_json
from ...publishing.plots import plot_ablation
from ...runs.recipe import Recipe
from ...runs.record import StageRecord
from ...runs.settings.parse import stage_settings
from ...runs.settings.values import listed_numbers

#: In a run's directory: the variant it is, and where the stages before it lie.
ABLATION = "ablation.json"
FOLDER = "ablation"
SAMPLES = 4
_FIGURES = ("reward", "judge", "kl", "length", "eos_rate", "distinct_2", "repetition")


@dataclass(frozen=True)
class Variant:
    """Keys of the PPO stage with the values that one run has. seed: of PPO, None for the recipe's own. folder: of the
    run's directory that it lies in.
    """

    settings: tuple[tuple[str, Any], ...]
    seed: int | None = None
    folder: str = FOLDER

    @property
    def value(self) -> Any:
        """Of the key that is ablated."""
        return self.settings[0][1]

    @property
    def name(self) -> str:
        """Of its directory, of its tag, and in its repository's name."""
        words = [f"{key.replace('_', '-')}-{_word(shown(value))}" for key, value in self.settings]
        return "-".join([*words, *([] if self.seed is None else [f"seed-{self.seed}"])])

    @property
    def setting(self) -> str:
        """The values, as they read."""
        return ", ".join(f"{'β' if key == 'kl_coef' else key} = {shown(value)}" for key, value in self.settings)

    @property
    def label(self) -> str:
        return self.setting + (f", seed {self.seed}" if self.seed is not None else "")

    def directory(self, run: Path) -> Path:
        return run / self.folder / self.name

    def flags(self, given: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """The flags of its run."""
        flags = {stage: dict(keys) for stage, keys in given.items()}
        flags.setdefault("ppo", {}).update(self.settings)
        if dict(self.settings).get("kl_coef") == 0:  # what β buys is compared by KL
            flags["ppo"].setdefault("reference", True)
        if self.seed is not None:
            flags["ppo"]["seed"] = self.seed
        return flags

    def note(self, run: Path) -> None:
        """Writes what the directory of its run belongs to."""
        folder = self.directory(run)
        write_json(folder / ABLATION, {"schema": 1, "variant": self.name, "base": "../.."})


def shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)


def _word(text: str) -> str:
    """A text as a part of the name of a tag and of a folder."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.") or "empty"


def variants(key: str, listed: str, *, given: Mapping[str, Any], seeds: int = 1, first: int = 1) -> list[Variant]:
    """The variants of "0,0.02,0.1", each once, in that order. given: the other flags of PPO.

    seeds: how many runs of each value, the first with the seed that it has anyway, which is `first`. Raises ZooError
    for what is no list of numbers that are not negative, and where `given` has the key too.
    """
    if key in given:
        raise ZooError(f"--ppo.{key} is given and --{key} lists values: leave --ppo.{key} out.")
    values = listed_numbers(f"--{key}", listed, example="0,0.02,0.1")
    made = [Variant(((key, value),), first + more if more else None) for value in values for more in range(seeds)]
    return list({variant.name: variant for variant in made}.values())


def own_seed(recipe: Recipe, flags: Mapping[str, Mapping[str, Any]], run: Path) -> int:
    """PPO's own seed, of the recipe in the directory `run`."""
    own, shared = flags.get("ppo", {}), flags.get("recipe", {})
    return int(stage_settings(recipe, "ppo", own, shared_flags=shared, output_dir=run / "ppo").trainer.seed)


def ablation_of(directory: Path) -> dict[str, Any]:
    """{base, variant} of `RunContext` for the directory of a run; {} where it is no run of an ablation."""
    path = directory / ABLATION
    if not path.is_file():
        return {}
    # As `round_of`: the run that is ablated lies above.
    return {"base": directory / ".." / "..", "variant": read_json(path)["variant"]}


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


def spread(outcomes: Sequence[Outcome]) -> list[tuple[str, dict[str, Spread], list[Outcome]]]:
    """(setting, {figure: over its seeds}, its runs) of each setting, in their order."""
    groups: dict[str, list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault(one.variant.setting, []).append(one)
    found = []
    for setting, runs in groups.items():
        values = {name: [run.figures[name]["value"] for run in runs] for name in _FIGURES}
        values["win_rate"] = [run.win_rate["value"] for run in runs]
        found.append((setting, {name: over_seeds(each) for name, each in values.items()}, runs))
    return found


def told(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What an overview says of every run, and of each setting over its seeds."""
    return {
        "runs": [
            {
                **_at(one.variant),
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
                **_at(runs[0].variant),
                "seeds": len(runs),
                "figures": {name: one.to_json() for name, one in figures.items()},
                "verdicts": [run.verdict for run in runs],
            }
            for _, figures, runs in spread(outcomes)
        ],
    }


def _at(variant: Variant) -> dict[str, Any]:
    return {"value": variant.value} if variant.folder == FOLDER else {"settings": dict(variant.settings)}


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
        "key": outcomes[0].variant.settings[0][0],
        **told(outcomes),
    }
    write_json(folder / "overview.json", document)
    plot_ablation({one.variant.label: one.rows for one in outcomes}, folder / "overview.png")
    return folder / "overview.json", folder / "overview.png"
