"""Keys of recipes and flags: every recipe builds, types are what the trainers want, and mistakes are named."""

import dataclasses
import enum
import math
import re
from pathlib import Path
from typing import Any, Literal, get_args

import pytest

import rlhf_zoo
from rlhf_zoo.errors import ZooError
from rlhf_zoo.modeling import distributed
from rlhf_zoo.runs.data.batch_share import share_of_batch
from rlhf_zoo.runs.recipe import Recipe, list_recipes, load_recipe
from rlhf_zoo.runs.registry import STAGES
from rlhf_zoo.runs.settings.declared import HELP, declared_keys
from rlhf_zoo.runs.settings.evaluation import EvaluationConfig
from rlhf_zoo.runs.settings.parse import (
    RUN_KEYS,
    RecipeConfig,
    parse_flags,
    recipe_config,
    recorded_settings,
    stage_keys,
    stage_settings,
)
from rlhf_zoo.runs.settings.values import coerce


class Color(enum.Enum):
    RED = "red"
    NO = "no"


def make(tmp_path: Path, stage: str = "ppo", keys: dict | None = None, shared: dict | None = None) -> Recipe:
    return Recipe("toy", tmp_path, {"description": "A toy.", **(shared or {})}, {stage: keys or {}})


def build(recipe: Recipe, stage: str = "ppo", flags: dict | None = None, shared_flags: dict | None = None):
    return stage_settings(recipe, stage, flags or {}, shared_flags=shared_flags or {}, output_dir=Path("runs/toy"))


# Shipped recipes


@pytest.mark.parametrize(
    ("name", "stage"), [(name, stage) for name in list_recipes() for stage in load_recipe(name).stages]
)
def test_stages_of_shipped_recipes_build(name, stage):
    recipe = load_recipe(name)
    built = build(recipe, stage)
    assert built.trainer.output_dir == "runs/toy" and built.trainer.push_to_hub is False
    assert built.recipe.seed == built.trainer.seed == built.resolved["seed"] == recipe.shared.get("seed", 1)
    for key, value in recipe.stages[stage].items():
        if (key, value) == ("bf16", None):  # as the machine has it
            continue
        holder = next(part for part in (built.data, built.trainer, built.model, built.release) if hasattr(part, key))
        found = getattr(holder, key)
        expected = float(value) if isinstance(found, float) else value
        assert getattr(found, "value", found) == expected, key


def test_scientific_notation_is_a_number_in_yaml_and_flags(tmp_path):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "recipe.yaml").write_text("description: A toy.\n")
    (tmp_path / "toy" / "ppo.yaml").write_text("learning_rate: 2e-5\ntotal_episodes: 1e3\n")
    recipe = load_recipe(str(tmp_path / "toy"))
    assert recipe.stages["ppo"]["learning_rate"] == "2e-5"  # as YAML 1.1 has it
    built = build(recipe)
    assert (built.trainer.learning_rate, built.resolved["learning_rate"]) == (2e-5, 2e-5)
    assert built.trainer.total_episodes == 1000 and isinstance(built.trainer.total_episodes, int)
    assert build(recipe, flags={"learning_rate": "3e-6"}).trainer.learning_rate == 3e-6
    spelt = build(recipe, flags={"learning_rate": "0.00002"})
    assert spelt.resolved == built.resolved


def test_flags_override_yaml_and_stage_seed_overrides_recipe_seed(tmp_path):
    recipe = make(tmp_path, keys={"kl_coef": 0.1, "seed": 7})
    assert build(recipe).trainer.seed == 7
    built = build(recipe, flags={"kl_coef": "0.3"}, shared_flags={"seed": "4", "evaluation.samples": "2"})
    assert (built.trainer.kl_coef, built.trainer.seed) == (0.3, 7)
    assert (built.recipe.seed, built.recipe.evaluation.samples) == (4, 2)


def test_resolved_settings_ignore_description_and_evaluation(tmp_path):
    recipe = make(tmp_path)
    plain = build(recipe).resolved
    assert build(recipe, shared_flags={"evaluation.samples": "9", "description": "Other."}).resolved == plain
    assert build(recipe, shared_flags={"seed": "9"}).resolved != plain


# Types

