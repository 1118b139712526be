"""A new stage is an entry of STAGES, a template and a YAML file: everything else of the package finds it there."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from thread_hub import ThreadHub
from toy_run import make_recipe
from toy_stage import TOY

from rlhf_zoo.cli.main import cli
from rlhf_zoo.hub.client.connect import reload_clients
from rlhf_zoo.runs.registry import STAGES

pytestmark = pytest.mark.usefixtures("quick_plots")

KEYS = {
    "max_steps": 2, "save_steps": 1, "save_strategy": "steps", "logging_steps": 1, "learning_rate": 0.01, "bf16": False,
    "per_device_train_batch_size": 4, "use_cpu": True, "max_length": 16,
}  # fmt: skip


@pytest.fixture
def hub(thread_hub: ThreadHub, tmp_path: Path) -> Iterator[ThreadHub]:
    """Commands of this process talk to it; afterwards the clients are what they were."""
    with patch.dict(os.environ, {"HF_ENDPOINT": thread_hub.url, "HF_HOME": str(tmp_path / "home")}):
        yield thread_hub
    reload_clients()


def zoo(*arguments: str) -> None:
    cli.main(list(arguments), prog_name="rlhf-zoo", standalone_mode=False)


def test_toy_stage_is_trained_carded_pushed_and_pulled(
    hub: ThreadHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(STAGES, "toy", TOY)
    monkeypatch.chdir(tmp_path)
    architecture = {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 16, "n_positions": 64}
    recipe = make_recipe(tmp_path, shared={"architecture": architecture})
    for stage in ("sft", "reward", "ppo"):
        (recipe / f"{stage}.yaml").unlink()
    (recipe / "toy.yaml").write_text(yaml.safe_dump(KEYS))

    zoo("toy", "toy", "--output_dir", "run", "--push_to_hub", "--namespace", "local")
    assert "2 of 2 checkpoints are in local/toy-toy" in capsys.readouterr().out
    zoo("card", "run")
    card = Path("run/toy/README.md").read_text()
    assert "A toy of the recipe `toy`." in card and "![Loss of the toy](plots/loss.png)" in card
    assert (
        "The toy's last loss is" in card
        and "everything except its loss" in card
        and "| step | loss | tag | commit |" in card
    )
    zoo("push", "run", "--hub", hub.url)
    zoo("pull", "local/toy-toy@best", "--output_dir", "pulled", "--hub", hub.url)
    assert json.loads(Path("pulled/rlhf_card.json").read_text())["stage"] == "toy"
    weights = Path("pulled/model.safetensors").read_bytes()
    assert weights == Path("run/toy/checkpoint-2/model.safetensors").read_bytes()
    capsys.readouterr()
    zoo("zoo", "--namespace", "local", "--json", "--hub", hub.url)
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["repo"], entry["stage"]) == ("local/toy-toy", "toy")
