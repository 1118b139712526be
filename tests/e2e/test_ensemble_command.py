"""`rlhf-zoo ensemble` trains reward models that differ only in their seed, with and without samples to score."""

import json
from pathlib import Path

import pytest
from finished_run import Run
from json_keys import unexplained
from zoo_process import errors


def test_ensemble_trains_on_same_pairs_and_scores_samples(base: Run, tmp_path: Path) -> None:
    run = base.copy(tmp_path / "run")
    command = run.command("ensemble", "--seeds", "2")
    (run.path / "eval").rename(tmp_path / "eval")
    done = run.zoo(*command)
    assert done.returncode == 0, done.stderr
    assert "seed 2" in done.stdout and "On average, two of the models agree on" in done.stdout
    evaluate = "rlhf-zoo eval recipes/tiny-world --output_dir run"
    assert f"There are no completions of PPO to score: run `{evaluate}` to make them." in done.stdout
    assert "On PPO's" not in done.stdout
    assert (run.path / "ensemble" / "overview.png").read_bytes().startswith(b"\x89PNG")
    own, other = run.json("reward", "run.json"), run.json("ensemble", "seed-2", "reward", "run.json")
    assert (own["seed"], other["seed"]) == (1, 2) and own == base.json("reward", "run.json")
    assert run.json("data", "preferences", "made.json")["seed"] == 1, "the run's own pairs"
    assert own["parents"]["sft"] == other["parents"]["sft"]
    assert own["reward_model"]["loss"] != other["reward_model"]["loss"]
    assert not (run.path / "ensemble" / "seed-2" / "sft").exists()

    (tmp_path / "eval").rename(run.path / "eval")
    done = run.zoo(*command, "--json")
    assert done.returncode == 0, done.stderr
    assert run.json("ensemble", "seed-2", "reward", "run.json") == other
    overview = json.loads(done.stdout)
    assert overview == run.json("ensemble", "overview.json") and unexplained(overview) == []
    assert overview["command"].startswith("rlhf-zoo ensemble recipes/tiny-world --output_dir run")
    assert [(model["seed"], model["directory"]) for model in overview["models"]] == [
        (1, "reward"), (2, "ensemble/seed-2/reward"),
    ]  # fmt: skip
    for model, trained in zip(overview["models"], (own, other), strict=True):
        report = trained["reward_model"]
        # The intervals differ: the ensemble resamples groups of prompts, the reward stage resamples prompts.
        assert (model["accuracy"]["value"], model["accuracy"]["n"]) == (report["accuracy"], report["n"])
        assert model["ece"] == pytest.approx(report["calibration"]["ece"])
        assert set(model["judge_correlation"]) == {"sft", "ppo"}
    gaps = overview["disagreement"]
    assert gaps["sft"]["n"] == gaps["ppo"]["n"] == 16 and gaps["sft"]["value"] > 0
    assert gaps["ppo_minus_sft"]["value"] == pytest.approx(gaps["ppo"]["value"] - gaps["sft"]["value"])
    scores = [model["ppo_score"]["value"] for model in overview["models"]]
    assert overview["own_minus_others"]["value"] == pytest.approx(scores[0] - scores[1])
    assert overview["agreement"]["pairs"][0]["seeds"] == [1, 2]

    flags = ("--ppo.reward_model_path", "reward", "ensemble/seed-2/reward", "--ppo.reward_ensemble", "worst")
    done = run.zoo(*run.command("doctor", *flags))
    assert done.returncode == 0, done.stdout
    assert "1 × worst of 2 reward models" in " ".join(done.stdout.split())

    document = run.json("eval", "run.json")
    document["parents"]["sft"]["fingerprint"] = "0" * 64
    (run.path / "eval" / "run.json").write_text(json.dumps(document))
    done = run.zoo(*command)
    assert done.returncode == 2 and "evaluates a different SFT policy than" in errors(done.stderr)[-1]
