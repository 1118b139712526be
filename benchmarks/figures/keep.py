"""The figures kept from finished runs, in docs/evidence/*.json: small, and without paths of one machine."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_zoo.errors import ZooError
from rlhf_zoo.fileio import read_json, write_text
from rlhf_zoo.runs.record import StageRecord

from .experiments import ROOT, RUNS, Experiment

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
    """Returns the kept document; {} if there is none."""
    path = FOLDER / f"{name}.json"
    return read_json(path) if path.is_file() else {}


def write(name: str, document: Mapping[str, Any]) -> None:
    """Writes a document with one line for each key of a run, so a changed figure changes few lines."""
    lines = ",\n".join(f'"{key}": {_format_lines(value)}' for key, value in _round_floats(document).items())
    write_text(FOLDER / f"{name}.json", "{\n" + lines + "\n}\n")


def _format_lines(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(map(_format_lines, value)) + "\n]"
    if isinstance(value, dict) and value:
        lines = [f' "{key}": {json.dumps(child, ensure_ascii=False)}' for key, child in value.items()]
        return "{\n" + ",\n".join(lines) + "\n}"
    return json.dumps(value, ensure_ascii=False)


def _round_floats(value: Any) -> Any:
    """Rounds all floats to six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _round_floats(child) for key, child in value.items()}
    return [_round_floats(child) for child in value] if isinstance(value, list | tuple) else value


def is_finished(run: Path) -> bool:
    """Whether the training and evaluation of a run, or of a variant of an ablation, have finished."""
    has_stages = all(StageRecord(run / stage).read().get("status") == "finished" for stage in ("ppo", "eval"))
    return has_stages and (run / "summary.json").is_file()


def read_runs(experiment: Experiment, runs: Path) -> dict[str, Any]:
    """Reads the figures of the finished runs over seeds."""
    folders = [folder for seed in experiment.seeds if is_finished(folder := experiment.run_folder(seed, runs))]
    return {"schema": 2, "recipe": experiment.recipe, "runs": [_run_figures(folder) for folder in folders]}


def _run_figures(run: Path) -> dict[str, Any]:
    """Reads the figures of a finished run from evaluation.json, which `rlhf-zoo eval --restart` replaces.

    Raises:
        ZooError: The run has no verdict.
    """
    summary, evaluation = read_json(run / "summary.json"), read_json(run / "eval" / "evaluation.json")
    rows = StageRecord(run / "ppo").metrics()
    model = evaluation.get("reward_model")
    return {
        "recipe": summary["recipe"],
        "seed": summary["seed"],
        "command": _public_command(StageRecord(run / "ppo").read()["command"]),
        "peak_rss_mib": summary["peak_rss_mib"],
        "reward_model": reward_model_figures(model) if model else None,
        **{key: evaluation[key] for key in ("prompts", "groups") if key in evaluation},
        **{side: {key: figure["value"] for key, figure in evaluation[side].items()} for side in ("sft", "ppo")},
        **{key: {part: evaluation[key][part] for part in ("value", "ci95", "n")} for key in WIN_RATES},
        "judges": {
            name: {key: judge[key] for key in ("sft", "ppo", "win_rate", "answers") if key in judge}
            for name, judge in evaluation["judges"].items()
        },
        **({"trivial": evaluation["trivial"]} if "trivial" in evaluation else {}),
        **_verdict_figures(run, evaluation),
        "curve": [
            {"step": row["step"], **{name: row[key] for name, key in CURVE.items() if key in row}}
            for row in rows
            if "objective/kl" in row
        ],
    }


def reward_model_figures(report: Mapping[str, Any]) -> dict[str, Any]:
    """Selects a reward model's accuracy, overall and by the longer side, and that of the rule "longer wins"."""
    hard = report["hard"] or {}
    by_length = {key: hard[key] for key in BY_LENGTH if hard.get(key)}
    rules = {key: report["length"][key] for key in ("longer_wins", "prefers_longer")}
    return {**{key: report[key] for key in ("accuracy", "n", "ci95")}, **rules, **by_length}


def _verdict_figures(run: Path, evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Selects the verdict with its reasons, its probes and the figures of each checkpoint, without samples."""
    over = evaluation["over_training"]
    if "checkpoints" not in over:
        raise ZooError(f"{run} has no verdict ({over['problem']}): evaluate it again.")
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
            {"step": row["step"], **{name: row[name]["value"] for name in figures}, "fired": row["fired"]}
            for row in over["checkpoints"]
        ],
    }


def _public_command(command: str) -> str:
    """Replaces paths of this machine: the data's folder by a variable, the runs' folder by the default."""
    return _DATA.sub(r"$RLHF_ZOO_DATA/\1", command).replace(str(RUNS), "runs/evidence")
