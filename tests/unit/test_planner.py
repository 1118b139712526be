"""The planner: bytes of a model's passes without its memory, formulas, what fits, and rates that were measured."""

import random
import re
import shlex
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from rlhf_zoo.cli.plan import plan, print_plan, print_plan_line
from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.connect import DEFAULT_HUB
from rlhf_zoo.pipeline.plan import memory, tracing
from rlhf_zoo.pipeline.plan.devices import GPUS, Device, find_gpu, parse_device
from rlhf_zoo.pipeline.plan.estimate import lora_config
from rlhf_zoo.pipeline.plan.memory import GIB, ModelMemory, TrainingPass
from rlhf_zoo.pipeline.plan.plan import (
    _rounding_changes,
    _training_changes,
    make_plan,
    parse_planner_keys,
    smallest_change,
)
from rlhf_zoo.pipeline.plan.result import Change, format_gib
from rlhf_zoo.pipeline.plan.shapes import find_shape, new_shape
from rlhf_zoo.pipeline.plan.shipped_shapes import shipped_shapes
from rlhf_zoo.pipeline.plan.tracing import tracer
from rlhf_zoo.runs.recipe import Recipe, load_recipe
from rlhf_zoo.runs.recipe_table import recipe_rows
from rlhf_zoo.runs.settings.parse import parse_flags

PAGE = (Path(__file__).parents[2] / "docs/plan.md").read_text(encoding="utf-8")
SMALL = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 256,
}  # fmt: skip


def config_of(**more):
    return new_shape({**SMALL, **more}, vocabulary=128).config


@pytest.mark.parametrize("name", shipped_shapes())
def test_shapes_have_published_parameter_counts(name):
    shape, said = find_shape(name), shipped_shapes()[name]
    what = "classifier" if "labels" in said else "policy"
    wanted = said.get("parameters") or shipped_shapes()[said["like"]]["parameters"]
    assert tracer(shape.config, what, is_trainable=False).counts.parameters == wanted


