"""benchmarks/evidence.py: what is kept of runs, the share of the possible gain, and the numbers in tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from figures import gain, keep
from figures.experiments import Experiment

TINY = Experiment("tiny-world", (1, 2), beta=0.1, episodes=128, ppo_seeds=2, gold=True)


# ---- the share of the possible gain


@pytest.mark.parametrize(
    ("sft", "checkpoints", "recommended", "best_step", "shares"),
    [
        (-0.5, {10: 1.0, 20: 1.5, 30: 0.5}, 10, 20, (0.75, 0.5)),
        (0.0, {10: 1.0, 20: -3.0}, None, 10, (0, -3)),  # nothing is recommended: nothing is gained
        (1.0, {10: 0.5, 20: 3.0}, 10, 20, (-0.25, 1)),
        (1.0, {10: 1.0, 20: 0.0}, 10, 10, (None, None)),  # none above SFT
        (0.0, {20: 1.0, 10: 1.0}, 20, 10, (1, 1)),  # of equal ones the first
    ],
)
def test_the_share_of_the_gain(sft, checkpoints, recommended, best_step, shares):
    found = gain.share_of_gain(sft, checkpoints, recommended)
    assert (found.best_step, (found.share, found.last_share)) == (best_step, shares)


# ---- a run directory, as a finished run leaves it


def estimate(value: float, n: int = 6) -> dict:
    return {"value": value, "ci95": [value - 0.1, value + 0.1], "n": n}


def make_run(run: Path, *, status: str = "finished", command: str = "rlhf-zoo run tiny-world") -> None:
    names = ("reward", "judge", "kl", "length", "eos_rate", "distinct_2", "repetition")
    figures = {name: estimate(2.0 if name == "kl" else 0.5) for name in names}
    probes = [
        {"name": "length", "family": "length", "value": 2.0, "threshold": 1.0, "two_sided": True, "fired": True,
         "meaning": "long", "worst": [{"prompt": "a", "completion": "b"}]},
        {"name": "copies", "family": "mode collapse", "value": 0.0, "threshold": 0.3, "two_sided": False,
         "fired": False, "meaning": "alike", "worst": []},
    ]  # fmt: skip
    points = [
        {"step": step, **{name: estimate(step / 10) for name in ("reward", "judge", "kl")}, "fired": ["length"]}
        for step in (10, 20)
    ]
    over = {
        "kind": "healthy", "reasons": ["The last checkpoint has the judge's highest mean."], "prompts": 24,
        "samples_per_prompt": 2, "sft": {name: estimate(0.0) for name in ("reward", "judge", "kl")},
        "checkpoints": points, "probes": {"probes": probes}, "thresholds": {"rate": 0.05},
    }  # fmt: skip
    judge = {"description": "…", "sft": estimate(0.0), "ppo": estimate(0.5), "win_rate": estimate(0.8)}
    evaluation = {
        "reward_model": {**estimate(0.0), "accuracy": 0.75}, "sft": figures, "ppo": figures,
        "win_rate": estimate(0.8), "control": estimate(0.5), "judges": {"gold utility": judge},
        "verdict": "healthy", "recommended": 20, "over_training": over,
    }  # fmt: skip
    resolved = {"evaluation": {"prompts": 3, "samples": 2}, "seed": 1, "data": "d", "parents": {"sft": "s", "ppo": "p"}}
    parents = {"sft": {"path": "checkpoint-5"}}
    put(run / "summary.json", {"recipe": "tiny-world", "seed": 1, "peak_rss_mib": 800.0, "hub": "local", "repos": {}})
    put(run / "eval/run.json", {"schema": 1, "status": status, "resolved": resolved, "parents": parents})
    put(run / "eval/evaluation.json", evaluation)
    put(run / "ppo/run.json", {"schema": 1, "status": "finished", "command": command})
    rows = [{"step": 1, "objective/score": 0.1, "objective/kl": 0.01}, {"step": 1, "eval_objective/kl": 1.0}]
    (run / "ppo/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in (10, 20):
        put(run / f"ppo/checkpoint-{step}/COMPLETE", {})


def put(path: Path, document: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


def test_what_is_kept_has_the_verdict_and_no_samples(tmp_path):
    make_run(tmp_path / "tiny-world-1", command="rlhf-zoo run x --dataset_name /some/where/pros_cons --seed 1")
    make_run(tmp_path / "tiny-world-2", status="running")
    (run,) = keep.kept_runs(TINY, tmp_path)["runs"]
    assert run["command"] == "rlhf-zoo run x --dataset_name $RLHF_ZOO_DATA/pros_cons --seed 1"
    assert (run["verdict"], run["kind"], run["recommended"], run["false_alarms"]) == ("healthy", "healthy", 20, 0.05)
    assert run["probes"][0] == {
        "name": "length", "family": "length", "value": 2.0, "threshold": 1.0, "two_sided": True, "fired": True,
    }  # fmt: skip
    assert run["checkpoints"][1] == {"step": 20, "reward": 2.0, "judge": 2.0, "kl": 2.0, "fired": ["length"]}
    assert run["curve"] == [{"step": 1, "reward": 0.1, "kl": 0.01}]
    assert "worst" not in json.dumps(run)
    assert "gain" not in run


# ---- measuring the gain


class Gold:
    """Stands in for sampling: SFT is 0, the checkpoint of step N is N / 10."""

    asked: list[str] = []

    def __init__(self, run: Path, base: Path) -> None: ...

    def __call__(self, checkpoint: Path) -> float:
        self.asked.append(checkpoint.name)
        return 0.0 if checkpoint.parent.name == "sft" else int(checkpoint.name.rpartition("-")[2]) / 10


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    monkeypatch.setattr(Gold, "asked", [])
    monkeypatch.setattr(gain, "_Gold", Gold)
    return Gold.asked


def test_the_gain_is_measured_once_and_goes_on_where_it_stopped(tmp_path, asked):
    make_run(tmp_path)
    found = gain.measured(tmp_path, tmp_path)
    assert found == {
        "sft": 0.0, "checkpoints": [{"step": 10, "gold": 1.0}, {"step": 20, "gold": 2.0}], "prompts": 3, "samples": 2,
    }  # fmt: skip
    assert asked == ["checkpoint-5", "checkpoint-10", "checkpoint-20"]
    document = json.loads((tmp_path / gain.FILE).read_text())
    document["checkpoints"].pop()
    put(tmp_path / gain.FILE, document)
    assert gain.stored(tmp_path) is None
    assert gain.measured(tmp_path, tmp_path) == found == gain.stored(tmp_path)
    assert asked[3:] == ["checkpoint-20"]


# ---- tables and plots
