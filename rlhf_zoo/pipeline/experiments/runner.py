"""Runs the variants of a run for `sweep` and `ablate`.

A variant is a run in RUN/FOLDER/NAME that trains some stages with keys of its own, and shares the other stages of RUN.
Finished variants are not trained again. `--restart` applies only to the variants. After Ctrl-C, the same command
continues.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ZooError
from ...evaluation.head_to_head import read_json_lines
from ...evaluation.stats import Spread, summarize_seeds
from ...fileio import now, read_json, write_json
from ...runs.context import Publisher, RunContext, environment_info
from ...runs.recipe import Recipe
from ...runs.record import StageRecord, fingerprint
from ...runs.settings.declared import default_of
from ...runs.settings.parse import stage_settings
from .. import run_recipe
from ..stages.interrupt import Stopped

if TYPE_CHECKING:
    from rich.console import Console

#: File in the directory of each variant of an ablation or a sweep. It names the variant and the run that it varies.
VARIANT_FILE = "ablation.json"
#: Number of held-out prompts whose completions the tables show.
SHOWN_PROMPTS = 4
_METRICS = ("reward", "judge", "kl", "length", "eos_rate", "distinct_2", "repetition")

#: Keys in which a run may differ from the variants of an ablation of β, and still be compared with them. At β = 0,
#: `Variant.flags` sets `reference`.
ABLATION_KEYS = ("kl_coef", "reference", "release")
#: Entries of evaluation.json that identify the evaluated prompts and the sampling settings.
_EVALUATION_KEYS = ("split", "prompts", "rows", "samples_per_prompt", "temperature", "max_new_tokens")

Flags = Mapping[str, Mapping[str, Any]]


# Variants: their names, folders and settings


@dataclass(frozen=True)
class Variant:
    """A run with other values of PPO's keys; without arguments, the original run.

    Attributes:
        settings: (key, value) of each changed key.
        seed: Seed of PPO; None for the recipe's own.
        folder: The experiment's folder in the run directory, such as "sweep".
    """

    settings: tuple[tuple[str, Any], ...] = ()
    seed: int | None = None
    folder: str = ""

    @property
    def value(self) -> Any:
        """The value of the first changed key."""
        return self.settings[0][1]

    @property
    def name(self) -> str:
        """Name of the variant's directory and tag, and part of its repository's name."""
        words = [f"{key.replace('_', '-')}-{_slug(_format_value(value))}" for key, value in self.settings]
        return "-".join([*words, *([] if self.seed is None else [f"seed-{self.seed}"])])

    @property
    def settings_text(self) -> str:
        """The keys with their values, for a table."""
        return ", ".join(f"{'β' if key == 'kl_coef' else key} = {_format_value(value)}" for key, value in self.settings)

    @property
    def label(self) -> str:
        """The keys with their values, and the seed, for a table."""
        return self.settings_text + (f", seed {self.seed}" if self.seed is not None else "")

    def directory(self, run_directory: Path) -> Path:
        """Returns the directory of the variant.

        Args:
            run_directory: The directory of the run to which the variant belongs.
        """
        return run_directory / self.folder / self.name

    def flags(self, flags: Flags) -> dict[str, dict[str, Any]]:
        """Returns the flags of the variant's run.

        Args:
            flags: The command's flags, by stage.
        """
        keys = dict(self.settings)
        if keys.get("kl_coef") == 0:  # PPO would load no reference, but variants are compared by their KL
            keys = {"reference": flags.get("ppo", {}).get("reference", True), **keys}
        return with_keys(flags, "ppo", keys if self.seed is None else {**keys, "seed": self.seed})

    def context_fields(self, run_directory: Path, flags: Flags) -> dict[str, Any]:
        """Returns the fields in which the variant's `RunContext` differs from the run's.

        Args:
            run_directory: The directory of the run to which the variant belongs.
            flags: The command's flags, by stage.
        """
        return {
            "directory": self.directory(run_directory),
            "base": run_directory,
            "variant": self.name,
            "flags": self.flags(flags),
        }

    def record_base(self, run_directory: Path) -> None:
        """Writes a file into the variant's directory that names the run to which the variant belongs.

        Args:
            run_directory: The directory of the run to which the variant belongs.
        """
        write_json(self.directory(run_directory) / VARIANT_FILE, {"schema": 1, "variant": self.name, "base": "../.."})


def variant_fields(directory: Path) -> dict[str, Any]:
    """Returns the fields of `RunContext` that only variants have.

    Args:
        directory: A run directory.

    Returns:
        {"base": the run, "variant": the variant's name}; {} if the directory is not a variant's.
    """
    path = directory / VARIANT_FILE
    if not path.is_file():
        return {}
    # The base is always two folders up. The file's own entry is ignored, because a download might name any other run.
    return {"base": directory / ".." / "..", "variant": read_json(path)["variant"]}


def make_variants(
    grid: Mapping[str, Sequence[Any]], *, folder: str, seed_count: int = 1, first_seed: int = 1
) -> list[Variant]:
    """Combines the values of a grid.

    Args:
        grid: Key of PPO -> its values.
        folder: Folder in the run directory that holds the variants.
        seed_count: Number of runs per combination. The first run has the recipe's own seed.
        first_seed: The recipe's own seed.

    Returns:
        The variants, with all seeds of a combination adjacent.

    Raises:
        ZooError: Two variants would have the same name.
    """
    variants = [
        Variant(tuple(zip(grid, values, strict=True)), first_seed + offset if offset else None, folder)
        for values in itertools.product(*grid.values())
        for offset in range(seed_count)
    ]
    counts = Counter(variant.name for variant in variants)
    if duplicates := [name for name, count in counts.items() if count > 1]:
        raise ZooError(
            f"Two runs would both be called {duplicates[0]}: choose values that differ in letters, digits or periods."
        )
    return variants


def recipe_seed(recipe: Recipe, flags: Flags, run_directory: Path) -> int:
    """Returns the seed of PPO in the run itself.

    Args:
        recipe: The recipe.
        flags: The command's flags, by stage.
        run_directory: The run directory.
    """
    ppo_flags, shared_flags = flags.get("ppo", {}), flags.get("recipe", {})
    settings = stage_settings(recipe, "ppo", ppo_flags, shared_flags=shared_flags, output_dir=run_directory / "ppo")
    return int(settings.trainer.seed)


def with_keys(flags: Flags, stage: str, keys: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns a copy of flags in which keys of a stage are replaced.

    Args:
        flags: Flags by stage.
        stage: Name of the stage, or "recipe".
        keys: The new keys of the stage.
    """
    new_flags = {name: dict(values) for name, values in flags.items()}
    new_flags[stage] = {**new_flags.get(stage, {}), **keys}
    return new_flags


def _format_value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.") or "empty"


# Running variants


def run_variants(
    run_directory: Path,
    variants: Sequence[Variant],
    open_run: Callable[[Variant], AbstractContextManager[tuple[RunContext, Publisher | None]]],
    console: Console,
) -> list[Outcome]:
    """Runs every variant that is not finished, one after the other.

    Args:
        run_directory: The run directory.
        variants: The variants, in the order in which they run.
        open_run: Context manager that yields a variant's run and its publisher.
        console: A rich console.
    """
    outcomes = []
    for number, variant in enumerate(variants, start=1):
        with open_run(variant) as (context, publisher):
            console.rule(f"[bold]{variant.label} ({number} of {len(variants)})")
            variant.record_base(run_directory)
            run_recipe.run(context, console, publisher)
        outcomes.append(read_outcome(variant, run_directory))
    return outcomes


@contextlib.contextmanager
def open_part(
    context: RunContext, folder: Path, settings: Mapping[str, Any], *, stage: str, restart: bool
) -> Iterator[StageRecord | None]:
    """Opens a part of an experiment that is not a stage, and records its status: running, interrupted or finished.

    Args:
        context: The run.
        folder: Directory of the part.
        settings: Settings that identify the part.
        stage: Name of the experiment, recorded in run.json as the stage.
        restart: Whether to repeat a finished part.

    Yields:
        The record; None if the part is finished.

    Raises:
        ZooError: The directory has a part with different settings.
        Stopped: The part was interrupted.
    """
    record, start_time = StageRecord(folder), time.monotonic()
    if restart:
        record.clear()
    recipe = context.recipe.name
    record.check_fingerprint(settings, recipe=recipe, fix="pass its earlier options, or --restart")
    if record.read().get("status") == "finished":
        yield None
        return
    identity = {"fingerprint": fingerprint(settings), "resolved": dict(settings), "versions": environment_info()}
    record.write(stage=stage, recipe=recipe, status="running", **identity, command=context.command)
    seconds_before = record.read().get("seconds", 0.0)
    try:
        yield record
    except KeyboardInterrupt as error:
        record.write(status="interrupted", seconds=seconds_before + time.monotonic() - start_time)
        raise Stopped from error
    record.write(status="finished", seconds=seconds_before + time.monotonic() - start_time, finished=now())


# Results


@dataclass(frozen=True)
class Outcome:
    """The results of a finished PPO run.

    Attributes:
        variant: The variant; `Variant()` for the run itself.
        repo: Repository of the PPO policy; None if it is not published.
        estimates: Metric of PPO on held-out prompts -> {value, ci95, n}.
        win_rate: Win rate of PPO over SFT, as {value, ci95, n}.
        rows: The rows of metrics.jsonl.
        samples: (prompt, completion, reward, judge) of the first held-out prompts.
        judgment: {step, verdict, fired, at_last} of the evaluated checkpoint: its step, the verdict or None, the
            families of probes that fired, and the first three of the last checkpoint, or None if it is the same one.
    """

    variant: Variant
    repo: str | None
    estimates: Mapping[str, Mapping[str, Any]]
    win_rate: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    samples: Sequence[tuple[str, str, float, float]]
    judgment: Mapping[str, Any]


def read_outcome(variant: Variant, run_directory: Path) -> Outcome:
    """Reads the outcome of a finished variant, or of the run itself.

    Args:
        variant: The variant; `Variant()` for the run itself.
        run_directory: The run directory.
    """
    directory = variant.directory(run_directory)
    record = StageRecord(directory / "ppo")
    document = record.read()
    evaluation = read_json(directory / "eval" / "evaluation.json")
    lines = read_json_lines(directory / "eval" / "samples.jsonl")
    samples = [(line["prompt"], line["ppo"]) for line in lines if line["sample"] == 0]
    return Outcome(
        variant,
        repo=(document.get("repo") or {}).get("id"),
        estimates={name: evaluation["ppo"][name] for name in _METRICS},
        win_rate=evaluation["win_rate"],
        rows=record.metrics(),
        samples=[(prompt, ppo["completion"], ppo["reward"], ppo["judge"]) for prompt, ppo in samples[:SHOWN_PROMPTS]],
        judgment=_judgment(evaluation.get("over_training") or {}, document["chosen"]["step"]),
    )


def _judgment(trajectory: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Returns `Outcome.judgment` of the checkpoint at a step."""
    at_last, at_recommended = (
        {"step": entry.get("step"), "verdict": entry.get("verdict"), "fired": list(entry.get("fired") or ())}
        for entry in (trajectory, trajectory.get("at_recommended") or {})
    )
    no_verdict: dict[str, Any] = {"step": step, "verdict": None, "fired": []}
    at_step = next((entry for entry in (at_last, at_recommended) if entry["step"] == step), no_verdict)
    return {**at_step, "at_last": None if at_last["step"] in (step, None) else at_last}


def read_own_outcome(run_directory: Path, variant: Variant) -> Outcome | None:
    """Reads the outcome of the run itself, for comparison with its variants.

    Args:
        run_directory: The run directory.
        variant: A finished variant. Unless other flags are set, it differs from the run only in `kl_coef`.

    Returns:
        The outcome, whose variant has the run's `kl_coef`. None if the run is not finished or not evaluated, or differs
        from the variant in other settings, or in the evaluation's judge, prompts or sampling.
    """
    directories = (run_directory, variant.directory(run_directory))
    documents = [StageRecord(directory / "ppo").read() for directory in directories]
    paths = [directory / "eval" / "evaluation.json" for directory in directories]
    if documents[0].get("status") != "finished" or not paths[0].is_file():
        return None
    settings = [
        {key: value for key, value in document["resolved"].items() if key not in ABLATION_KEYS}
        for document in documents
    ]
    evaluations = [
        [(evaluation.get("judge") or {}).get("name"), *(evaluation.get(key) for key in _EVALUATION_KEYS)]
        for evaluation in map(read_json, paths)
    ]
    if settings[0] != settings[1] or evaluations[0] != evaluations[1]:
        return None
    beta = documents[0]["resolved"].get("kl_coef", default_of("ppo", "kl_coef"))
    return replace(read_outcome(Variant(), run_directory), variant=Variant((("kl_coef", float(beta)),)))


def group_by_setting(outcomes: Sequence[Outcome]) -> list[tuple[str, dict[str, Spread], list[Outcome]]]:
    """Groups outcomes whose variants have the same keys and values, with any seed.

    Args:
        outcomes: Outcomes of variants.

    Returns:
        (keys with their values, metric -> spread over seeds, outcomes) of each group, in order.
    """
    outcomes_by_setting: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        outcomes_by_setting.setdefault(outcome.variant.settings_text, []).append(outcome)
    groups = []
    for setting, group in outcomes_by_setting.items():
        values = {name: [outcome.estimates[name]["value"] for outcome in group] for name in _METRICS}
        values["win_rate"] = [outcome.win_rate["value"] for outcome in group]
        groups.append((setting, {name: summarize_seeds(seed_values) for name, seed_values in values.items()}, group))
    return groups