MIXTURE = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.mark.parametrize("more", [{}, MIXTURE], ids=["dense", "a mixture of experts"])
@pytest.mark.parametrize("bf16", [False, True])
def test_traced_saved_bytes_equal_those_of_real_training_pass(bf16, more):
    """Of a real model of this size: bytes of the tensors that autograd keeps, each storage once, weights left out."""
    config = config_of(**more)
    traced = tracer(config, "policy").training_pass(batch_size=3, length=24, bf16=bf16, checkpointing=False)
    model = AutoModelForCausalLM.from_config(config).train()
    weights = {weight.untyped_storage().data_ptr() for weight in (*model.parameters(), *model.buffers())}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    ids = torch.ones(3, 24, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", enabled=bf16):
        model.base_model(input_ids=ids, attention_mask=ids, position_ids=ids.cumsum(-1) - 1, use_cache=False)
    saved = sum(size for size, _ in seen.values())
    assert saved <= traced.saved <= 1.15 * saved, "the pass's own result and masks are alive beside it"
    gradients = sum(4 * weight.numel() for weight in model.base_model.parameters())
    first = tracer(config, "policy").training_pass(
        batch_size=3, length=24, bf16=bf16, checkpointing=False, accumulates=False
    )
    assert first.saved == traced.saved, "gradients of an earlier micro-batch are not activations"
    assert traced.peak < first.peak and gradients <= first.peak < gradients + traced.peak, "only a first one makes them"


def test_tracing_two_depths_extrapolates_to_all_layers(monkeypatch):
    config = config_of()
    shallow = tracer(config, "policy")
    monkeypatch.setattr(tracing, "DEPTHS", (6, 6))
    whole = tracing.Tracer(shallow.spec, config)
    assert shallow.counts == whole.counts
    for checkpointing in (False, True):
        asked = {"batch_size": 2, "length": 32, "bf16": False, "checkpointing": checkpointing}
        few, many = shallow.training_pass(**asked), whole.training_pass(**asked)
        assert few.saved == pytest.approx(many.saved, rel=0.01)
        assert few.peak == pytest.approx(many.peak, rel=0.02)
    reading = {"batch_size": 2, "length": 32, "bf16": True}
    assert shallow.decode_step(**reading).peak == pytest.approx(whole.decode_step(**reading).peak, rel=0.02)
    assert shallow.forward_pass(**reading).casts == pytest.approx(whole.forward_pass(**reading).casts, rel=0.02)


def test_checkpointing_saves_memory_and_adapter_has_few_gradients():
    from peft import LoraConfig

    config, asked = config_of(), {"batch_size": 2, "length": 64, "bf16": False}
    usual = tracer(config, "policy").training_pass(**asked, checkpointing=False)
    assert tracer(config, "policy").training_pass(**asked, checkpointing=True).saved < 0.3 * usual.saved
    adapted = tracer(config, "policy", peft_config=LoraConfig(r=2, target_modules="all-linear"))
    assert adapted.counts.trained == 2 * 6 * (4 * 64 + 2 * (64 + 32) + 3 * (64 + 96))
    peaks = [adapted.training_pass(**asked, checkpointing=True, accumulates=after).peak for after in (False, True)]
    assert 0 < peaks[0] - peaks[1] <= 4 * adapted.counts.trained, "a first micro-batch allocates only their gradients"


def test_trunks_that_are_equal_are_measured_once(monkeypatch):
    asked = {"batch_size": 2, "length": 16, "bf16": True, "checkpointing": False}
    monkeypatch.setattr(tracing, "_TRUNK_RESULTS", {})
    config = config_of(num_hidden_layers=2)
    policy, critic = (tracing.Tracer(tracing.ModelSpec("{}", role), config) for role in ("policy", "classifier"))
    frozen = tracing.Tracer(tracing.ModelSpec("{}", "policy", is_trainable=False), config)
    for model in (policy, critic, frozen):
        monkeypatch.setattr(model, "_cache_name", lambda _: None)
    measured = policy.training_pass(**asked)
    assert critic.training_pass(**asked) == measured and len(tracing._TRUNK_RESULTS) == 1
    tracing._TRUNK_RESULTS.clear()
    critic._results.clear()
    assert critic.training_pass(**asked) == measured, "measured alone, it is the same"
    reading = {"batch_size": 2, "length": 16, "bf16": True}
    assert frozen.forward_pass(**reading).casts < policy.forward_pass(**reading).casts, "only trained weights are kept"
    assert len(tracing._TRUNK_RESULTS) == 3


@pytest.mark.parametrize("target", [None, ["all-linear"], ["q_proj", "v_proj"]])
def test_planned_adapter_is_trls(target):
    from trl import ModelConfig, get_peft_config

    chosen = {"lora_r": 3, "lora_alpha": 7, "lora_dropout": 0.1, "lora_target_modules": target, "use_dora": True,
              "lora_modules_to_save": ["lm_head"], "lora_target_parameters": ["experts"],
              "use_rslora": True}  # fmt: skip
    model = ModelConfig(use_peft=True, **chosen)
    keys = SimpleNamespace(**{"lora_task_type": model.lora_task_type, **chosen})
    assert lora_config(keys).to_dict() == get_peft_config(model).to_dict()


COUNTS = memory.Counts(
    parameters=1000,
    trained=1000,
    linear=800,
    embeddings=100,
    layers=2,
    width=10,
    vocabulary=10,
    kv_values=40,
    attention_width=10,
)


def test_tracer_rejects_models_that_need_real_tensors(monkeypatch):
    monkeypatch.setattr(tracing, "forward", lambda *_: torch.ones(1).nonzero().tolist())
    with pytest.raises(ZooError, match="A llama of this configuration cannot be run on tensors without memory"):
        tracing.Tracer(tracer(config_of(), "policy").spec, config_of()).decode_step(batch_size=1, length=4, bf16=False)


def test_trained_parameter_takes_sixteen_bytes():
    assert memory.model_memory(COUNTS, bytes_per_weight=4, state_per_parameter=8).total == 16_000
    lora = SimpleNamespace(**{**vars(COUNTS), "parameters": 1100, "trained": 100})
    adapter = memory.Counts(**vars(lora))
    assert memory.model_memory(adapter, bytes_per_weight=2, state_per_parameter=8).total == 2 * 1000 + 16 * 100
    assert (
        memory.model_memory(adapter, bytes_per_weight=2, state_per_parameter=8, quantization="4bit").weights
        == 2 * 200 + 800 * 0.5625 + 4 * 100
    )
    assert memory.model_memory(adapter, bytes_per_weight=4, state_per_parameter=8, shares_base=True).total == 16 * 100
    assert memory.model_memory(COUNTS, bytes_per_weight=4, state_per_parameter=memory.state_bytes("sgd")).total == 8_000
    assert memory.state_bytes("adamw_torch_fused") == 8 and memory.state_bytes("adamw_8bit") == 2.03
    assert memory.state_bytes("something_new") is None


def test_update_memory_takes_the_highest_peak():
    policy, critic = ModelMemory(100, 100, 200), ModelMemory(80, 80, 160)
    first, later = (TrainingPass(50, 120), TrainingPass(40, 95)), (TrainingPass(50, 70), TrainingPass(40, 60))
    one = {"frozen_bytes": 30, "logits": 5, "head_bytes": 7}
    several = memory.update_memory(policy, critic, later, accumulates=True, **one)
    assert (several.total, several.gradients) == (100 + 80 + 30 + 180 + 360 + 50 + 7 + 60, 180)
    single = memory.update_memory(policy, critic, first, accumulates=False, **one)
    assert single.total == 100 + 80 + 30 + 360 + (
        80 + 120 + 7
    )  # the policy's pass backward, the critic's gradients there


def four_models(architecture, **keys):
    said = {"description": "A check.", "architecture": architecture, "tokenizer": {"vocab_size": 32_000}}
    stages = {"sft": {}, "reward": {}, "ppo": {"bf16": None, **keys}}
    return Recipe("check", Path("check"), said, stages)


LLAMA_7B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "intermediate_size": 11008, "max_position_embeddings": 4096,
}  # fmt: skip


