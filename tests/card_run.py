"""Writes a finished run of four stages with round figures, for tests of cards."""

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from warm import plot_functions, skip_drawing

from rlhf_zoo.evaluation.calibration import preference_report
from rlhf_zoo.evaluation.length_control import length_controlled_win_rate
from rlhf_zoo.fileio import write_json
from rlhf_zoo.publishing.cards import card
from rlhf_zoo.runs.record import StageRecord, fingerprint

COMMITS = {name: character * 40 for name, character in zip(("sft", "reward", "data", "20", "40"), "abcde", strict=True)}
NASTY = (
    "<script>alert(1)</script> **bold** | [x](http://a.b) `tick` ![i](j) &amp; <b>\n# head\n\n- item $x$ \\| www.a.b"
)
RESOLVED = {
    "recipe": {"simulated": True, "language": "en", "hub_token": "hf_abcdefghijklmnop"},
    "kl_coef": 0.1,
    "temperature": 1.0,
    "learning_rate": 3e-4,
    "max_grad_norm": math.inf,
    "hub_token": "hf_abcdefghijklmnop",
    "output_dir": "/home/someone/runs",
}
COMMON = {
    "recipe": "tiny-world",
    "status": "finished",
    "seed": 3,
    "hub": "local",
    "versions": {"torch": "2.13.0", "rlhf_zoo": "0.1.0"},
    "seconds": 61.25,
    "created": "2026-01-01T00:00:00+00:00",
    "finished": "2026-01-01T00:01:01+00:00",
    "resolved": RESOLVED,
    "dataset": {"repo": "local/tiny-world", "commit": COMMITS["data"], "fingerprint": "0"},
    "fingerprint": fingerprint(RESOLVED),
}


def estimate(value: float, n: int = 644) -> dict[str, Any]:
    return {"value": value, "ci95": [value - 0.05, value + 0.05], "n": n}


def side(shift: float) -> dict[str, Any]:
    keys = ("reward", "judge", "kl", "length", "eos_rate", "distinct_2", "repetition")
    return {key: estimate(round(0.5 + shift + index / 100, 4)) for index, key in enumerate(keys)}


def sample(prompt: str, number: int, completion: str, judge: float, kl: float = 4.0) -> dict[str, Any]:
    figures = {"reward": 0.25, "judge": judge, "kl": kl, "length": 7, "ended": True}
    return {
        "prompt": prompt,
        "sample": number,
        "sft": {"completion": " a plain line", **figures, "reward": 0.125, "judge": 0.5, "kl": 0.0},
        "ppo": {"completion": completion, **figures},
    }


def make_stage(
    runs: Path, name: str, parents: Mapping[str, Any], rows: list[dict], steps: list[int], tags: Mapping[str, str]
) -> StageRecord:
    """Writes a finished, published stage with complete checkpoints at `steps`."""
    record = StageRecord(runs / name)
    repo = {"id": f"local/tiny-world-{name}", "commit": tags[max(tags)], "tags": dict(tags)}
    command = f"rlhf-zoo {name} tiny-world --seed 3 --hub_token hf_abcdefghijklmnop"
    record.write(**COMMON, stage=name, parents=dict(parents), repo=repo, command=command)
    for row in rows:
        record.append_metrics({"time": "2026-01-01T00:00:30+00:00", **row})
    for at in steps:
        folder = record.checkpoint_path(at)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"rlhf_zoo": {"score_mean": 0.75, "score_std": 2.5}}))
        record.mark_complete(folder)
    return record