TABLE: list[tuple[Any, Any, Any]] = [
    # hint, given, what comes out (an exception's words where it is a string that starts with !)
    (int, 3, 3),
    (int, 3.0, 3),
    (int, "3", 3),
    (int, "1e3", 1000),
    (int, "3.7", "!a whole number"),
    (int, True, "!a whole number"),
    (int, "many", "!a whole number"),
    (int, math.inf, "!a whole number"),
    (int, math.nan, "!a whole number"),
    (int, [3], "!a whole number"),
    (float, 2, 2),
    (float, "2e-5", 2e-5),
    (float, math.inf, math.inf),
    (float, math.nan, "!a number"),
    (bool, True, True),
    (bool, "false", False),
    (bool, "True", True),
    (bool, 1, "!true or false"),
    (bool, "yes", "!true or false"),
    (str, "a", "a"),
    (str, 3, "3"),
    (str, True, "!text"),
    (str, None, "!text"),
    (str | None, "null", None),
    (str | None, None, None),
    (int | None, "none", None),
    (str | int, "4", 4),
    (int | str, "four", "four"),
    (list[str], "a,b", ["a", "b"]),
    (list[str], "f(a=[1,2],b={'x': (3,4)}),g,h(i=1,j=2)", ["f(a=[1,2],b={'x': (3,4)})", "g", "h(i=1,j=2)"]),
    (list[str], "f(a=')',b=2),g", ["f(a=')',b=2)", "g"]),
    (list[str], r"f(a='it\'s, (',b=2),g", [r"f(a='it\'s, (',b=2)", "g"]),
    (list[str], "'a,b',\"c,d\",e", ["'a,b'", '"c,d"', "e"]),
    (list[str], "it's,that's", ["it's", "that's"]),
    (list[str], "f('open,g", ["f('open,g"]),
    (list[str], "'open,g", ["'open", "g"]),
    (list[str], "a),b", ["a)", "b"]),
    (list[str], '["a", "b"]', ["a", "b"]),
    (list[float] | None, "1,2.5", [1, 2.5]),
    (list[float], ["1", "x"], "!a number"),
    (list[str], 3, "!a list"),
    (list[str], '["a"', "!YAML or JSON (while parsing a flow sequence, did not find expected ',' or ']')"),
    (list[str], "[a, b]", ["a", "b"]),
    (list, "a", ["a"]),
    (dict[str, Any], {"a": 1}, {"a": 1}),
    (dict[str, Any], '{"a": {"b": 2}}', {"a": {"b": 2}}),
    (dict, "a", "!a mapping"),
    (dict, "{chosen: x, n: 1}", {"chosen": "x", "n": 1}),
    (
        dict,
        "{!!python/name:os.system : 1}",
        "!YAML or JSON (could not determine a constructor for the tag 'tag:yaml.org,2002:python/name:os.system')",
    ),
    (dict, "{a: {b: 1}", "!YAML or JSON (while parsing a flow mapping, did not find expected ',' or '}')"),
    (dict | str | None, "{}", {}),
    (dict | str | None, "file.json", "file.json"),
    (str | list[str] | None, "reward", "reward"),
    (str | list[str] | None, "reward,seed-2", ["reward", "seed-2"]),
    (str | list[str] | None, "[reward, seed-2]", ["reward", "seed-2"]),
    (str | list[str] | None, ["reward"], ["reward"]),
    (Literal["wrapped", "bfd"], "wraped", "!one of wrapped, bfd"),
    (Literal["wrapped", "bfd"], "bfd", "bfd"),
    (Color, False, "no"),
    (Color, "red", "red"),
    (Color, "blue", "!one of red, no"),
    (Color | str, False, "no"),
    (Any, object, object),
]