def test_four_7b_models_match_documented_table():
    recipe = four_models(LLAMA_7B, per_device_train_batch_size=1, gradient_accumulation_steps=64, response_length=256)
    [plan] = make_plan(recipe, parse_device("h100"), prompt_length=256, stages=["ppo"], suggest_changes=False).stages
    assert plan.models["policy"].total == 16 * 6_738_415_616
    for name, one in plan.models.items():
        parts = (one.weights, one.gradients, one.optimizer, one.total)
        assert f"| {name} | {' | '.join(f'{part / GIB:.1f}' for part in parts)} |" in PAGE
    for name, need in plan.phases.items():
        parts = (need.weights, need.gradients, need.optimizer, need.activations, need.cache, need.logits, need.total)
        assert f"| {name} | {' | '.join(f'{part / GIB:.1f}' for part in parts)} |" in PAGE


@pytest.mark.usefixtures("untraced")
def test_plan_counts_updates_when_keys_determine_them():
    def counted(gpu, **keys):
        recipe = four_models({**LLAMA_7B, "num_hidden_layers": 2}, per_device_train_batch_size=8, **keys)
        made = make_plan(recipe, parse_device(gpu), prompt_length=64, stages=["ppo"])
        return made.stages[0].batch.get("updates"), made.total_time("ppo")

    keys = {"gradient_accumulation_steps": 4, "num_generations": 2, "total_episodes": 1000}
    for gpu in ("h100", "h100:4"):
        updates, said = counted(gpu, **keys)
        assert updates == 16 and said.startswith(" (16 updates: "), "a batch is of all processes"
    assert counted("h100", max_steps=7)[0] == 7 and counted("h100") == (None, "")


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(("keys", "precision"), [({}, "float32"), ({"dtype": "bfloat16"}, "bfloat16")])
def test_plan_duration_uses_precision_of_weights(keys, precision):
    recipe = four_models({**LLAMA_7B, "num_hidden_layers": 2}, bf16=False, **keys)
    spent = make_plan(recipe, parse_device("cpu"), prompt_length=64, stages=["ppo"]).durations["ppo"]
    assert spent is not None and f" in {precision} (" in spent.basis


@pytest.mark.usefixtures("untraced")
def test_suggested_change_is_small_and_makes_plan_fit():
    """Of what is told the keys are those of the recipe, and with them the same device is enough."""
    recipe = four_models(
        {**LLAMA_7B, "num_hidden_layers": 2}, per_device_train_batch_size=16, gradient_accumulation_steps=4,
        response_length=512,
    )  # fmt: skip
    device = Device("GPU", 20)
    made = make_plan(recipe, device, prompt_length=512, stages=["ppo"])
    change = made.changes["ppo"]
    assert change is not None and made.peak > device.usable_gib * GIB >= change.peak
    again = make_plan(recipe, device, {"ppo": change.keys}, prompt_length=512, stages=["ppo"])
    assert not again.changes and again.peak == change.peak
    assert make_plan(recipe, Device("GPU", 1), prompt_length=512, stages=["ppo"]).changes == {"ppo": None}
    small = make_plan(recipe, Device("GPU", 11), prompt_length=512, stages=["ppo"]).changes["ppo"]
    assert small is not None and small.keys["use_peft"] is True


