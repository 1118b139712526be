"""What is kept of finished runs, in docs/evidence/*.json: small, and without anything of the machine that ran them."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhf_zoo.errors import ZooError
from rlhf_zoo.fileio import read_json, write_text
from rlhf_zoo.runs.record import StageRecord

from .experiments import METHODS, ROOT, RUNS, Experiment

FOLDER = ROOT / "docs" / "evidence"
PROBE_KEYS = ("family", "value", "effect", "threshold", "p", "fired")
WIN_RATES = ("win_rate", "control", "win_rate_at_equal_length")
BY_LENGTH = ("chosen_longer", "chosen_shorter", "same_length")
CURVE = {
    "reward": "objective/score",
    "kl": "objective/kl",
    "gold": "rewards/gold",
    "own": "rewards/reward_model_0",
    "disagreement": "rewards/disagreement",
}
_DATA = re.compile(r"\S+/(pros_cons|opinion_lexicon|ukp_convarg)(?!\S)")


def load(name: str) -> dict[str, Any]:
    """The kept document of that name; {} where there is none."""
    path = FOLDER / f"{name}.json"
    return read_json(path) if path.is_file() else {}


def write(name: str, document: Mapping[str, Any]) -> None:
    """One line for each key of a run, so that a change of a figure is a change of a line or few."""
    lines = ",\n".join(f'"{key}": {_lines(value)}' for key, value in _rounded(document).items())
    write_text(FOLDER / f"{name}.json", "{\n" + lines + "\n}\n")


def _lines(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(_lines(one) for one in value) + "\n]"
    if isinstance(value, dict) and value:
        return (
            "{\n" + ",\n".join(f' "{key}": {json.dumps(one, ensure_ascii=False)}' for key, one in value.items()) + "\n}"
        )
    return json.dumps(value, ensure_ascii=False)


def _rounded(value: Any) -> Any:
    """Floats to six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value


def finished(run: Path) -> bool:
    """Whether a run, or a variant of an ablation, was trained and evaluated to its end."""
    done = all(StageRecord(run / stage).read().get("status") == "finished" for stage in ("ppo", "eval"))
    return done and (run / "summary.json").is_file()


def kept_runs(experiment: Experiment, runs: Path) -> dict[str, Any]:
    """The finished runs over seeds."""
    result = [run for seed in experiment.seeds if finished(run := experiment.directory(seed, runs))]
    return {"schema": 2, "recipe": experiment.recipe, "runs": [_kept(run) for run in result]}


def kept_ablation(experiment: Experiment, runs: Path) -> dict[str, Any]:
    """The finished runs of β = 0 and the recipe's β, under several seeds of PPO."""
    base = experiment.directory(experiment.ablated_seed, runs)
    kept = []
    for variant in experiment.variants:
        run = variant.directory(base)
        if finished(run):
            seed = variant_seed(experiment, variant.seed)
            kept.append({**_kept(run), "beta": variant.value, "ppo_seed": seed})
    return {"schema": 2, "recipe": experiment.recipe, "runs": kept}


def variant_seed(experiment: Experiment, seed: int | None) -> int:
    """The seed of PPO: a variant without one has the run's."""
    return experiment.ablated_seed if seed is None else seed


def kept_baselines(experiment: Experiment, runs: Path) -> dict[str, Any]:
    """The frontier over those methods that are finished; {} where none is."""
    run = experiment.directory(experiment.seeds[0], runs)
    folder = run / "baseline"
    methods = [method for method in METHODS if (folder / method / "baseline.json").is_file()]
    if not methods:
        return {}
    frontier = read_json(folder / "frontier.json")
    commands = {method: _public(read_json(folder / method / "baseline.json")["command"]) for method in methods}
    frontier.pop("command", None)
    for variant in experiment.spread:
        command = StageRecord(variant.directory(run) / "ppo").read().get("command")
        commands |= {"PPO": _public(command)} if command else {}
    points = [frontier["sft"], frontier["ppo"], *frontier["ppo_ablation"], *_each(frontier["methods"].values())]
    for point in points:
        for passes in ("training", "serving"):
            point["compute"][passes].pop("models", None)
    return {**frontier, "schema": 2, "commands": commands}


