"""Models of public families go through every stage, as they come."""

from __future__ import annotations

import pytest
import yaml
from miniatures import FAMILIES, save
from schemas import make_recipe

from rlhf_zoo.hub.connect import Hub
from rlhf_zoo.model_files import load_tokenizer
from rlhf_zoo.models import CRITIC_DIR, critic_from, load_causal, load_classifier
from rlhf_zoo.recipes import load_recipe
from rlhf_zoo.release.card import make_card
from rlhf_zoo.runs.context import RunContext
from rlhf_zoo.stages.pipeline import run_stage
from rlhf_zoo.tokenizer import stop_ids

DIAGONAL = ["GPT-2", "Llama 3"]
LORA = {"use_peft": True, "lora_r": 2, "lora_target_modules": "all-linear"}
ADAPTED = ["GPT-2", "Qwen3-Base"]


def train(folder, name, **keys):
    family = FAMILIES[name]
    if family.template is not None:
        recipe = make_recipe(folder, "trl-lib/ultrafeedback_binarized", "conversational")
    else:
        recipe = make_recipe(folder, "trl-lib/tldr-preference", "plain")
    sft = yaml.safe_load((recipe / "sft.yaml").read_text())
    sft.pop("chat_template_path", None)
    sft["model_name_or_path"] = str(save(name, folder / "base"))
    (recipe / "sft.yaml").write_text(yaml.safe_dump(sft))
    for stage in ("sft", "reward", "ppo"):
        with (recipe / f"{stage}.yaml").open("a") as file:
            file.write(yaml.safe_dump(keys) if keys else "")
    shared = yaml.safe_load((recipe / "recipe.yaml").read_text())
    del shared["architecture"], shared["tokenizer"]
    (recipe / "recipe.yaml").write_text(yaml.safe_dump(shared))
    context = RunContext(
        recipe=load_recipe(str(recipe)), directory=folder / "run", hub=Hub("other", "http://127.0.0.1:9", "a test"),
        namespace="local", publish=False,
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


def adapted(folder, name):
    """Every stage trains an adapter on the one before, merged; what is saved loads as whole models."""
    context = train(folder, name, **LORA)
    for stage in context.recipe.stages:
        path = context.checkpoint(stage).path
        files = {file.name for file in path.iterdir()}
        assert "adapter_model.safetensors" in files and "model.safetensors" not in files, stage
        assert make_card(context.record(stage).path).is_file()
    reward = load_classifier(context.checkpoint("reward").path)
    assert reward.config.rlhf_zoo["score_std"] > 0
    critic = context.checkpoint("ppo").path / CRITIC_DIR
    assert (critic / "adapter_model.safetensors").is_file()
    critic_from(critic)


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters(tmp_path, name):
    adapted(tmp_path, name)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ADAPTED])
def test_adapters_of_every_family(tmp_path, name):
    adapted(tmp_path, name)
