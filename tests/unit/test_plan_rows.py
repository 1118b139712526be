"""`rlhf-zoo plan` knows the steps of SFT and the reward model where it knows their rows."""

import json

import pytest
import yaml
from click.testing import CliRunner

from rlhf_zoo.cli.plan import plan as plan_command
from rlhf_zoo.errors import ZooError
from rlhf_zoo.pipeline.plan.devices import parse_device
from rlhf_zoo.pipeline.plan.plan import make_plan
from rlhf_zoo.pipeline.plan.result import StagePlan
from rlhf_zoo.pipeline.plan.rows import add_steps, training_steps
from rlhf_zoo.runs.recipe import Recipe, load_recipe


def stage_plan(name: str, *, rows: int, micro_batches: int, epochs: float) -> StagePlan:
    return StagePlan(name, {}, {}, {"rows": rows, "micro_batches": micro_batches, "epochs": epochs})


@pytest.mark.parametrize(
    ("rows", "batch", "accumulation", "epochs"), [(10, 4, 1, 3), (10, 4, 2, 1), (9, 2, 4, 2.5), (3, 8, 4, 2)]
)
def test_training_steps_are_those_of_the_trainer(tmp_path, rows, batch, accumulation, epochs) -> None:
    from torch import nn
    from torch.utils.data import DataLoader
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation,
        num_train_epochs=epochs, use_cpu=True, report_to="none",
    )  # fmt: skip
    trainer = Trainer(nn.Linear(1, 1), arguments, train_dataset=list(range(rows)))
    loader = DataLoader(list(range(rows)), batch_size=batch)
    *_, max_steps = trainer.set_initial_training_values(arguments, loader)
    planned = stage_plan("sft", rows=batch, micro_batches=accumulation, epochs=epochs)
    assert training_steps(planned, rows, processes=1) == max_steps
    pairs = stage_plan("reward", rows=2 * batch, micro_batches=accumulation, epochs=epochs)
    assert training_steps(pairs, rows, processes=1) == max_steps, "a pair has two texts"


def test_processes_share_a_batch() -> None:
    planned = stage_plan("sft", rows=16, micro_batches=1, epochs=1)
    assert training_steps(planned, 116_722, processes=8) == 912


def steps_of(recipe: Recipe, flags: dict | None = None, rows: dict | None = None) -> dict[str, int | None]:
    flags = flags or {}
    planned = make_plan(recipe, parse_device("cpu"), flags, suggest_changes=False)
    return {stage.stage: stage.batch.get("updates") for stage in add_steps(planned, recipe, flags, rows or {}).stages}


def test_tiny_world_has_the_steps_of_its_runs() -> None:
    """Its recorded runs take 1,500 steps of SFT; 124 or 125 of the reward model, by pairs that turn out equal."""
    recipe = load_recipe("tiny-world")
    assert steps_of(recipe) == {"sft": 1500, "reward": 125, "ppo": 40}
    assert steps_of(recipe, {"sft": {"packing": True}})["sft"] is None
    assert steps_of(recipe, {"recipe": {"corpus_args": {"lines": 600}}})["sft"] is None, "zoo.yaml is of other rows"
    assert steps_of(recipe, {"sft": {"max_steps": 7}})["sft"] == 7
    with pytest.raises(ZooError, match=r"^--rows is set for sft, but max_steps sets its steps: leave out"):
        steps_of(recipe, {"sft": {"max_steps": 7}}, {"sft": 640})
    assert steps_of(recipe, rows={"sft": 640})["sft"] == 80


def test_rows_of_tiny_world_are_those_that_its_corpus_makes() -> None:
    from rlhf_zoo.runs.corpora.tiny_world_2 import prepare

    rows = prepare(seed=1)["lines"]["train"]
    assert len(rows) == load_recipe("tiny-world").zoo["training_rows"]["sft"]


@pytest.mark.usefixtures("untraced")
def test_lines_of_a_local_file_are_counted(tmp_path) -> None:
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps({"chosen": "a", "rejected": "b"}) + "\n" for _ in range(70)) + "\n")
    folder = tmp_path / "mine"
    folder.mkdir()
    shared = {"description": "Test.", "dataset_name": str(data), "architecture": {"model_type": "llama"}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(shared))
    keys = {"dataset_config": None, "per_device_train_batch_size": 4, "num_train_epochs": 2}
    (folder / "reward.yaml").write_text(yaml.safe_dump(keys))
    (folder / "sft.yaml").write_text(yaml.safe_dump({**keys, "dataset_train_split": "other"}))
    recipe = load_recipe(str(folder))
    assert steps_of(recipe) == {"sft": None, "reward": 36}
    result = CliRunner().invoke(plan_command, [str(folder), "--gpu", "cpu"], catch_exceptions=False)
    assert (
        "Assumed: reward trains on 70 rows, all lines of pairs.jsonl, or fewer if prompts are held out.\n"
        in result.stdout
    )
    assert "without sft, whose steps depend on the rows of the data (add --rows sft=NUMBER)" in result.stdout
    result = CliRunner().invoke(plan_command, [str(folder), "--gpu", "cpu", "--rows", "sft=8"], catch_exceptions=False)
    assert "(4 steps: " in result.stdout and "All stages: about " in result.stdout


@pytest.mark.parametrize(
    ("value", "remedy"),
    [("ppo=3", "name one of sft, reward"), ("sft", "give a number from 1"), ("sft=0", "give a number from 1"),
     ("sft=many", "give a number from 1")],
)  # fmt: skip
def test_rows_that_are_no_number_of_a_stage_are_refused(value, remedy) -> None:
    with pytest.raises(ZooError, match=rf"^--rows is '{value}': {remedy}, as in --rows sft=10000\.$"):
        CliRunner().invoke(plan_command, ["tiny-world", "--rows", value], catch_exceptions=False)
