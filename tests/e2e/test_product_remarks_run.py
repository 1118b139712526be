"""The whole recipe product-remarks on the real text, shrunken, through the command line."""

import gzip
import json
from pathlib import Path

import pytest
from finished_run import ARCHITECTURE
from json_keys import unexplained
from zoo_process import zoo

#: Lines of each split that the shrunken run reads.
READ = {"train": 1500, "judge": 3000, "validation": 200, "test": 1500}
SMALL = [
    "--architecture", json.dumps(ARCHITECTURE | {"hidden_size": 64, "intermediate_size": 128}),
    "--reward.learning_rate", "3e-3",
    "--sft.max_steps", "30", "--sft.save_strategy", "no", "--sft.eval_strategy", "no",
    "--reward.max_steps", "30", "--reward.score_samples", "32", "--corpus_args", '{"train_pairs": 400}',
    "--ppo.total_episodes", "64", "--ppo.per_device_train_batch_size", "16", "--ppo.save_steps", "2",
    "--ppo.eval_strategy", "no", "--evaluation.prompts", "20", "--evaluation.samples", "1",
    "--evaluation.checkpoint_prompts", "20",
]  # fmt: skip


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_whole_recipe_on_a_local_folder(real_data, tmp_path):
    (tmp_path / "pros_cons").mkdir()
    for split, size in READ.items():
        with gzip.open(real_data / "pros_cons" / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
            lines = [line for line, _ in zip(file, range(size), strict=False)]
        (tmp_path / "pros_cons" / f"{split}.jsonl").write_text("".join(lines))
    done = zoo("run", "product-remarks", "--dataset_name", "pros_cons", "--evaluation.lexicon",
               real_data / "opinion_lexicon", *SMALL, home=tmp_path / "home", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "product-remarks"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["simulated"] is False
    assert summary["reward_model"]["accuracy"] > 0.55  # after 30 steps; chance is 0.5
    assert summary["win_rate"]["n"] == summary["control"]["n"] == 20
    evaluation = json.loads((run / "eval" / "evaluation.json").read_text())
    assert unexplained(evaluation) == []
    assert list(evaluation["judges"]) == ["remarks", "classifier", "lexicon"]
    checks = {name: one["check"] for name, one in evaluation["judges"].items()}
    assert checks["classifier"]["accuracy"]["value"] > 0.8 and checks["remarks"]["own"]["accuracy"]["n"] == 200
    assert {name: check["same_labels"] for name, check in checks.items()} == {
        "remarks": False, "classifier": True, "lexicon": False,
    }  # fmt: skip
    assert evaluation["over_training"]["judge_reliability"]["own_accuracy"] == checks["remarks"]["own"]["accuracy"]
    data = json.loads((run / "data" / "run.json").read_text())["repo"]
    assert data["id"] == "local/product-remarks" and len(data["commit"]) == 40
    card = (run / "ppo" / "README.md").read_text()
    assert "Same labels:" in card and "labeled pairs of the policies' own outputs" in card
    assert "simulated data" not in card.lower() and "license: cc-by-4.0" in card
    seen = {row["text"] for row in rows(run / "data/lines/train.jsonl")}
    assert not seen & {row["text"].lower() for row in rows(run / "data/judge/train.jsonl")}


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_the_figures_of_the_recipe(real_data, tmp_path):
    """It comes near what the committed evidence shows of three seeds, with room for other threads and processors."""
    done = zoo(
        "run", "product-remarks", "--dataset_name", real_data / "pros_cons", home=tmp_path / "home", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "runs/product-remarks/summary.json").read_text())
    assert summary["reward_model"]["accuracy"] >= 0.87
    assert summary["win_rate"]["value"] >= 0.75
    assert summary["win_rate"]["n"] >= 500
    assert 1.5 <= summary["ppo"]["kl"] <= 9
    assert summary["ppo"]["distinct_2"] >= 0.5 * summary["sft"]["distinct_2"]
    assert summary["peak_rss_mib"] <= 3 * 1024
    assert abs(summary["control"]["value"] - 0.5) < 0.1