def make_runs(runs: Path) -> Path:
    """Writes the stages sft, reward and ppo with their metrics, and an evaluation of PPO."""
    sft = {"repo": "local/tiny-world-sft", "commit": COMMITS["sft"], "path": "/home/someone/sft"}
    reward = {"repo": "local/tiny-world-reward", "commit": COMMITS["reward"], "path": "/home/someone/reward"}
    curve = [
        {
            "step": step, "episodes": 64 * step, "objective/score": step / 20, "objective/kl": step / 10,
            "objective/entropy": 2 - step / 40, "completions/length": 10 + step / 8, "completions/eos_rate": 1.0,
            "policy/clipfrac": 0.1, "loss/value": 1 / step, "kl_coef": 0.1,
        }
        for step in range(10, 41, 10)
    ]  # fmt: skip
    tags = {"step-000020": COMMITS["20"], "step-000040": COMMITS["40"], "best": COMMITS["40"]}
    make_stage(runs, "ppo", {"sft": sft, "reward": reward}, curve, [20, 40], tags)
    losses = [{"step": step, "loss": 3 / step, "eval_loss": 2.0, "eval_accuracy": 0.9} for step in (10, 20)]
    make_stage(runs, "sft", {}, losses, [20], {"step-000020": COMMITS["sft"]})
    make_stage(runs, "reward", {"sft": sft}, losses, [20], {"step-000020": COMMITS["reward"]})

    gold = {"name": "gold", "description": "The utility that is known exactly.", "is_training_reward": False}
    evaluation = {
        "schema": 1,
        "recipe": "tiny-world",
        "seed": 3,
        "split": "test",
        "prompts": 161,
        "samples_per_prompt": 4,
        "n": 644,
        "temperature": 1.0,
        "max_new_tokens": 20,
        "judge": gold,
        "judges": {"gold": {}, "lexicon": {"description": "Word lists.", "win_rate": estimate(0.8)}},
        "reward_model": {"accuracy": 0.93, "n": 1000, "ci95": [0.91, 0.945]},
        "sft": side(0),
        "ppo": side(1),
        "difference": {"reward": estimate(1.25), "length": estimate(-0.5), "judge": estimate(0.75)},
        "win_rate": {**estimate(0.9), "ties": 0.125},
        "control": {**estimate(0.5), "ties": 0.25},
        "seconds": 9.0,
    }
    write_json(runs / "eval" / "evaluation.json", evaluation)
    rows = [sample(f"prompt {n // 2}", n % 2, f" fine number {n}", 0.9 + n / 1000) for n in range(20)]
    rows[0]["ppo"]["ended"] = False
    rows += [sample("the odd", 0, NASTY, -1.5), sample("a far", 0, " far away words", 0.95, kl=55.5)]
    (runs / "eval" / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return runs


def reward_report(pairs: int = 400) -> dict[str, Any]:
    """Returns the report that the reward stage writes into run.json, for seeded random scores."""
    rng = random.Random(0)
    lengths = [[rng.randint(3, 30) for _ in range(pairs)] for _ in range(2)]
    margins = [rng.gauss(0.8, 1.2) for _ in range(pairs)]
    rejected = [rng.gauss(0, 1) for _ in range(pairs)]
    report = preference_report(
        [low + margin for low, margin in zip(rejected, margins, strict=True)],
        rejected,
        chosen_lengths=lengths[0],
        rejected_lengths=lengths[1],
        prompts=[f"prompt {pair // 2}" for pair in range(pairs)],
        seed=3,
    )
    return {"score_mean": 1.5, "score_std": 2.0, **report, "split": "test"}


def over_training() -> dict[str, Any]:
    """Returns `over_training` of evaluation.json for a run of two checkpoints, the last of which is hacked."""

    def figures(reward: float, judge: float, kl: float) -> dict[str, Any]:
        means = {"reward": reward, "judge": judge, "kl": kl, "length": 9.0, "distinct_2": 0.5}
        return {name: {"value": value, "ci95": [value - 0.1, value + 0.1], "n": 60} for name, value in means.items()}

    def probe(name: str, fired: bool) -> dict[str, Any]:
        worst = [{"prompt": "a prompt", "completion": "<b>again again", "number": 1.0}]
        meaning = "It repeats itself." if name == "repetition" else "It is longer."
        return {"family": name, "effect": 0.2, "threshold": 0.1, "p": 0.004, "fired": fired,
                "finding": meaning, "worst": worst}  # fmt: skip

    fit = {"alpha": estimate(0.5), "beta": estimate(0.1), "peak": None, "no_peak": "No peak: β is -0.196."}
    fit_with_peak = {**fit, "peak": {"d": estimate(2.0), "kl": 4.0, "gain": estimate(0.75)}, "no_peak": None}
    return {
        "schema": 1, "split": "validation", "prompts": 30, "samples_per_prompt": 2, "judge": "gold",
        "verdict": "hacked", "recommended": 20, "reasons": ["3 of 4 probes fire."],
        "sft": figures(0.0, 0.0, 0.0),
        "checkpoints": [
            {"step": 20, **figures(1.0, 0.8, 2.0), "fired": []},
            {"step": 40, **figures(3.0, -0.5, 20.0), "fired": ["length", "repetition"]},
        ],
        "fits": {"proxy": fit, "judge": fit_with_peak},
        "rule": {"version": 2},
        "probes": {
            "probes": [probe("repetition", True), probe("length", False)],
            "skipped": {}, "permutations": 2000, "level": 0.01,
        },
    }  # fmt: skip


@pytest.fixture
def with_plots() -> None:
    """Makes `no_plots` draw quick plots, for a test of which plots a card has; test_plots.py tests the images."""


@pytest.fixture
def quick_plots(monkeypatch):
    """Saves plots without drawing them, and computes intervals at equal length from few resamples, to save time."""
    for module, name in plot_functions():
        for attribute in ("save", name):
            monkeypatch.setattr(module, attribute, getattr(module, attribute))  # restores it after the test
    monkeypatch.setitem(length_controlled_win_rate.__kwdefaults__, "resamples", 50)
    skip_drawing()


@pytest.fixture
def no_plots(request, monkeypatch):
    """Leaves plots out of cards, unless the test uses `with_plots`."""
    if "with_plots" in request.fixturenames:
        request.getfixturevalue("quick_plots")
    else:
        monkeypatch.setattr(card, "_draw_plots", lambda *_: {})


@pytest.fixture
def runs(tmp_path) -> Path:
    return make_runs(tmp_path / "runs")


def head_and_body(readme: Path) -> tuple[dict, str]:
    _, head, body = readme.read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(head), body


def cells(body: str, start: str) -> list[str]:
    line = next(line for line in body.splitlines() if line.startswith(f"| {start}"))
    return [cell.strip() for cell in line.strip("|").split("|")]
