"""Differences between two runs: weights, files, metrics, settings and versions."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlhf_zoo.errors import ZooError
from rlhf_zoo.pipeline.inspect.differences import (
    compare_files,
    compare_metrics,
    compare_settings,
    compare_versions,
    compare_weights,
)

WEIGHTS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    "n": torch.tensor(3),
}


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Path, Path]:
    """Two equal checkpoints with a critic."""
    for side in ("published", "here"):
        (tmp_path / side / "critic").mkdir(parents=True)
        save_file(WEIGHTS, tmp_path / side / "model.safetensors")
        save_file(WEIGHTS, tmp_path / side / "critic" / "model.safetensors")
        (tmp_path / side / "config.json").write_text('{"layers": 2, "transformers_version": "5"}')
    return tmp_path / "published", tmp_path / "here"


def test_adapter_base_name_and_module_order_are_ignored(sides):
    for side, base in zip(sides, ("local/toy-sft", "/home/me/runs/sft/checkpoint-4"), strict=True):
        names = ["q_proj", "v_proj"][:: 1 if base.startswith("/") else -1]
        config = {"base_model_name_or_path": base, "revision": None if base.startswith("/") else "a" * 40, "r": 4}
        config["target_modules"] = names
        (side / "adapter_config.json").write_text(json.dumps(config))
    assert compare_files(*sides) == []
    (sides[1] / "adapter_config.json").write_text(json.dumps({**config, "r": 8}))
    assert compare_files(*sides) == [{"file": "adapter_config.json", "problem": "r differs"}]


def test_equal_checkpoints_have_no_differences(sides):
    rows = compare_weights(*sides)
    assert [(row["file"], row["tensors"], row["differing"], row["problem"]) for row in rows] == [
        ("critic/model.safetensors", 3, 0, None), ("model.safetensors", 3, 0, None),
    ]  # fmt: skip
    assert compare_files(*sides) == []


def test_compare_weights_names_worst_tensor(sides):
    changed = {"a": WEIGHTS["a"].clone(), "b": WEIGHTS["b"].clone(), "n": WEIGHTS["n"]}
    changed["a"][1, 2] += 0.5
    changed["b"][0] += 0.25
    save_file(changed, sides[1] / "critic" / "model.safetensors")
    critic, policy = compare_weights(*sides)
    assert policy["differing"] == 0
    assert critic == {
        "file": "critic/model.safetensors", "tensors": 3, "differing": 2, "max_abs": 0.5, "max_rel": 0.125,
        "worst": "a", "problem": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("a", "b", "far"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), 0.0),  # other bits, the same number
        (torch.tensor([1.0]), torch.nextafter(torch.tensor([1.0]), torch.tensor(2.0)), 2.0**-23),
        (torch.tensor([math.nan, 1.0]), torch.tensor([0.0, 1.0]), None),
        (torch.tensor([math.inf]), torch.tensor([1.0]), None),
    ],
)
def test_compare_weights_detects_smallest_difference(sides, a, b, far):
    save_file({"a": a}, sides[0] / "model.safetensors")
    save_file({"a": a}, sides[1] / "model.safetensors")
    assert compare_weights(*sides)[1]["differing"] == 0, "the same NaN is none"
    save_file({"a": b}, sides[1] / "model.safetensors")
    row = compare_weights(*sides)[1]
    assert (row["differing"], row["worst"], row["max_abs"]) == (1, "a", far)


def test_compare_weights_reports_shapes_names_and_missing_files(sides):
    save_file({**WEIGHTS, "a": torch.zeros(3, 2), "more": torch.zeros(1)}, sides[1] / "model.safetensors")
    (sides[1] / "critic" / "model.safetensors").unlink()
    critic, policy = compare_weights(*sides)
    assert critic["problem"] == "is missing here"
    assert (policy["differing"], policy["problem"]) == (2, "a is float32[2, 3] and float32[3, 2]")
    save_file({**WEIGHTS, "more": torch.zeros(1)}, sides[1] / "model.safetensors")
    assert compare_weights(*sides)[1]["problem"] == "more is only here"
    (sides[0] / "model.safetensors").write_bytes(b"torn")
    assert compare_weights(*sides)[1]["problem"].startswith("cannot be read (")


def test_compare_files_reports_config_and_tokenizer_differences(sides):
    published, here = sides
    (here / "config.json").write_text('{"transformers_version": "6", "layers": 2}')  # the release is told elsewhere
    assert compare_files(published, here) == []
    (here / "config.json").write_text('{"layers": 3}')
    (published / "tokenizer.json").write_text("{}")
    (published / "merges.txt").write_text("a")
    (here / "merges.txt").write_text("bb")
    for beside in ("README.md", "rlhf_card.json", "metrics.jsonl", "recipe.json"):
        (published / beside).write_text("of the run")
    assert compare_files(published, here) == [
        {"file": "config.json", "problem": "layers differs"},
        {"file": "merges.txt", "problem": "has 1 bytes published and 2 here, with different content"},
        {"file": "tokenizer.json", "problem": "is missing here"},
    ]


ROWS = [{"step": 1, "time": "a", "loss": 1.0, "kl": None}, {"step": 2, "loss": 0.5}, {"step": 2, "eval_loss": 3.0}]


def test_compare_metrics_ignores_times():
    here = [{**row, "time": "b", "perf/seconds": 7.0, "eval_runtime": 1.0} for row in json.loads(json.dumps(ROWS))]
    report = compare_metrics(ROWS, [*here, {"step": 3, "loss": 9.0}], step=2)
    assert report == {"rows": 3, "rows_here": 3, "problem": None, "columns": 3, "differing": []}


def test_compare_metrics_reports_differing_columns():
    published = [{"step": 0, "eval_kl": 1.0}, *ROWS, {"step": 2, "eval_kl": 1.0}]
    here = [{"step": 0}, {"step": 1, "loss": 1.0, "kl": 0.5}, {"step": 2, "loss": 0.75}, {"step": 2}, {"step": 2}]
    report = compare_metrics(published, here, step=2)
    assert report["differing"] == [
        {"column": "eval_kl", "rows": 2, "of": 2, "max_abs": None, "first_step": 0},
        {"column": "kl", "rows": 1, "of": 1, "max_abs": None, "first_step": 1},
        {"column": "loss", "rows": 1, "of": 2, "max_abs": 0.25, "first_step": 2},
        {"column": "eval_loss", "rows": 1, "of": 1, "max_abs": None, "first_step": 2},
    ]


@pytest.mark.parametrize("value", ["much", None, True, 10**400, [1.0], {"a": 1}])
def test_compare_metrics_has_no_distance_for_non_numbers(value):
    (row,) = compare_metrics([{"step": 1, "loss": value}], [{"step": 1, "loss": 1.0}], step=1)["differing"]
    assert (row["rows"], row["max_abs"]) == (1, None)


def test_compare_metrics_reports_mismatched_steps():
    here = [ROWS[0], {"step": 3, "loss": 0.5}]
    assert compare_metrics(ROWS, here, step=9)["problem"] == "row 2 has step 2 in the published metrics and step 3 here"
    assert (
        compare_metrics(ROWS, ROWS[:2], step=9)["problem"]
        == "row 3 has step 2 in the published metrics and no step here"
    )
    assert (
        compare_metrics(ROWS[:1], ROWS, step=9)["problem"]
        == "row 2 has no step in the published metrics and step 2 here"
    )
    assert compare_metrics(ROWS[:2], ROWS, step=2)["problem"] is None, "logged after the checkpoint was sent"
    assert compare_metrics(ROWS, ROWS[:2], step=2)["problem"] is not None


def test_compare_settings_and_versions_list_differences():
    a = {"seed": 1, "recipe": {"seed": 1, "corpus": "x"}, "lr": 1.0}
    b = {"seed": 2, "recipe": {"seed": 1, "corpus": "y"}, "lr": 1, "more": 0}
    assert compare_settings(a, b) == [
        {"key": "more", "published": None, "here": 0},
        {"key": "recipe.corpus", "published": "x", "here": "y"},
        {"key": "seed", "published": 1, "here": 2},
    ]
    assert compare_settings(a, a) == []
    assert compare_versions({"torch": "1", "trl": "2"}, {"torch": "1", "cpu": "AVX512", "trl": "3"}) == [
        {"name": "cpu", "published": None, "here": "AVX512"}, {"name": "trl", "published": "2", "here": "3"},
    ]  # fmt: skip


def test_error_text_escapes_control_characters():
    assert str(ZooError("No key \x1b[2Jok\nnext")) == "No key \\x1b[2Jok\nnext"
