"""Every stage, the evaluation, card and comparison work with public model families and data schemas."""

import json
import shutil

import pytest
from miniatures import FAMILIES, save
from schemas import SCHEMAS, make_recipe

from rlhf_zoo.app.engine import Comparison
from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.connect import Hub
from rlhf_zoo.modeling.chat_template import ChatSettings
from rlhf_zoo.modeling.critic import CRITIC_DIR, critic_from
from rlhf_zoo.modeling.loading import load_tokenizer
from rlhf_zoo.modeling.models import load_causal, load_classifier
from rlhf_zoo.modeling.special_tokens import stop_ids
from rlhf_zoo.pipeline.run_recipe import run_stage
from rlhf_zoo.publishing.cards.card import make_card
from rlhf_zoo.runs.context import RunContext
from rlhf_zoo.runs.recipe import load_recipe
from rlhf_zoo.runs.registry import STAGES

pytestmark = pytest.mark.usefixtures("quick_plots")

#: Each family with a plausible schema and form; every schema and form occurs.
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
WITH_ADAPTERS = ["Qwen3-Base"]
#: Families in the long tier only: test_smoke.py or `test_family_runs_every_stage_with_adapters` also runs all their
#: stages, or another family here is similar.
LONG_TIER = {"Qwen2.5", "Qwen3-Base", "Gemma 2", "Pythia", "GPT-2", "SmolLM2"}
LORA = {"use_peft": True, "lora_r": 2, "lora_target_modules": "all-linear"}


def train_all_stages(folder, schema, form, *, hub=None, **options):
    """Runs every stage that the schema has data for, and the evaluation."""
    context = RunContext(
        recipe=load_recipe(str(make_recipe(folder, schema, form, **options))), directory=folder / "run",
        hub=hub or Hub("other", "http://127.0.0.1:9", "a test"), namespace="local", publish=False,
    )  # fmt: skip
    for stage in [*context.recipe.stages, "eval"]:
        assert run_stage(context, stage), stage
    return context


def train_family(folder, name, *, schema=None, base=None, stages=STAGES, hub=None, **keys):
    """Does the same from a model of the family. keys: Keys of the stages `stages`."""
    is_chat = FAMILIES[name].template is not None
    default = ("trl-lib/ultrafeedback_binarized", "conversational") if is_chat else ("trl-lib/tldr-preference", "plain")
    base = base or save(name, folder / "base")
    context = train_all_stages(folder, *(schema or default), base=base, hub=hub, **dict.fromkeys(stages, keys))
    for stage in context.recipe.stages:
        assert load_tokenizer(context.checkpoint(stage).path).pad_token == FAMILIES[name].pad, stage
    path = context.checkpoint("ppo").path
    tokenizer = load_tokenizer(path)
    stops = tokenizer.convert_ids_to_tokens(stop_ids(load_causal(path), tokenizer))
    assert {*stops} == {*FAMILIES[name].stops}, "a loaded model stops at the tokens that end completions in training"
    return context


def assert_plain_text_shown(context, form):
    """Checks that samples and comparisons show plain text, while the models read the chat template."""
    for stage in context.recipe.stages:
        make_card(context.record(stage).path)
    paths = {stage: context.checkpoint(stage).path for stage in context.recipe.stages}
    comparison = Comparison.load(ppo=paths["ppo"], sft=paths["sft"], reward=paths.get("reward"), device="cpu")
    prompt = "how is item 3"
    assert comparison.compare(prompt, max_new_tokens=4).prompt == prompt
    is_chat = ChatSettings.of(comparison.tokenizer) is not None
    assert is_chat == (form == "conversational")
    assert (comparison.count_tokens(prompt) > len(comparison.tokenizer(prompt)["input_ids"])) == is_chat
    lines = (context.record("eval").path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    special = [token for token in comparison.tokenizer.all_special_tokens if token.startswith("<")]
    assert not any(token in json.loads(line)["prompt"] for line in lines for token in special)


def test_diagonal_covers_every_family_and_schema():
    assert DIAGONAL.keys() == FAMILIES.keys() and {*DIAGONAL.values()} == SCHEMAS.keys()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in LONG_TIER else []) for name in FAMILIES]
)
def test_family_and_schema_run_every_stage(tmp_path, name):
    assert_plain_text_shown(train_family(tmp_path, name, schema=DIAGONAL[name]), DIAGONAL[name][1])


def train_adapters(folder, name, **options):
    """Trains an adapter in every stage, on the merged model of the stage before, and loads the saved adapters."""
    context = train_family(folder, name, **LORA, **options)
    for stage in context.recipe.stages:
        path = context.checkpoint(stage).path
        files = {file.name for file in path.iterdir()}
        assert "adapter_model.safetensors" in files and "model.safetensors" not in files, stage
        assert not [*context.record(stage).path.rglob("README.md")], "the model cards of trl and peft are not kept"
        assert make_card(context.record(stage).path).is_file()
    reward = load_classifier(context.checkpoint("reward").path)
    assert reward.config.rlhf_zoo["score_std"] > 0
    shutil.rmtree(context.checkpoint("sft").path / "merged")
    with pytest.raises(ZooError, match="/merged, which does not exist: restore the base"):
        load_causal(context.checkpoint("ppo").path)
    assert not run_stage(context, "eval"), "it was finished, but merges the policy's base again"
    load_causal(context.checkpoint("ppo").path)
    critic = context.checkpoint("ppo").path / CRITIC_DIR
    assert (critic / "adapter_model.safetensors").is_file()
    critic_from(critic)
    return context


@pytest.mark.parametrize("name", WITH_ADAPTERS)
def test_family_runs_every_stage_with_adapters(tmp_path, name):
    train_adapters(tmp_path, name)


@pytest.mark.full
@pytest.mark.parametrize("stages", [("sft",), ("reward", "ppo")])
def test_run_with_adapters_in_some_stages(tmp_path, stages):
    context = train_family(tmp_path, "Qwen2.5", stages=stages, **LORA)
    for stage in context.recipe.stages:
        assert (context.checkpoint(stage).path / "adapter_config.json").is_file() == (stage in stages)


@pytest.mark.full
@pytest.mark.parametrize("name", ["GPT-2", "Pythia", "OPT", "Gemma 3"])
def test_adapters_on_families_with_other_layer_names(tmp_path, name):
    """Qwen, Llama, Mistral and SmolLM2 name their projections like Qwen3-Base; Gemma 2 like Gemma 3."""
    train_adapters(tmp_path, name)
