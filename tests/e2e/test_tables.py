"""Models of public families and data of public schemas go through every stage, the evaluation, card and comparison."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from miniatures import FAMILIES, save
from schemas import SCHEMAS, make_recipe

from rlhf_zoo.chat import Chat
from rlhf_zoo.comparison import Comparison
from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.connect import Hub
from rlhf_zoo.model_files import load_tokenizer
from rlhf_zoo.models import CRITIC_DIR, critic_from, load_causal, load_classifier
from rlhf_zoo.recipes import load_recipe
from rlhf_zoo.release.adapters import check_plan
from rlhf_zoo.release.card import CARD_FILE, make_card
from rlhf_zoo.release.sender import Sender
from rlhf_zoo.runs.context import RunContext
from rlhf_zoo.stage import STAGES
from rlhf_zoo.stages.pipeline import run_stage
from rlhf_zoo.tokenizer import stop_ids

pytestmark = pytest.mark.usefixtures("pictures")

#: Each family and each schema and form once, as somebody would join them.
DIAGONAL = {
    "Qwen2.5": ("openai/gsm8k", "conversational"),
    "Qwen3-Base": ("openai/gsm8k", "plain"),
    "Qwen3": ("trl-lib/ultrafeedback_binarized", "conversational"),
    "Llama 3": ("Anthropic/hh-rlhf", "conversational"),
    "Gemma 2": ("trl-lib/tldr-preference", "conversational"),
    "Gemma 3": ("trl-lib/tldr", "conversational"),
    "Mistral": ("trl-lib/tldr-preference", "plain"),
    "Pythia": ("Anthropic/hh-rlhf", "plain"),
    "GPT-2": ("stanfordnlp/imdb", "plain"),
    "OPT": ("trl-lib/tldr", "plain"),
    "SmolLM2": ("trl-lib/ultrafeedback_binarized", "conversational"),
}
ADAPTED = ["Qwen3-Base"]
LORA = {"use_peft": True, "lora_r": 2, "lora_target_modules": "all-linear"}


def train(folder, schema, form, *, hub=None, **given):
    """Every stage that the schema has data for, and the evaluation."""
    context = RunContext(
        recipe=load_recipe(str(make_recipe(folder, schema, form, **given))), directory=folder / "run",
        hub=hub or Hub("other", "http://127.0.0.1:9", "a test"), namespace="local", publish=False,
    )  # fmt: skip
    for stage in [*context.recipe.stages, "eval"]:
        assert run_stage(context, stage), stage
    return context


def family(folder, name, *, schema=None, base=None, stages=STAGES, hub=None, **keys):
    """The same, beginning with a model of the family; keys: of these stages."""
    talks = FAMILIES[name].template is not None
    usual = ("trl-lib/ultrafeedback_binarized", "conversational") if talks else ("trl-lib/tldr-preference", "plain")
    base = base or save(name, folder / "base")
    context = train(folder, *(schema or usual), base=base, hub=hub, **dict.fromkeys(stages, keys))
    for stage in context.recipe.stages:
        assert load_tokenizer(context.checkpoint(stage).path).pad_token == FAMILIES[name].pad, stage
    path = context.checkpoint("ppo").path
    tokenizer = load_tokenizer(path)
    stops = tokenizer.convert_ids_to_tokens(stop_ids(load_causal(path), tokenizer))
    assert {*stops} == {*FAMILIES[name].stops}, (
        "what ends a completion in training ends it wherever the model is loaded"
    )
    return context


def check_shown(context, form):
    """What people, judges and cards see is plain words, and what the models read is not."""
    for stage in context.recipe.stages:
        make_card(context.record(stage).path)
    paths = {stage: context.checkpoint(stage).path for stage in context.recipe.stages}
    comparison = Comparison.load(ppo=paths["ppo"], sft=paths["sft"], reward=paths.get("reward"), device="cpu")
    asked = "how is item 3"
    found = comparison.compare(asked, max_new_tokens=4)
    assert found.prompt == asked
    talks = Chat.of(comparison.tokenizer) is not None
    assert talks == (form == "conversational")
    assert (comparison.tokens_of(asked) > len(comparison.tokenizer(asked)["input_ids"])) == talks
    lines = (context.record("eval").path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    special = [token for token in comparison.tokenizer.all_special_tokens if token.startswith("<")]
    assert not any(token in json.loads(line)["prompt"] for line in lines for token in special)


def test_the_diagonal_is_one():
    assert DIAGONAL.keys() == FAMILIES.keys() and {*DIAGONAL.values()} == SCHEMAS.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_diagonal(tmp_path, name):
    check_shown(family(tmp_path, name, schema=DIAGONAL[name]), DIAGONAL[name][1])


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(tmp_path, name):
    family(tmp_path, name)


@pytest.mark.full
@pytest.mark.parametrize(("schema", "form"), SCHEMAS)
def test_every_schema(tmp_path, schema, form):
    check_shown(train(tmp_path, schema, form), form)


def adapted(folder, name, **given):
    """Every stage trains an adapter on the one before, merged; what is saved loads as whole models."""
    context = family(folder, name, **LORA, **given)
    for stage in context.recipe.stages:
        path = context.checkpoint(stage).path
        files = {file.name for file in path.iterdir()}
        assert "adapter_model.safetensors" in files and "model.safetensors" not in files, stage
        assert not [*context.record(stage).path.rglob("README.md")], "trl's and peft's templates"
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
    context = family(tmp_path, "Qwen2.5", stages=stages, **LORA)
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
    second_namespaces(context, api)


def second_namespaces(context, api):
    """A run that was evaluated after it was sent goes to two more namespaces and back, with its figures.

    No tag of the first namespace moves, though the merged model, which later adapters name, has a new card there.
    """
    stages = context.recipe.stages
    shutil.rmtree(context.record("eval").path)
    assert run_stage(context, "eval")
    Sender(replace(context, publish=True), stages=tuple(stages)).send_all()

    def tags(namespace):
        refs = {stage: api.list_repo_refs(f"{namespace}/mine-{stage}").tags for stage in stages}
        return {(stage, ref.name): ref.target_commit for stage in stages for ref in refs[stage] if ref.name != "best"}

    def cards(namespace):
        files = [api.hf_hub_download(f"{namespace}/mine-{stage}", CARD_FILE, revision="best") for stage in stages]
        return {card["stage"]: card for card in (json.loads(Path(file).read_text()) for file in files)}

    before, figures = tags("local"), {stage: card["evaluation"] for stage, card in cards("local").items()}
    assert figures["ppo"]["win_rate"]["n"] > 0
    for namespace in ("second", "third", "local", "second"):
        Sender(replace(context, publish=True, namespace=namespace), stages=tuple(stages), again=True).send_all()
        there = cards(namespace)
        assert {stage: card["evaluation"] for stage, card in there.items()} == figures
        assert there["ppo"]["parents"]["sft"]["repo"] == f"{namespace}/mine-sft"
    assert tags("local") == before and tags("second").keys() == tags("third").keys() == before.keys()


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ADAPTED])
def test_adapters_of_every_family(tmp_path, name):
    adapted(tmp_path, name)
