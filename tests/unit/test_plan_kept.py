"""A plan is made once: what is kept of it, and when it is made again."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from peft import LoraConfig

from rlhf_zoo.cli import plan as command
from rlhf_zoo.pipeline.plan import cache, shipped_shapes, tracing
from rlhf_zoo.pipeline.plan import plan as planner
from rlhf_zoo.pipeline.plan.devices import cpu_device, local_device, parse_device
from rlhf_zoo.pipeline.plan.memory import GIB, ModelMemory, PhaseMemory
from rlhf_zoo.pipeline.plan.result import Change, Duration, Plan, StagePlan
from rlhf_zoo.pipeline.plan.shapes import new_shape
from rlhf_zoo.runs.recipe import load_recipe

RECIPE = "tiny-world"
SMALL = replace(cpu_device(), gib=0.6)
TINY = new_shape(
    {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
     "num_attention_heads": 2, "num_key_value_heads": 2},
    vocabulary=32,
)  # fmt: skip


@pytest.fixture
def plan() -> Plan:
    """Two stages, of which one does not fit, and a third that no change makes fit."""
    model = ModelMemory(weights=4.0 * GIB, gradients=2.0 * GIB, optimizer=8.0 * GIB)
    phases = {"sample": PhaseMemory(weights=4.0 * GIB, cache=1.5 * GIB), "update": PhaseMemory(activations=3.0 * GIB)}
    stages = [
        StagePlan(name, {"policy": model}, phases, {"rows": 8, "updates": 40} if name == "ppo" else {"rows": 8})
        for name in ("sft", "reward", "ppo")
    ]
    durations = {"sft": None, "reward": Duration({"update": 0.25}, "measured"), "ppo": Duration({"sample": 9.0}, "so")}
    changes = {"reward": Change({"bf16": True}, 0.5 * GIB), "ppo": None}
    return Plan(RECIPE, SMALL, stages, durations, changes, ["a prompt has 12 tokens"])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLHF_ZOO_HOME", str(tmp_path))
    return tmp_path


def test_plan_round_trips_through_json(plan: Plan) -> None:
    document = json.loads(json.dumps(plan.to_json()))
    peaks = {stage: change.peak for stage, change in plan.changes.items() if change is not None}
    again = Plan.from_json(document, change_peaks=peaks)
    assert plan.changes and dict(again.changes) == dict(plan.changes)
    assert (again.to_json(), again.line, again.peak) == (plan.to_json(), plan.line, plan.peak)
    assert [again.total_time(stage.stage) for stage in again.stages] == [
        plan.total_time(stage.stage) for stage in plan.stages
    ]


def test_equal_requests_are_planned_once(home: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def make(recipe, device, flags, **options) -> Plan:
        asked.append((recipe.name, device, flags, options["prompt_length"]))
        return plan

    monkeypatch.setattr(planner, "make_plan", make)
    recipe = load_recipe(RECIPE)
    questions = [
        (recipe, SMALL, {}, None),
        (recipe, SMALL, {}, 12),
        (recipe, parse_device("24gb"), {}, None),
        (recipe, SMALL, {"ppo": {"num_generations": 2}}, None),
        (replace(recipe, stages={**recipe.stages, "sft": {**recipe.stages["sft"], "max_length": 9}}), SMALL, {}, None),
    ]
    for question in [*questions, *questions]:
        assert command._cached_plan(*question, None, None).to_json() == plan.to_json()
    assert len(asked) == len(questions), "each is asked once"
    for path in (home / "plans").iterdir():
        path.write_text("{")
    command._cached_plan(*questions[0], None, None)
    assert len(asked) == len(questions) + 1, "what cannot be read is made again"
    monkeypatch.setattr(cache, "code_digest", lambda: "changed")
    command._cached_plan(*questions[0], None, None)
    assert len(asked) == len(questions) + 2, "and so is what other code planned"


def test_plan_of_model_folder_is_cached_until_its_configuration_changes(
    home: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(planner, "make_plan", lambda *_, **__: asked.append(1) or plan)
    model, recipe = home / "model", load_recipe(RECIPE)
    model.mkdir()
    counts = []
    for config in ('{"hidden_size": 16}', '{"hidden_size": 32}', '{"auto_map": {}}'):
        (model / "config.json").write_text(config)
        for _ in range(2):
            command._cached_plan(recipe, SMALL, {"sft": {"model_name_or_path": str(model)}}, None, None, None)
            counts.append(len(asked))
    assert counts == [1, 1, 2, 2, 3, 4], "the folder's own code may change without its configuration"


def test_plan_of_published_model_is_cached_until_its_shape_changes(
    home: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(planner, "make_plan", lambda *_, **__: asked.append(1) or plan)
    counts = []
    for layers in (2, 3):
        monkeypatch.setattr(shipped_shapes, "shipped_shapes", lambda layers=layers: {"a/model": {"num_layers": layers}})
        for _ in range(2):
            command._cached_plan(
                load_recipe(RECIPE), SMALL, {"sft": {"model_name_or_path": "a/model"}}, None, None, None
            )
            counts.append(len(asked))
    assert counts == [1, 1, 2, 2]


def test_plans_of_folders_without_configuration_and_of_downloads_are_not_cached(
    home: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(planner, "make_plan", lambda *_, **__: asked.append(1) or plan)
    model = home / "model"
    model.mkdir()
    recipe = load_recipe(RECIPE)
    downloaded = replace(recipe, download_mark=home / ".downloaded")
    for _ in range(2):
        command._cached_plan(recipe, SMALL, {"sft": {"model_name_or_path": str(model)}}, None, None, None)
        command._cached_plan(downloaded, SMALL, {}, None, None, None)
    assert len(asked) == 4 and not (home / "plans").exists()


def test_cached_trace_of_an_adapter_is_found_by_other_processes() -> None:
    """peft makes a set of the names of layers, whose order differs between processes."""
    names = [f"layer_{number}" for number in range(30)]
    spec = tracing.tracer(TINY.config, "policy", peft_config=LoraConfig(target_modules=names)).spec
    assert spec.adapter is not None and json.loads(spec.adapter)["target_modules"] == sorted(names)


def test_model_is_traced_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tracing.ModelSpec(TINY.config.to_json_string(use_diff=False))
    options = {"batch_size": 2, "length": 4, "bf16": False}
    first = tracing.Tracer(spec, TINY.config)
    measured = (first.counts, first.forward_pass(**options), first.training_pass(**options, checkpointing=False))
    monkeypatch.setattr(tracing.Tracer, "_build", lambda *_: pytest.fail("it was measured"))
    again = tracing.Tracer(spec, TINY.config)
    found = (again.counts, again.forward_pass(**options), again.training_pass(**options, checkpointing=False))
    assert found == measured
    monkeypatch.setattr(tracing, "is_code_trusted", lambda: True)
    with pytest.raises(pytest.fail.Exception, match="it was measured"):
        tracing.Tracer(spec, TINY.config).forward_pass(**options)


def test_trace_key_changes_with_code_of_decode_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tracing.Tracer(tracing.ModelSpec("{}"), TINY.config)
    name = model._cache_name(("decode", 1, 4, False))
    for function in ("forward", "new_cache"):
        with monkeypatch.context() as patch:
            patch.setattr(tracing, function, lambda *_: None)
            assert model._cache_name(("decode", 1, 4, False)) != name


def test_cache_evicts_older_half_when_full(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_FILES", 3)
    for number in range(4):
        cache.write_cached("plans", str(number), number)
    assert {path.stem for path in (home / "plans").iterdir()} < {"0", "1", "2", "3"}
    assert len(list((home / "plans").iterdir())) == 2


def test_cache_stores_nothing_when_unwritable(home: Path) -> None:
    (home / "plans").write_text("a file")
    cache.write_cached("plans", "x", 1)
    assert cache.read_cached("plans", "x") is None


def test_cached_plan_does_not_import_torch(home: Path, plan: Plan) -> None:
    assert local_device() is not None
    recipe = load_recipe(RECIPE)
    code = f"""
import sys
from rlhf_zoo.cli.plan import _cached_plan
from rlhf_zoo.pipeline.plan.devices import Device
from rlhf_zoo.runs.recipe import load_recipe
device = Device(*{(SMALL.name, SMALL.gib, SMALL.count, SMALL.teraflops, SMALL.bandwidth)}, bfloat16=False, cpu=True)
print(_cached_plan(load_recipe("tiny-world"), device, {{}}, None, None, None).line)
print(*({{"torch", "transformers", "trl", "datasets", "numpy"}} & set(sys.modules)))
"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "make_plan", lambda *_, **__: plan)
        command._cached_plan(recipe, SMALL, {}, None, None, None)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == [plan.line, ""], done.stderr
