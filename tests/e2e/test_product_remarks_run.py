"""The recipe product-remarks on its real text, through the command line."""

import json
from pathlib import Path

import pytest
from json_keys import unexplained
from zoo_process import zoo


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_product_remarks_figures_match_evidence(real_data, tmp_path):
    """The bounds are the committed figures of three seeds, with a margin for other thread counts and processors."""
    done = zoo("run", "product-remarks", "--dataset_name", real_data / "pros_cons", "--evaluation.lexicon",
               real_data / "opinion_lexicon", "--ppo.release", "last", "--ppo.eval_strategy", "no",
               home=tmp_path / "home", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "product-remarks"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["simulated"] is False
    assert summary["reward_model"]["accuracy"] >= 0.87
    assert summary["win_rate"]["value"] >= 0.75
    assert summary["win_rate"]["n"] >= 500
    assert 1.5 <= summary["ppo"]["kl"] <= 9
    assert summary["ppo"]["distinct_2"] >= 0.5 * summary["sft"]["distinct_2"]
    assert summary["peak_rss_mib"] <= 3 * 1024
    assert abs(summary["control"]["value"] - 0.5) < 0.1
    evaluation = json.loads((run / "eval" / "evaluation.json").read_text())
    assert unexplained(evaluation) == []
    assert list(evaluation["judges"]) == ["remarks", "classifier", "lexicon"]
    checks = {name: judge["check"] for name, judge in evaluation["judges"].items()}
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
    train = {row["text"] for row in read_rows(run / "data/lines/train.jsonl")}
    assert not train & {row["text"].lower() for row in read_rows(run / "data/judge/train.jsonl")}
