"""Models with remote code are rejected unless a flag allows them, and are then published with their code."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import code_model
import pytest
import yaml
from hub_fixture import base_environment
from schemas import make_recipe
from thread_hub import ThreadHub

from rlhf_zoo.cli.main import cli
from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.connect import Hub, reload_clients
from rlhf_zoo.hub.client.refs import resolve
from rlhf_zoo.modeling.critic import CRITIC_DIR, critic_from
from rlhf_zoo.modeling.models import load_causal, load_classifier
from rlhf_zoo.modeling.remote_code import TRUST_CODE_FLAG, allow_remote_code, is_code_trusted

BASE = "maker/base"
FILES = [f"{name}_strange.py" for name in ("configuration", "modeling", "scoring")]
LORA = {"use_peft": True, "lora_r": 2, "lora_target_modules": "all-linear"}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[ThreadHub]:
    thread_hub = ThreadHub(tmp_path / "hub")
    own = {"HOME": str(tmp_path), "RLHF_ZOO_HOME": str(tmp_path / "zoo"), "RLHF_ZOO_HUB_TOKEN": thread_hub.token}
    with patch.dict(os.environ, base_environment() | own, clear=True):
        yield thread_hub
    reload_clients()
    thread_hub.close()


@pytest.fixture
def recipe(hub: ThreadHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    base = code_model.save(tmp_path / "base", marker=tmp_path / "ran")
    hub.api().create_repo(BASE)
    hub.api().upload_folder(repo_id=BASE, folder_path=base)
    shutil.rmtree(base)
    monkeypatch.chdir(tmp_path)
    return make_recipe(tmp_path, "trl-lib/ultrafeedback_binarized", "conversational", base=BASE)


def run_command(hub: ThreadHub, *words: str) -> None:
    cli.main([*words, "--hub", hub.url, "--source_hub", "none"], standalone_mode=False)


def resolve_published(hub: ThreadHub, repo: str) -> Path:
    return resolve(repo, Hub("other", hub.url, "a test", token=hub.token)).path


def test_remote_code_runs_only_with_flag_and_is_published(hub: ThreadHub, recipe: Path, tmp_path: Path) -> None:
    for words in (("recipes", "validate", "mine"), ("run", "mine")):
        with pytest.raises(ZooError, match=f"The model {BASE} needs program code of its own .* pass {TRUST_CODE_FLAG}"):
            run_command(hub, *words)
    assert not (tmp_path / "ran").exists() and not Path("runs/mine/sft").exists()
    run_command(hub, "recipes", "validate", "mine", TRUST_CODE_FLAG)
    run_command(hub, "sft", "mine", TRUST_CODE_FLAG, "--push_to_hub", "--max_steps", "1")
    assert (tmp_path / "ran").exists() and not is_code_trusted()
    remote_code = json.loads(Path("runs/mine/sft/run.json").read_text())["remote_code"]
    assert [(entry["model"], entry["commit"]) for entry in remote_code] == [(BASE, hub.api().model_info(BASE).sha)]
    assert list(remote_code[0]["files"]) == FILES

    pulled = resolve_published(hub, "local/mine-sft")
    assert [path.name for path in sorted(pulled.glob("*.py"))] == FILES
    (tmp_path / "ran").unlink()
    for load in (load_causal, load_classifier, critic_from):
        with pytest.raises(ZooError, match=f"program code of its own .* pass {TRUST_CODE_FLAG}"):
            load(pulled)
    assert not (tmp_path / "ran").exists()
    with allow_remote_code():
        assert type(load_causal(pulled)).__name__ == "StrangeForCausalLM"
        assert critic_from(pulled).config.num_labels == 1
    card = (pulled / "README.md").read_text()
    assert f"custom code of `{BASE}` at commit" in card and "trust_remote_code=True" in card
    assert json.loads((pulled / "rlhf_card.json").read_text())["remote_code"][0]["files"] == remote_code[0]["files"]


def test_plan_runs_remote_code_only_with_flag(hub: ThreadHub, recipe: Path, tmp_path: Path) -> None:
    words = ("plan", "mine", "--gpu", "cpu")
    with pytest.raises(ZooError, match=f"needs program code of its own .* pass {TRUST_CODE_FLAG} if you trust it"):
        run_command(hub, *words)
    assert not (tmp_path / "ran").exists()
    run_command(hub, *words, TRUST_CODE_FLAG)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("file", ["recipe", "sft", "ppo"])
def test_recipe_may_not_set_trust_remote_code(hub: ThreadHub, recipe: Path, file: str) -> None:
    with (recipe / f"{file}.yaml").open("a") as stream:
        stream.write("trust_remote_code: true\n")
    for words in (["run", "mine"], ["recipes", "validate", "mine"]):
        with pytest.raises(
            ZooError, match=f"trust_remote_code, which is not allowed in a recipe.* pass {TRUST_CODE_FLAG}"
        ):
            cli.main(words, standalone_mode=False)


def test_remote_code_of_another_repository_is_rejected(tmp_path: Path) -> None:
    base = code_model.save(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config["auto_map"]["AutoModelForCausalLM"] = "who/knows--modeling_strange.StrangeForCausalLM"
    (base / "config.json").write_text(json.dumps(config))
    with (
        allow_remote_code(),
        pytest.raises(ZooError, match="takes code from another repository, who/knows, without naming a commit"),
    ):
        load_causal(base)


@pytest.mark.full
@pytest.mark.parametrize("lora", [False, True])
def test_every_stage_runs_with_remote_code(hub: ThreadHub, recipe: Path, lora: bool) -> None:
    for stage in ("sft", "reward", "ppo") if lora else ():
        with (recipe / f"{stage}.yaml").open("a") as file:
            file.write(yaml.safe_dump(LORA | ({"push_merged": True} if stage == "sft" else {})))
    page = (Path(__file__).parents[2] / "docs/models.md").read_text(encoding="utf-8")
    assert f"rlhf-zoo run my-recipe {TRUST_CODE_FLAG}\n" in page
    run_command(hub, "run", "mine", TRUST_CODE_FLAG, "--push_to_hub")
    run_command(hub, "trace", "runs/mine", "--prompt", "how", TRUST_CODE_FLAG)
    for repo, load in (("local/mine-reward", load_classifier), ("local/mine-ppo", load_causal)):
        pulled = resolve_published(hub, repo)
        with allow_remote_code():
            assert load(pulled)
            if load is load_causal:
                assert critic_from(pulled / CRITIC_DIR)
        with pytest.raises(ZooError, match=f"pass {TRUST_CODE_FLAG}"):
            load(pulled)
    with pytest.raises(ZooError, match=f"pass {TRUST_CODE_FLAG}"):
        run_command(hub, "trace", "runs/mine", "--prompt", "how")
