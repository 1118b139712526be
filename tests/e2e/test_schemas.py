"""Data in the columns and forms of public data sets goes through every stage, the evaluation, card and comparison."""

from __future__ import annotations

import json

import pytest
import schemas

from rlhf_zoo.chat import Chat
from rlhf_zoo.comparison import Comparison
from rlhf_zoo.hub.connect import Hub
from rlhf_zoo.recipes import load_recipe
from rlhf_zoo.release.card import make_card
from rlhf_zoo.runs.context import RunContext
from rlhf_zoo.stages.pipeline import run_stage

pytestmark = pytest.mark.usefixtures("pictures")

DIAGONAL = [("trl-lib/ultrafeedback_binarized", "conversational")]  # Anthropic/hh-rlhf: test_several_processes.py


def train(tmp_path, schema, form, **shared):
    recipe = schemas.make_recipe(tmp_path, schema, form, shared=shared)
    context = RunContext(
        recipe=load_recipe(str(recipe)),
        directory=tmp_path / "run",
        hub=Hub("other", "http://127.0.0.1:9", "a test"),
        namespace="local",
        publish=False,
    )
    for stage in [*context.recipe.stages, "eval"]:
        assert run_stage(context, stage), stage
    return context


def check(context, form):
    for stage in context.recipe.stages:
        make_card(context.record(stage).path)
    paths = {stage: context.checkpoint(stage).path for stage in context.recipe.stages}
    comparison = Comparison.load(ppo=paths["ppo"], sft=paths["sft"], reward=paths.get("reward"), device="cpu")
    asked = "how is item 3"
    found = comparison.compare(asked, max_new_tokens=4)
    assert found.prompt == asked
    assert (comparison.tokens_of(asked) > len(comparison.tokenizer(asked)["input_ids"])) == (form == "conversational")
    assert (Chat.of(comparison.tokenizer) is not None) == (form == "conversational")
    lines = (context.record("eval").path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert not any("<|im_start|>" in json.loads(line)["prompt"] for line in lines)


@pytest.mark.parametrize(("schema", "form"), DIAGONAL)
def test_diagonal(tmp_path, schema, form):
    check(train(tmp_path, schema, form), form)


@pytest.mark.full
@pytest.mark.parametrize(("schema", "form"), [one for one in schemas.SCHEMAS if one not in DIAGONAL])
def test_every_schema(tmp_path, schema, form):
    check(train(tmp_path, schema, form), form)