@pytest.mark.parametrize(("hint", "value", "expected"), TABLE, ids=lambda value: str(value)[:30])
def test_coerce_converts_values_and_rejects_bad_ones(hint, value, expected):
    if isinstance(expected, str) and expected.startswith("!"):
        with pytest.raises(ValueError) as caught:
            coerce(value, hint)
        assert str(caught.value) == expected[1:]
    else:
        found = coerce(value, hint)
        assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("stage", "keys", "message"),
    [
        ("ppo", {"num_ppo_epochs": 3.7}, "num_ppo_epochs in {}/ppo.yaml is 3.7, but it takes a whole number."),
        ("ppo", {"kl_coef": "much"}, "kl_coef in {}/ppo.yaml is 'much', but it takes a number."),
        (
            "ppo",
            {"kl_coeff": 1},
            "{}/ppo.yaml has kl_coeff, which is not a key of the stage ppo, did you mean 'kl_coef'",
        ),
        (
            "sft",
            {"zzzz": 1},
            "{}/sft.yaml has zzzz, which is not a key of the stage sft: `rlhf-zoo recipes keys sft` lists them.",
        ),
        ("ppo", {1: 2}, "{}/ppo.yaml has 1, which is not a key of the stage ppo: "),
        (
            "ppo",
            {"env": {"HF_ENDPOINT": "http://x"}},
            "{}/ppo.yaml has env, which is refused, because it could redirect",
        ),
        ("sft", {"optim": "adamx"}, "The settings of the stage sft of toy do not work: adamx is not a valid"),
    ],
)
def test_build_names_mistakes_in_stage_keys(tmp_path, stage, keys, message):
    with pytest.raises(ZooError) as caught:
        build(make(tmp_path, stage, keys), stage)
    assert str(caught.value).startswith(message.format(tmp_path))


def test_run_keys_are_rejected_in_recipes_and_flags(tmp_path):
    for key in RUN_KEYS:
        with pytest.raises(ZooError, match=rf"sft\.yaml has {key}, which is set by the run: remove it"):
            build(make(tmp_path, "sft", {key: "x"}), "sft")
        with pytest.raises(ZooError, match=rf"--sft\.{key} is set by the run: remove it"):
            build(make(tmp_path, "sft"), "sft", {key: "x"})
    for flags in ({"flags": {"env": "x"}}, {"shared_flags": {"env": "x"}}):
        with pytest.raises(ZooError, match=r"--(ppo\.)?env is refused, because it could redirect the Hub"):
            build(make(tmp_path), **flags)


def test_auto_find_batch_size_is_rejected(tmp_path):
    why = "refused, because it would train with a different batch size than the run records"
    for stage in STAGES:
        with pytest.raises(ZooError, match=rf"{stage}\.yaml has auto_find_batch_size, which is {why}"):
            build(make(tmp_path, stage, {"auto_find_batch_size": True}), stage)
        with pytest.raises(ZooError, match=rf"--{stage}\.auto_find_batch_size is {why}"):
            build(make(tmp_path, stage), stage, {"auto_find_batch_size": "true"})
        assert "auto_find_batch_size" not in stage_keys(stage)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"kl_coe": "1"}, "--ppo.kl_coe is not a key of the stage ppo, did you mean 'kl_coef'?"),
        ({"num_ppo": "1"}, "--ppo.num_ppo is not a key of the stage ppo"),
        ({"kl_coef": ["1", "2"]}, "--ppo.kl_coef is ['1', '2'], but it takes a number."),
    ],
)
def test_build_names_mistakes_in_flags_and_rejects_abbreviations(tmp_path, flags, message):
    with pytest.raises(ZooError) as caught:
        build(make(tmp_path), flags=flags)
    assert str(caught.value).startswith(message)


# recipe.yaml


