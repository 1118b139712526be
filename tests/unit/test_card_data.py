"""A card names the data set, configuration, split and columns that were used, and no path of the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from card_run import head_and_body, make_runs

from rlhf_zoo.record import StageRecord, read_json, write_json
from rlhf_zoo.release.card import make_card

DATA = {"repo": "maker/questions", "commit": "d" * 40, "fingerprint": "0"}
FOLDER = {"repo": None, "commit": None, "folder": "my-data", "files": "f" * 64, "fingerprint": "0"}
OWN = {
    "dataset_name": "maker/questions", "dataset_config": None, "dataset_test_split": None, "held_out_share": 0.05,
    "columns": {"prompt": "question"},
}  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("rlhf_zoo.release.card._plots", lambda *_: {})
    return make_runs(tmp_path / "runs")


def changed(runs: Path, stage: str, dataset: dict[str, Any], keys: dict[str, Any]) -> None:
    record = StageRecord(runs / stage)
    resolved = {**record.read()["resolved"], **keys}
    record.write(dataset=dataset, resolved=resolved)


def evaluated(runs: Path, **data: Any) -> None:
    path = runs / "eval" / "evaluation.json"
    write_json(path, {**read_json(path), "split": data["split"], "data": data})


def test_shares_and_columns_of_a_data_set_without_configurations(runs: Path) -> None:
    changed(runs, "ppo", DATA, OWN)
    evaluated(runs, location=DATA["repo"], revision=DATA["commit"], config=None, split="train", held_out_share=0.05)
    head, body = head_and_body(make_card(runs / "ppo"))
    [result] = head["model-index"][0]["results"]
    assert result["dataset"] == {"name": DATA["repo"], "type": DATA["repo"], "split": "train", "revision": "d" * 40}
    assert "on the `train` split but for 5% of its prompts of `maker/questions` (prompt in `question`)." in body
    assert "161 prompts of the 5% held out of the `train` split of `maker/questions`, which PPO never saw (the" in body
    assert "`prompts`" not in body and "`test`" not in body


def test_pairs_of_a_reward_model_without_configurations(runs: Path) -> None:
    keys = {**OWN, "columns": {}, "held_out_share": None, "dataset_train_split": "train_prefs",
            "dataset_test_split": "test_prefs"}  # fmt: skip
    changed(runs, "reward", DATA, keys)
    StageRecord(runs / "reward").write(reward_model={"accuracy": 0.9, "n": 10, "ci95": [0.8, 1], "split": "test_prefs"})
    head, body = head_and_body(make_card(runs / "reward"))
    dataset = head["model-index"][0]["results"][0]["dataset"]
    assert (dataset["split"], dataset.get("config")) == ("test_prefs", None)
    assert "It was trained on the `train_prefs` split of `maker/questions`." in body
    assert "The pairs are of the `test_prefs` split of `maker/questions`, which training never saw." in body


def test_a_folder_is_called_by_its_name_and_files(runs: Path) -> None:
    keys = {"dataset_name": "/home/someone/my-data", "dataset_config": None, "model_name_or_path": "/home/someone/base"}
    changed(runs, "sft", FOLDER, keys)
    head, body = head_and_body(make_card(runs / "sft"))
    assert "| data set | the folder `my-data` | files `ffffffffff` |" in body
    assert "| base model | the folder `base` | not published |" in body
    assert "It was trained on the `train` split of `my-data`." in body
    found = {one["dataset"]["split"]: one["dataset"] for one in head["model-index"][0]["results"]}
    assert found["validation"] == {"name": "my-data", "type": "my-data", "split": "validation"}


def test_a_run_of_before_reads_as_before(runs: Path) -> None:
    head, body = head_and_body(make_card(runs / "ppo"))
    [result] = head["model-index"][0]["results"]
    assert (result["dataset"]["config"], result["dataset"]["split"]) == ("prompts", "test")
    assert "It was trained on the `train` split, configuration `prompts`, of `local/tiny-world`." in body
