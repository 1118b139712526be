"""Models of public families go through every stage, as they come."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from miniatures import FAMILIES, save
from schemas import make_recipe

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.connect import Hub
from rlhf_zoo.model_files import load_tokenizer
from rlhf_zoo.models import CRITIC_DIR, critic_from, load_causal, load_classifier
from rlhf_zoo.recipes import load_recipe
from rlhf_zoo.release.adapters import check_plan
from rlhf_zoo.release.card import make_card
from rlhf_zoo.release.sender import Sender
from rlhf_zoo.runs.context import RunContext
from rlhf_zoo.stage import STAGES
from rlhf_zoo.stages.pipeline import run_stage
from rlhf_zoo.tokenizer import stop_ids

pytestmark = pytest.mark.usefixtures("pictures")

DIAGONAL = ["Llama 3"]  # GPT-2: test_source_hub.py
ADAPTED = ["Qwen3-Base"]
LORA = {"use_peft": True, "lora_r": 2, "lora_target_modules": "all-linear"}


def train(folder, name, *, base=None, hub=None, stages=STAGES, **keys):
    family = FAMILIES[name]
    if family.template is not None:
        recipe = make_recipe(folder, "trl-lib/ultrafeedback_binarized", "conversational")
    else:
        recipe = make_recipe(folder, "trl-lib/tldr-preference", "plain")
    sft = yaml.safe_load((recipe / "sft.yaml").read_text())
    sft.pop("chat_template_path", None)
    sft["model_name_or_path"] = base or str(save(name, folder / "base"))
    (recipe / "sft.yaml").write_text(yaml.safe_dump(sft))
    for stage in stages:
        with (recipe / f"{stage}.yaml").open("a") as file:
            file.write(yaml.safe_dump(keys) if keys else "")
    shared = yaml.safe_load((recipe / "recipe.yaml").read_text())
    del shared["architecture"], shared["tokenizer"]
    (recipe / "recipe.yaml").write_text(yaml.safe_dump(shared))
    context = RunContext(
        recipe=load_recipe(str(recipe)), directory=folder / "run",
        hub=hub or Hub("other", "http://127.0.0.1:9", "a test"), namespace="local", publish=False,
    )  # fmt: skip
    for stage in [*context.recipe.stages, "eval"]:
        assert run_stage(context, stage), stage
    for stage in context.recipe.stages:
        assert load_tokenizer(context.checkpoint(stage).path).pad_token == family.pad, stage
    path = context.checkpoint("ppo").path
    tokenizer = load_tokenizer(path)
    stops = tokenizer.convert_ids_to_tokens(stop_ids(load_causal(path), tokenizer))
    assert {*stops} == {*family.stops}, "what ended a completion in training ends it wherever the model is loaded"
    return context


@pytest.mark.parametrize("name", DIAGONAL)
def test_diagonal(tmp_path, name):
    train(tmp_path, name)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in DIAGONAL])
def test_every_family(tmp_path, name):
    train(tmp_path, name)


def adapted(folder, name, **given):
    """Every stage trains an adapter on the one before, merged; what is saved loads as whole models."""
    context = train(folder, name, **LORA, **given)
    for stage in context.recipe.stages:
        path = context.checkpoint(stage).path
        files = {file.name for file in path.iterdir()}
        assert "adapter_model.safetensors" in files and "model.safetensors" not in files, stage
        assert make_card(context.record(stage).path).is_file()
    reward = load_classifier(context.checkpoint("reward").path)
    assert reward.config.rlhf_zoo["score_std"] > 0
    shutil.rmtree(context.checkpoint("sft").path / "merged")
    with pytest.raises(
        ZooError, match="/merged, which is gone: restore it, or have `rlhf-zoo eval` of its recipe merge"
    ):
        load_causal(context.checkpoint("ppo").path)
    assert not run_stage(context, "eval"), "it was done, and merges all the same what the policy lies on"
    load_causal(context.checkpoint("ppo").path)
    critic = context.checkpoint("ppo").path / CRITIC_DIR
    assert (critic / "adapter_model.safetensors").is_file()
    critic_from(critic)
    return context


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters(tmp_path, name):
    adapted(tmp_path, name)


@pytest.mark.full
@pytest.mark.parametrize("stages", [("sft",), ("reward",), ("sft", "reward"), ("reward", "ppo")])
def test_adapters_in_some_stages(tmp_path, stages):
    context = train(tmp_path, "Qwen2.5", stages=stages, **LORA)
    for stage in context.recipe.stages:
        assert (context.checkpoint(stage).path / "adapter_config.json").is_file() == (stage in stages)


@pytest.mark.full
def test_adapters_are_published_on_their_bases(tmp_path, thread_hub):
    """What comes back from the Hub is what was trained: base, SFT adapter and its merged branch, reward model, PPO."""
    api = thread_hub.api()
    api.create_repo("local/base")
    api.upload_folder(repo_id="local/base", folder_path=save("Qwen3-Base", tmp_path / "saved"))
    hub = Hub("other", thread_hub.url, "a test")
    context = adapted(tmp_path, "Qwen3-Base", base="local/base", hub=hub, push_merged=True)
    for stage in context.recipe.stages:
        check_plan(context, stage)
    Sender(replace(context, publish=True), stages=("sft", "reward", "ppo")).send_all()
    merged = next(ref.target_commit for ref in api.list_repo_refs("local/mine-sft").branches if ref.name == "merged")
    ids = torch.tensor([[3, 4, 5]])
    for stage, load in (("sft", load_causal), ("reward", load_classifier), ("ppo", load_causal)):
        there = Path(api.snapshot_download(f"local/mine-{stage}", revision="best"))
        said = json.loads((there / "adapter_config.json").read_text())
        wanted = ("local/base", api.model_info("local/base").sha) if stage == "sft" else ("local/mine-sft", merged)
        assert (said["base_model_name_or_path"], said["revision"]) == wanted
        theirs, ours = load(f"local/mine-{stage}", revision="best"), load(context.checkpoint(stage).path)
        torch.testing.assert_close(theirs(ids).logits, ours(ids).logits, atol=1e-5, rtol=0)
        code = re.search(r"```python\n(.*?)```", (there / "README.md").read_text(), re.DOTALL)[1]
        found = {}
        exec(code, found)
        torch.testing.assert_close(found["model"](ids).logits, ours(ids).logits, atol=1e-5, rtol=0)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ADAPTED])
def test_adapters_of_every_family(tmp_path, name):
    adapted(tmp_path, name)