@pytest.mark.parametrize(
    ("shared", "flags", "message"),
    [
        ({"descripton": "x"}, {}, "has descripton, which is not a key of recipe.yaml, did you mean 'description'?"),
        ({"seed": -3}, {}, "seed in .* is -3: give at least 0."),
        ({"evaluation": [1]}, {}, "evaluation in .* is not a mapping"),
        ({"evaluation": {"prompt": 3}}, {}, r"not a key of recipe.yaml, did you mean 'evaluation\.prompts'\?"),
        ({"evaluation": {"prompts": "x"}}, {}, r"evaluation\.prompts in .* is 'x', but it takes a whole number"),
        ({"evaluation": {"samples": 0}}, {}, r"evaluation\.samples in .* is 0: give at least 1."),
        ({}, {"evaluation.samples": "2.5"}, r"--evaluation\.samples is '2.5', but it takes a whole number"),
        ({}, {"kl_coef": "0.2"}, r"--kl_coef is not a key of recipe.yaml: write --ppo\.kl_coef\.$"),
        ({}, {"learning_rate": "1"}, r"write --sft\.learning_rate or --reward\.learning_rate or --ppo\.learning_rate"),
        ({}, {"samples": "2"}, r"--samples is not a key of recipe.yaml: write --evaluation\.samples\.$"),
        ({}, {"kl_cof": "2"}, r"--kl_cof is not a key of recipe.yaml, did you mean 'kl_coef'\?"),
        ({}, {"qqqqqq": "2"}, "a stage's key is written --STAGE.KEY"),
        ({"qqqqqq": 2}, {}, "not a key of recipe.yaml: `rlhf-zoo recipes keys recipe` lists them"),
        ({"evaluation": {"labeled": {"qqqqqq": 2}}}, {}, "not a key of labeled texts: the keys are dataset_name, "),
    ],
)
def test_recipe_config_names_mistakes_in_shared_keys(tmp_path, shared, flags, message):
    with pytest.raises(ZooError, match=message):
        recipe_config(make(tmp_path, shared=shared), flags)


def test_recipe_needs_description_and_stage_file(tmp_path):
    with pytest.raises(ZooError, match=r"recipe\.yaml has no description"):
        recipe_config(Recipe("toy", tmp_path, {}, {}))
    with pytest.raises(ZooError, match=r"The recipe toy has no sft\.yaml, so it has no stage 'sft'\."):
        build(make(tmp_path), "sft")


def test_recipe_config_is_typed(tmp_path):
    shared = {"seed": "3", "corpus_args": {"lines": 5}, "evaluation": {"samples": 2.0}}
    config = recipe_config(make(tmp_path, shared=shared), {"evaluation.prompts": "9", "corpus_args": '{"lines": 6}'})
    assert config == RecipeConfig(
        description="A toy.", seed=3, corpus_args={"lines": 6}, evaluation=EvaluationConfig(prompts=9, samples=2)
    )


def test_log_level_replica_is_passive_unless_set(tmp_path):
    plain, told = (
        build(make(tmp_path, "sft", {"bf16": False, **keys}), "sft") for keys in ({}, {"log_level_replica": "info"})
    )
    assert (plain.trainer.log_level_replica, told.trainer.log_level_replica) == ("passive", "info")
    assert "log_level_replica" not in plain.resolved


def test_recorded_settings_reads_only_named_keys_and_types_them():
    resolved = {"kl_coef": "0.2", "reward_funcs": ["a(b=1,c=2)", "d"], "deepspeed": object(), "strange": 1}
    found = recorded_settings(resolved, "ppo", ["kl_coef", "reward_funcs", "gamma"], where="recipe.json")
    assert found == {"kl_coef": 0.2, "reward_funcs": ["a(b=1,c=2)", "d"], "gamma": 1.0}
    with pytest.raises(ZooError, match=r"kl_coef in recipe\.json is 'x', but it takes a number\."):
        recorded_settings({"kl_coef": "x"}, "ppo", ["kl_coef"], where="recipe.json")


def test_stage_keys_come_from_trainers():
    for stage, own in (("sft", "packing"), ("reward", "center_rewards_coefficient"), ("ppo", "kl_coef")):
        keys = stage_keys(stage)
        assert {own, "learning_rate", "dataset_train_split"} <= keys.keys()
        assert not keys.keys() & {*RUN_KEYS, "env", "deepspeed_plugin"}
    assert stage_keys("ppo")["kl_coef"][:2] == (float, 0.05)


def form(hint: Any) -> Any:
    """The hint, with the members of an enumeration instead of its class: `declared` reads them from the source."""
    if (members := [kind for kind in get_args(hint) if isinstance(kind, enum.EnumType)]) == []:
        return hint
    return [[(member.name, member.value) for member in kind] for kind in members], str in get_args(hint)


@pytest.mark.parametrize("stage", STAGES)
def test_declared_keys_equal_dataclass_fields(stage):
    keys, declared = stage_keys(stage), declared_keys(stage)
    assert keys.keys() == declared.keys()
    for name, (hint, default, meaning) in keys.items():
        assert str(default) == str(declared[name].default), name
        assert form(declared[name].type_hint) in (None, form(hint)), name
        assert HELP.get((stage, name), meaning) == declared[name].help, name
    typed = sum(key.type_hint is not None for key in declared.values())
    assert typed > 0.8 * len(keys), "a wrong value is reported before the dataclasses are imported"