@pytest.mark.parametrize("seed", range(8))
def test_suggested_change_is_minimal(seed):
    """Of keys that save at random: with one or two keys none has fewer, and of more none can be left out."""
    rng = random.Random(seed)
    keys = parse_planner_keys("ppo", load_recipe("imdb-gpt2").stages["ppo"], where="here")
    device = Device("GPU", 100)
    saves = {}

    def estimate(stage, own):
        changed = sorted((name, str(value)) for name, value in vars(own).items() if value != getattr(keys, name))
        saved = sum(saves.setdefault(one, rng.uniform(1, 10)) for one in changed)
        return SimpleNamespace(peak=(100 + over - saved) * GIB)

    def fits(changes):
        return estimate("ppo", SimpleNamespace(**{**vars(keys), **changes})).peak <= device.usable_gib * GIB

    over = rng.uniform(-6, 22)
    found = smallest_change("ppo", keys, device, estimate)
    if found is None:
        return
    assert fits(found.keys)
    parts = list(_rounding_changes("ppo", keys, device))
    if any(all(found.keys.get(name) == value for name, value in one.items()) for one in parts):
        fewest = [one for one in parts if fits(one)] or [a | b for a, b in combinations(parts, 2) if fits(a | b)]
        assert not fewest or found.keys in fewest
    for one in parts:
        if one.items() <= found.keys.items():
            assert not fits({name: value for name, value in found.keys.items() if name not in one})


@pytest.mark.parametrize(("optimizer", "is_replaced"), [("adamw_torch", True), ("new", True), ("sgd", False)])
def test_only_optimizer_with_more_state_is_replaced(optimizer: str, is_replaced: bool) -> None:
    keys = parse_planner_keys("sft", {}, where="here")
    keys.optim = optimizer
    assert ({"optim": "adamw_8bit"} in _training_changes("sft", keys, Device("GPU", 24))) == is_replaced


@pytest.mark.usefixtures("untraced")
def test_sharding_lora_and_quantization_lower_peak():
    keys = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8, "response_length": 256}
    recipe = four_models({**LLAMA_7B, "num_hidden_layers": 8}, **keys)

    def peak(gpu, **more):
        return make_plan(
            recipe, parse_device(gpu), {"ppo": more}, prompt_length=256, stages=["ppo"], suggest_changes=False
        ).peak

    lora = {"use_peft": True, "lora_target_modules": ["all-linear"], "dtype": "bfloat16"}
    assert peak("h100:8", fsdp2=True) < 0.3 * peak("h100:8")
    for stage in ("sft", "reward"):
        asked = recipe, parse_device("h100:8")
        shared, whole = (
            make_plan(*asked, {stage: {"fsdp2": each}}, stages=[stage], suggest_changes=False) for each in (True, False)
        )
        assert shared.peak < 0.4 * whole.peak
    assert peak("h100:2") > peak("h100"), "processes that exchange gradients hold buckets of them"
    assert peak("h100", **lora, load_in_4bit=True) < peak("h100", **lora) < 0.5 * peak("h100")
    assert peak("h100", offload_frozen=True) < peak("h100") < peak("h100", bf16=False)


def test_plan_of_two_sharded_processes_is_within_a_tenth_of_measured():
    """MiB of SmolLM2-135M on a CPU, the first process (which saves) and the other: docs/plan.md has them measured."""
    shape = {
        "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "intermediate_size": 1536, "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    }  # fmt: skip
    keys = {
        "bf16": False, "fsdp2": True, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "num_ppo_epochs": 1, "num_mini_batches": 1, "response_length": 32, "critic": "policy",
        "reward_model_path": None, "reward_funcs": ["length"],
    }  # fmt: skip
    shared = {"description": "A check.", "architecture": shape, "tokenizer": {"vocab_size": 49_152}}
    recipe = Recipe("check", Path(), shared, {"sft": {}, "ppo": keys})
    [stage] = make_plan(recipe, parse_device("cpu:2"), prompt_length=16, stages=["ppo"], suggest_changes=False).stages
    planned = {name: round(need.total / 2**20) for name, need in stage.phases.items()}
    assert max(planned, key=planned.get) == "save" and planned["save"] == pytest.approx(4619, rel=0.1)
    assert max(of for name, of in planned.items() if name != "save") == pytest.approx(4048, rel=0.1)


