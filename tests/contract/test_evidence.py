"""The figures in the docs are those of the committed JSON, and the JSON has what the docs claim to have run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def evidence():
    spec = importlib.util.spec_from_file_location("evidence", ROOT / "benchmarks" / "evidence.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["evidence"] = module
    spec.loader.exec_module(module)
    return module


def test_every_table_in_the_docs_is_rendered_from_the_json(evidence):
    for name in evidence.DOCUMENTS:
        text = (ROOT / name).read_text()
        assert "<!-- evidence:" in text, name
        assert text == evidence.rendered(text), f"{name}: run `python benchmarks/evidence.py --render`"


def test_the_committed_runs_are_those_that_the_experiments_ask_for(evidence):
    for experiment in evidence.EXPERIMENTS:
        runs = evidence.load(experiment.name)
        assert [run["seed"] for run in runs] == list(experiment.seeds), experiment.name
        for run in runs:
            assert run["command"] == " ".join(evidence.command(experiment, run["seed"], "$RLHF_ZOO_DATA"))
            assert run["recipe"] == experiment.recipe
            assert run["win_rate"]["n"] >= 500


def test_rendering_changes_with_the_json(evidence, monkeypatch):
    before = evidence.table("tiny-world")
    runs = evidence.load("tiny-world")
    runs[0]["ppo"]["reward"] += 1
    monkeypatch.setattr(evidence, "load", lambda name: runs if name == "tiny-world" else [])
    assert evidence.table("tiny-world") != before


def test_the_figures_that_the_recipes_promise(evidence):
    for run in evidence.load("tiny-world"):
        assert run["win_rate"]["value"] >= 0.75
        assert run["win_rate"]["ci95"][0] >= 0.70
    for run in evidence.load("product-remarks"):
        assert run["reward_model"]["accuracy"] >= 0.90
        assert run["win_rate"]["value"] >= 0.90
        assert 2 <= run["ppo"]["kl"] <= 8
        assert run["ppo"]["distinct_2"] >= 0.6 * run["sft"]["distinct_2"]