@pytest.mark.parametrize("stage", STAGES)
def test_every_key_is_used_or_rejected(stage, tmp_path):
    """Ours are read by name, the trainer's arrive there, and of trl.ModelConfig's the package reads those it takes."""
    recipe, keys = load_recipe("tiny-world"), stage_keys(stage)
    code = "".join(path.read_text() for path in (Path(rlhf_zoo.__file__).parent).rglob("*.py"))
    trainer = {field.name for field in dataclasses.fields(STAGES[stage].load("trainer"))}
    lora = {name for name in keys if name.startswith(("lora_", "use_rs", "use_do"))}
    for name in keys.keys() - trainer - lora:
        assert re.search(rf'\.{name}\b|get\("{name}"', code), f"{name} is read nowhere"
    assert bool(lora) == ("use_peft" in keys)
    bits = () if stage != "reward" else ("load_in_4bit", "lora_task_type")
    for name in (*bits, "trust_remote_code", "do_train", "local_rank"):
        assert name not in keys
        said = (
            rf"--{stage}\.{name} is (not supported by|not a key of) the stage {stage}|not allowed as a key of a stage"
        )
        with pytest.raises(ZooError, match=said):
            stage_settings(recipe, stage, {name: "1"}, shared_flags={}, output_dir=tmp_path)


# Flags


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {}),
        (["--seed=2"], {"": {"seed": "2"}}),
        (["--key=a=b"], {"": {"key": "a=b"}}),
        (["--key="], {"": {"key": ""}}),
        (["--packing", "--seed", "2"], {"": {"packing": True, "seed": "2"}}),
        (["--ppo.kl_coef", "0.2", "--sft.kl_coef=1"], {"ppo": {"kl_coef": "0.2"}, "sft": {"kl_coef": "1"}}),
        (["--ppo.kl-coef", "-0.2"], {"ppo": {"kl_coef": "-0.2"}}),
        (["--reward_funcs", "a", "b"], {"": {"reward_funcs": ["a", "b"]}}),
        (["--ppo.lr_scheduler_kwargs.x", "2"], {"ppo": {"lr_scheduler_kwargs.x": "2"}}),
    ],
)
def test_parse_flags_groups_flags_by_stage(words, expected):
    assert parse_flags(words) == {"": {}, "sft": {}, "reward": {}, "ppo": {}, **expected}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seed", "2"], "'seed' belongs to no flag: write --key value."),
        (["--"], "'--' belongs to no flag"),
        (["--seed=1", "2"], "'2' belongs to no flag"),
        (["--seed", "1", "--seed", "2"], "--seed is set twice: keep one."),
        (["--ppo.kl_coef", "1", "--ppo.kl-coef", "2"], "--ppo.kl-coef is set twice: keep one."),
    ],
)
def test_parse_flags_rejects_malformed_flags(words, message):
    with pytest.raises(ZooError) as caught:
        parse_flags(words)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("said", "share"),
    [
        ((4, 2, 4), (2, 2, 2)),
        ((3, 2, 4), (3, 1, 2)),  # a process's share of an odd batch: one of the two micro-batches
        ((3, 1, 4), "per_device_train_batch_size of the stage sft is 3, for all 2 processes together"),
        ((4, 1, 3), "per_device_eval_batch_size of the stage sft is 3"),
        ((4, 1, 4, "batch_rebalance"), "which each of 2 processes would apply to its own rows: set it to 'random' or"),
    ],
)
def test_share_of_batch_divides_batch_by_processes(monkeypatch: pytest.MonkeyPatch, said: tuple, share: Any) -> None:
    monkeypatch.setattr(distributed, "process_count", lambda: 2)
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "per_device_eval_batch_size")
    keys = dict(zip((*names, "train_sampling_strategy"), said, strict=False))
    if isinstance(share, str):
        with pytest.raises(ZooError, match=share):
            share_of_batch(keys, "sft")
    else:
        assert share_of_batch(keys, "sft") == dict(zip(names, share, strict=True))