@pytest.mark.parametrize(
    ("stage", "gpu", "keys", "said"),
    [
        (
            "sft",
            "h100:8",
            {"use_peft": True},
            "fsdp2 of the stage sft does not work with use_peft: remove one of them",
        ),
        ("ppo", "h100:8", {"critic": "shared"}, "fsdp2 of the stage ppo does not work with critic shared"),
        ("reward", "h100:8", {"optim": "adafactor"}, "cannot shard the optimizer adafactor: set optim to one of"),
        ("reward", "h100", {}, "this plan is for one device: set --gpu NAME:COUNT"),
    ],
)
def test_plan_rejects_unsupported_sharding(stage, gpu, keys, said):
    recipe = four_models({**LLAMA_7B, "num_hidden_layers": 2})
    with pytest.raises(ZooError, match=said):
        make_plan(
            recipe,
            parse_device(gpu),
            {stage: {"fsdp2": True, **keys}},
            prompt_length=64,
            stages=[stage],
            suggest_changes=False,
        )


@pytest.mark.parametrize(
    ("product_name", "gib", "expected"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", 79.3, "a100"),
        ("NVIDIA L40", 44.4, None),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA L4", 22.0, "l4"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx4090"),
        ("NVIDIA H200", 139.8, "h200"),
        ("AMD Instinct MI300X", 191.7, "mi300x"),
        ("NVIDIA A10", 22.0, None),
    ],
)
def test_find_gpu_needs_whole_model_name(product_name: str, gib: float, expected: str | None) -> None:
    assert find_gpu(product_name, gib) == expected


@pytest.mark.parametrize("text", ["h100:0", "h100:many", "h10", "", "12"])
def test_parse_device_rejects_unknown_devices(text):
    with pytest.raises(ZooError, match="--gpu is"):
        parse_device(text)
    assert parse_device("H100:8").count == 8 and parse_device("24gb").gib == 24 and not parse_device("t4").bfloat16
    assert all(parse_device(name).gib > 0 for name in GPUS)


@pytest.mark.parametrize(
    "name",
    [pytest.param(row.name, marks=pytest.mark.full if row.smoke != "make test" else []) for row in recipe_rows()],
)
def test_recipe_memory_equals_plan(name):
    """A third of them in the fast tier, as test_smoke.py has it: seconds for each large one."""
    recipe = load_recipe(name)
    made = make_plan(
        recipe, parse_device(recipe.zoo.get("gpu", "cpu")), recipe.zoo.get("gpu_flags"), suggest_changes=False
    )
    needs = f"{f'{made.device.count} × ' if made.device.count > 1 else ''}{format_gib(made.peak)} GiB"
    assert recipe.zoo["memory"] == needs
    if "gpu" in recipe.zoo:
        assert not made.changes, f"{name} does not fit {recipe.zoo['gpu']}, which zoo.yaml names"
        readme = (recipe.folder / "README.md").read_text(encoding="utf-8")
        if "extends" not in (recipe.folder / "recipe.yaml").read_text() or "**Needs**" in readme:
            assert needs in readme


def test_change_is_printed_as_flags():
    change = Change({"per_device_train_batch_size": 1, "bf16": True, "lora_target_modules": ["all-linear"]}, 1.0)
    flags = shlex.split(change.flags("ppo"))
    assert flags == [
        "--ppo.per_device_train_batch_size", "1", "--ppo.bf16", "true", "--ppo.lora_target_modules", '["all-linear"]',
    ]  # fmt: skip
    assert {key: yaml.safe_load(value) for key, value in parse_flags(flags)["ppo"].items()} == change.keys


@pytest.mark.usefixtures("untraced")
def test_total_time_names_stages_whose_steps_depend_on_data():
    def told(gpu, **steps):
        recipe = four_models({**LLAMA_7B, "num_hidden_layers": 2}, max_steps=7)
        for stage, count in steps.items():
            recipe.stages[stage].update(max_steps=count, bf16=None)
        return make_plan(recipe, parse_device(gpu), prompt_length=64, suggest_changes=False).total_sentence

    assert told("h100", sft=5, reward=5).startswith("All stages: about ")
    assert ", without sft and reward, whose steps depend on" in told("h100", sft=-1, reward=-1)
    assert told("24gb", sft=5, reward=5) == ""