def kept_ensemble(experiment: Experiment, runs: Path) -> dict[str, Any]:
    """What the reward models of several seeds say; {} where they are not finished."""
    path = experiment.directory(experiment.seeds[0], runs) / "ensemble" / "overview.json"
    if not path.is_file():
        return {}
    document = read_json(path)
    return {**document, "schema": 2, "command": _public(document["command"])}


def _each(groups: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [one for group in groups for one in group]


def _kept(run: Path) -> dict[str, Any]:
    """Of a finished run. Its figures are those of evaluation.json, which `rlhf-zoo eval --restart` writes anew.

    Raises ZooError where it has no verdict.
    """
    summary, evaluation = read_json(run / "summary.json"), read_json(run / "eval" / "evaluation.json")
    rows = StageRecord(run / "ppo").metrics()
    model = evaluation.get("reward_model")
    return {
        "recipe": summary["recipe"],
        "seed": summary["seed"],
        "command": _public(StageRecord(run / "ppo").read()["command"]),
        "peak_rss_mib": summary["peak_rss_mib"],
        "reward_model": reward_model(model) if model else None,
        **{key: evaluation[key] for key in ("prompts", "groups") if key in evaluation},
        **{side: {key: one["value"] for key, one in evaluation[side].items()} for side in ("sft", "ppo")},
        **{key: {part: evaluation[key][part] for part in ("value", "ci95", "n")} for key in WIN_RATES},
        "judges": {
            name: {key: judge[key] for key in ("sft", "ppo", "win_rate", "answers") if key in judge}
            for name, judge in evaluation["judges"].items()
        },
        **({"trivial": evaluation["trivial"]} if "trivial" in evaluation else {}),
        **_verdict(run, evaluation),
        "curve": [
            {"step": row["step"], **{name: row[key] for name, key in CURVE.items() if key in row}}
            for row in rows
            if "objective/kl" in row
        ],
    }


def reward_model(report: Mapping[str, Any]) -> dict[str, Any]:
    """Accuracy, on all held-out pairs and by which side is longer, and that of the rule that the longer one wins."""
    hard = report["hard"] or {}
    by_length = {key: hard[key] for key in BY_LENGTH if hard.get(key)}
    rules = {key: report["length"][key] for key in ("longer_wins", "prefers_longer")}
    return {**{key: report[key] for key in ("accuracy", "n", "ci95")}, **rules, **by_length}


def _verdict(run: Path, evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict over the checkpoints, with what it goes by; without the samples."""
    over = evaluation["over_training"]
    if "checkpoints" not in over:
        raise ZooError(f"{run} has no verdict ({over['problem']}): evaluate it again so that it has one.")
    figures = ("reward", "judge", "kl")
    return {
        "verdict": evaluation["verdict"],
        "recommended": evaluation["recommended"],
        "kind": over["kind"],
        "reasons": over["reasons"],
        "rule": over["rule"],
        "probes": [{key: probe[key] for key in PROBE_KEYS} for probe in over["probes"]["probes"]],
        "validation": {
            **{key: over[key] for key in ("prompts", "groups") if key in over},
            "samples": over["samples_per_prompt"],
            **{name: over["sft"][name]["value"] for name in figures},
        },
        "checkpoints": [
            {"step": one["step"], **{name: one[name]["value"] for name in figures}, "fired": one["fired"]}
            for one in over["checkpoints"]
        ],
    }


def _public(command: str) -> str:
    """A command with the folder of its data as a variable, and the runs where they lie by themselves."""
    return _DATA.sub(r"$RLHF_ZOO_DATA/\1", command).replace(str(RUNS), "runs/evidence")
