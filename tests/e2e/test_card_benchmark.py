"""A data set with eval.yaml on a Hub is a benchmark: the run records its tasks, and the card reports the results."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from huggingface_hub import parse_eval_result_entries
from thread_hub import ThreadHub
from toy_run import make_context, make_recipe, save_start

from rlhf_zoo.hub.client.connect import DEFAULT_HUB
from rlhf_zoo.pipeline.stages import evaluate, ppo
from rlhf_zoo.publishing.cards.card import make_card
from rlhf_zoo.runs.dataset import data_source

pytestmark = pytest.mark.usefixtures("quick_plots")

EVAL = {
    "name": "Toy",
    "description": "Letters.",
    "evaluation_framework": "inspect-ai",
    "tasks": [{"id": "toy_letters", "config": "prompts", "split": "test"}, {"id": "lines", "config": "lines"}],
}


@pytest.fixture
def upload_data(thread_hub: ThreadHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that uploads the toy's data with this text of eval.yaml, and returns the commit."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", thread_hub.url)
    evaluation = {"judge": "toy_run:judge", "judge_name": "length", "prompts": 4, "samples": 2}
    make_recipe(tmp_path, shared={"evaluation": evaluation, "dataset_name": "local/toy-data"})
    api = thread_hub.api()
    api.create_repo("local/toy-data", repo_type="dataset")

    def upload(eval_yaml: str | None) -> str:
        if eval_yaml is not None:
            (tmp_path / "data" / "eval.yaml").write_text(eval_yaml)
        return api.upload_folder(repo_id="local/toy-data", repo_type="dataset", folder_path=tmp_path / "data").oid

    return upload


def test_card_writes_results_for_benchmark_data_set(upload_data: Any, tmp_path: Path) -> None:
    commit = upload_data(yaml.safe_dump(EVAL))
    save_start(tmp_path)
    context = dataclasses.replace(make_context(tmp_path), hub=DEFAULT_HUB)
    assert ppo.run(context)
    evaluate.run(context)
    stage = make_card(tmp_path / "run" / "ppo").parent
    dataset = json.loads((stage / "run.json").read_text())["dataset"]
    assert (dataset["repo"], dataset["commit"]) == ("local/toy-data", commit)
    assert dataset["benchmark"] == {"name": "Toy", "tasks": EVAL["tasks"]}
    head = yaml.safe_load((stage / "README.md").read_text().split("---\n")[1])
    assert head["model-index"][0]["results"][0]["dataset"]["revision"] == commit
    (entry,) = parse_eval_result_entries(yaml.safe_load((stage / ".eval_results" / "toy-data.yaml").read_text()))
    figures = json.loads((tmp_path / "run" / "eval" / "evaluation.json").read_text())
    assert (entry.dataset_id, entry.task_id, entry.dataset_revision) == ("local/toy-data", "toy_letters", commit)
    assert entry.value == figures["ppo"]["judge"]["value"] and entry.notes.startswith("judge (length), 95% interval")


def test_data_without_valid_eval_yaml_is_no_benchmark(upload_data: Any, tmp_path: Path) -> None:
    invalid = (None, "tasks: [", "name: Toy\n", "[1, 2]", "tasks: 3\n", "tasks: [{config: x}, y, null]\n")
    commits = [upload_data(text) for text in invalid]
    revisions = [*commits, None, "0" * 40]
    lineages = []
    for revision in revisions:
        flags = {"recipe": {"dataset_name": "local/toy-data", "dataset_revision": revision}}
        source = data_source(dataclasses.replace(make_context(tmp_path), hub=DEFAULT_HUB, flags=flags))
        assert source.revision == source.lineage["commit"] == (revision or commits[-1])
        lineages.append(source.lineage)
    assert not any(lineage.get("benchmark") for lineage in lineages)
    # The fingerprint contains the requested revision, not the commit that it resolved to.
    assert len({lineage["fingerprint"] for lineage in lineages}) == len(revisions)