@pytest.mark.usefixtures("untraced")
def test_plan_time_is_unknown_when_gpu_is_unnamed(capsys, monkeypatch):
    recipe = four_models({**LLAMA_7B, "num_hidden_layers": 2})
    result = make_plan(recipe, parse_device("24gb"), prompt_length=64, suggest_changes=False)
    print_plan(result, detail=False)
    sentences = capsys.readouterr().out
    (unknown,) = (line for line in sentences.splitlines() if line.startswith("The time of"))
    assert "sft and reward and ppo is unknown" in unknown and unknown.endswith("such as --gpu rtx4090.")
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich treat stdout as a terminal
    monkeypatch.setenv("COLUMNS", "80")
    print_plan(result, detail=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if "DOES NOT FIT" not in line) <= 80, "flags stay on one line"
    assert " ".join(lines).split() == sentences.split()


@pytest.mark.usefixtures("untraced")
def test_gpu_flags_of_recipe_apply_to_its_device():
    def told(*asked):
        done = CliRunner().invoke(plan, ["tldr-pythia-6.9b", *asked], catch_exceptions=False)
        assert done.exit_code == 0
        return done.output

    own, by_hand = told(), told("--gpu", "h100:8")
    assert own == by_hand and own.count("fsdp2 true, as the recipe's zoo.yaml sets for 8 × h100") == 3
    assert "communication between devices is not included" in own and "DOES NOT FIT" not in own
    other = told("--gpu", "h100:8", "--sft.fsdp2", "false")
    assert other.splitlines()[1].startswith("sft DOES NOT FIT: ") and "makes it fit is --sft.fsdp2 true (" in other
    assert all("zoo.yaml sets" not in told(flag) for flag in ("--lora", "--load_in_4bit"))
    # The answer comes first; tables only on request.
    assert [line.partition(":")[0] for line in own.splitlines()[1:4]] == ["sft fits", "reward fits", "ppo fits"]
    assert "ppo: models" not in own
    detailed = told("--detail")
    assert detailed.startswith(own.rpartition("--detail")[0]) and "ppo: models" in detailed


def test_plan_line_is_printed_and_never_stops_a_command(capsys):
    print_plan_line(load_recipe("tiny-world"), {"ppo": {"use_cpu": True}}, stage="ppo", hub=DEFAULT_HUB)
    assert re.fullmatch(
        r"Plan for cpu \([\d.]+ GiB\): ppo [\d.]+ GiB, about .* s per PPO update \(40 updates: [\d.]+ min\)\.\n",
        capsys.readouterr().err,
    )
    unknown = Recipe(
        "mine", Path("mine"), {"description": "M."}, {"sft": {"model_name_or_path": "no/where"}, "ppo": {}}
    )
    print_plan_line(unknown, {}, hub=DEFAULT_HUB)
    said = capsys.readouterr().err
    assert re.match("No plan: .*the model no/where", said, re.IGNORECASE) and said.count("\n") == 1
    huge = four_models({**LLAMA_7B, "num_hidden_layers": 400})
    print_plan_line(huge, {}, stage="ppo", hub=DEFAULT_HUB)
    assert "ppo may not fit: `rlhf-zoo plan check` shows what would" in capsys.readouterr().err


def test_downloaded_recipe_is_planned_as_it_will_run(tmp_path: Path):
    """Its attn_implementation is left out by every run, and its zoo.yaml says no more than its stages."""
    own = load_recipe("tiny-world")
    eager = {**own.stages, "ppo": {**own.stages["ppo"], "attn_implementation": "eager", "response_length": 200}}
    plain = {**own.stages, "ppo": {**own.stages["ppo"], "response_length": 200}}
    device = parse_device("cpu")

    def peaks(recipe: Recipe) -> list[float]:
        return [stage.peak for stage in make_plan(recipe, device, suggest_changes=False).stages]

    expected = peaks(replace(own, stages=plain))
    assert peaks(replace(own, stages=eager, download_mark=tmp_path)) == expected != peaks(replace(own, stages=eager))
