"""SFT rows that max_length truncates: counted beforehand, in the log, run.json, summary.json and on the card."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from toy_run import make_context, make_recipe, save_stage, trained_policy
from trainer_fixture import CHAT, make_tokenizer

from rlhf_zoo.fileio import read_json
from rlhf_zoo.hub.client.connect import DEFAULT_HUB
from rlhf_zoo.pipeline.stages import sft
from rlhf_zoo.pipeline.stages.summary import write_summary
from rlhf_zoo.publishing.cards.card import make_card
from rlhf_zoo.runs.checks.models import NamedModel, count_rows_cut_by_sft
from rlhf_zoo.runs.data.cut_rows import count_cut_rows


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    make_recipe(tmp_path)
    save_stage(tmp_path, "sft", trained_policy(), make_tokenizer()).rename(tmp_path / "base")
    (tmp_path / "run").rename(tmp_path / "not-a-run")
    return tmp_path


@pytest.mark.usefixtures("quick_plots")
def test_rows_truncated_by_max_length_are_counted_everywhere(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One row whose prompt fills it, two whose answers pass it, one that just fits with its end, and two short ones."""
    rows = [("ab" * 40, "cd"), ("ab", "cd" * 20), ("abab", "c" * 12), ("abab", "c" * 11), ("ab", "cd"), ("ab", "cd")]
    (folder / "long").mkdir()
    lines = [json.dumps({"prompt": prompt, "completion": completion}) for prompt, completion in rows]
    (folder / "long" / "train.jsonl").write_text("\n".join(lines))
    sft_keys = {
        "model_name_or_path": str(folder / "base"), "dataset_name": str(folder / "long"), "dataset_config": None,
        "dataset_test_split": None, "max_length": 16, "max_steps": 1, "use_cpu": True, "eval_strategy": "no",
    }  # fmt: skip
    context = replace(make_context(folder), flags={"sft": sft_keys})
    counted = {"max_length": 16, "rows": 6, "cut": 3, "without_answer": 1}
    settings, base = context.settings("sft"), NamedModel("model_name_or_path", "base", folder / "base")
    foreseen = count_rows_cut_by_sft(context.shared, settings, base, DEFAULT_HUB)
    assert foreseen is not None and asdict(foreseen) == counted, "validate says it beforehand"
    assert sft.run(context)
    assert "max_length, 16, cuts 3 of 6 rows; 1 of them keep no token of the answer." in caplog.text
    assert "1 of 6 rows are left out, because max_length, 16, leaves no token of their answers." in caplog.text
    record = context.record("sft")
    assert record.read()["left_out"] == {"max_length": 1} and record.read()["cut_rows"] == counted
    assert read_json(write_summary(context, any_stage_ran=True))["cut_rows"] == counted
    make_card(record.path)
    assert (
        "truncated 3 of the 6 training rows**; 1 of them lost the whole answer."
        in (record.path / "README.md").read_text()
    )


@pytest.mark.parametrize(
    ("keys", "counted"),
    [
        ({}, (3, 1)),
        ({"truncation_mode": "keep_end"}, (3, 0)),
        ({"packing": True}, (3, 1)),
        ({"packing": True, "packing_strategy": "wrapped"}, None),
        ({"max_length": None}, None),
        ({"max_length": 64}, (1, 1)),
    ],
)
def test_count_cut_rows_matches_trainer(keys: dict[str, Any], counted: tuple[int, int] | None) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT
    arguments = {"max_length": 16, "packing": False, "packing_strategy": "bfd", "truncation_mode": "keep_start"} | keys
    texts = [("ab" * 40, "cd"), ("ab", "cd" * 10), ("abab", "c" * 16), ("ab", "cd")]
    turns = [{"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": c}]} for p, c in texts]
    for rows in (turns, [{"prompt": p, "completion": c} for p, c in texts]):
        trainer = SimpleNamespace(**arguments)
        result = count_cut_rows(datasets.Dataset.from_list(rows), tokenizer, trainer, text_column="text")
        assert (result and (result.cut, result.without_answer)) == counted
