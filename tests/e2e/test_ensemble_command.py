"""`rlhf-zoo ensemble`: reward models that differ by their seed alone, before and after the run is evaluated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from json_keys import unexplained
from zoo_process import errors, zoo

from rlhf_zoo.recipes import copy_recipe

FLAGS = [
    "--output_dir", "run", "--corpus_args", '{"lines": 1000}',
    "--sft.max_steps", "20", "--sft.eval_strategy", "no", "--sft.save_strategy", "no",
    "--reward.simulated_pairs", "100", "--reward.simulated_test_pairs", "40", "--reward.score_samples", "32",
    "--reward.max_steps", "4", "--reward.save_strategy", "no", "--reward.eval_strategy", "no",
    "--ppo.total_episodes", "32", "--ppo.per_device_train_batch_size", "16", "--ppo.gradient_accumulation_steps", "1",
    "--ppo.num_mini_batches", "1", "--ppo.save_strategy", "no", "--ppo.eval_strategy", "no",
    "--ppo.response_length", "12",
    "--evaluation.prompts", "10", "--evaluation.samples", "1", "--evaluation.checkpoint_prompts", "0",
]  # fmt: skip


def test_an_ensemble_is_trained_on_the_same_pairs_and_scores_what_is_there(tmp_path: Path) -> None:
    def run(command: str, *more: str):
        return zoo(command, "tiny-world", *FLAGS, *more, home=tmp_path / "home", cwd=tmp_path)

    folder = tmp_path / "run"

    def documents() -> dict[str, dict]:
        paths = {"own": "reward", "2": "ensemble/seed-2/reward", "sft": "sft"}
        return {name: json.loads((folder / path / "run.json").read_text()) for name, path in paths.items()}

    done = run("ensemble", "--seeds", "2")
    assert done.returncode == 0, done.stderr
    assert "seed 2" in done.stdout and "Two models prefer the same side of" in done.stdout
    assert "`rlhf-zoo eval tiny-world` makes them" in done.stdout and "On PPO's" not in done.stdout
    assert (folder / "ensemble" / "overview.png").read_bytes().startswith(b"\x89PNG")
    trained = documents()
    assert [trained[name]["seed"] for name in ("own", "2")] == [1, 2]
    assert json.loads((folder / "data" / "preferences" / "made.json").read_text())["seed"] == 1, "the run's own pairs"
    assert trained["own"]["parents"]["sft"] == trained["2"]["parents"]["sft"]
    assert trained["own"]["reward_model"]["loss"] != trained["2"]["reward_model"]["loss"]
    assert not (folder / "ensemble" / "seed-2" / "sft").exists()

    done = run("run")
    assert done.returncode == 0, done.stderr
    done = run("ensemble", "--seeds", "2", "--json")
    assert done.returncode == 0, done.stderr
    again = documents()
    assert [again[name]["finished"] for name in trained] == [one["finished"] for one in trained.values()]
    overview = json.loads(done.stdout)
    assert overview == json.loads((folder / "ensemble" / "overview.json").read_text())
    assert unexplained(overview) == []
    assert overview["command"].startswith("rlhf-zoo ensemble tiny-world --output_dir run")
    assert [(one["seed"], one["directory"]) for one in overview["models"]] == [
        (1, "reward"), (2, "ensemble/seed-2/reward"),
    ]  # fmt: skip
    for one, name in zip(overview["models"], ("own", "2"), strict=True):
        told = trained[name]["reward_model"]
        assert one["accuracy"] == {key: told[key if key != "value" else "accuracy"] for key in ("value", "ci95", "n")}
        assert one["ece"] == pytest.approx(told["calibration"]["ece"])
        assert set(one["judge_correlation"]) == {"sft", "ppo"}
    apart = overview["disagreement"]
    assert apart["sft"]["n"] == apart["ppo"]["n"] == 10 and apart["sft"]["value"] > 0
    assert apart["ppo_less_sft"]["value"] == pytest.approx(apart["ppo"]["value"] - apart["sft"]["value"])
    scores = [one["ppo_score"]["value"] for one in overview["models"]]
    assert overview["own_less_others"]["value"] == pytest.approx(scores[0] - scores[1])
    assert overview["agreement"]["pairs"][0]["seeds"] == [1, 2]

    evaluated = folder / "eval" / "run.json"
    document = json.loads(evaluated.read_text())
    document["parents"]["sft"]["fingerprint"] = "0" * 64
    evaluated.write_text(json.dumps(document))
    done = run("ensemble", "--seeds", "2")
    assert done.returncode == 2 and "is of another SFT policy than" in errors(done.stderr)[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny-world", "--seeds", "1"], "--seeds"),
        (["tiny-world", "--reward.learning_rat", "1"], "did you mean"),
        (["tiny-world", "--reward.dataset_test_split", "null"], "holds no pairs out"),
        (["recipes/no-reward"], "has no stage reward"),
    ],
)
def test_what_is_no_ensemble_trains_nothing(tmp_path: Path, arguments: list[str], message: str) -> None:
    copy_recipe("tiny-world", tmp_path / "recipes" / "no-reward")
    (tmp_path / "recipes" / "no-reward" / "reward.yaml").unlink()
    done = zoo("ensemble", *arguments, home=tmp_path / "home", cwd=tmp_path)
    assert done.returncode == 2 and message in errors(done.stderr)[-1] and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "runs").exists()
