"""Every numeric key of every stage at its bounds: it trains, or raises a readable error before training."""

import math
import typing
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trainer_fixture import good, make_policy, make_reward_model, make_tokenizer, prompt_rows

from rlhf_zoo.errors import ZooError
from rlhf_zoo.fields import LIMITS, check_limits
from rlhf_zoo.pipeline.stages.trainers import make_trainer
from rlhf_zoo.runs.recipe import Recipe
from rlhf_zoo.runs.registry import STAGES
from rlhf_zoo.runs.settings.parse import StageSettings, recipe_keys, stage_keys, stage_settings

pytestmark = pytest.mark.attack

# Any finite number is one: the penalties and scores of PPO, and the weights of its rewards.
UNBOUNDED = {"missing_eos_penalty", "missing_eos_score", "reward_weights"}
# Keys that another one must be given with.
WITH: dict[str, dict[str, Any]] = {
    "dataloader_prefetch_factor": {"dataloader_num_workers": 1},
    "eval_steps": {"eval_strategy": "steps"},
    "eval_delay": {"eval_strategy": "steps", "eval_steps": 1},
    "held_out_share": {"dataset_test_split": None},
    "kl_horizon": {"kl_target": 1.0},
    "per_device_eval_batch_size": {"eval_strategy": "steps", "eval_steps": 1},
    "eval_accumulation_steps": {"eval_strategy": "steps", "eval_steps": 1},
}
#: One update over the toys.
TOYS: dict[str, dict[str, Any]] = {
    "sft": {"bf16": False, "max_steps": 1, "per_device_train_batch_size": 4, "gradient_checkpointing": False},
    "reward": {"bf16": False, "max_steps": 1, "per_device_train_batch_size": 4, "gradient_checkpointing": False},
    "ppo": {
        "max_steps": 1, "per_device_train_batch_size": 4, "num_ppo_epochs": 1, "response_length": 4,
        "reward_model_path": None, "reward_funcs": ["length"],
    },
}  # fmt: skip


def numeric_keys(stage: str) -> dict[str, type]:
    """The keys of a stage, or of recipe.yaml, that take a number: name -> int or float."""
    keys = recipe_keys() if stage == "recipe" else stage_keys(stage)
    kinds_of_key = {}
    for name, (hint, _, _) in keys.items():
        named = typing.get_origin(hint) is dict  # numbers of columns, which the rows bound
        kinds = {hint, *typing.get_args(hint)} & {int, float} if not named else set()
        if kinds or list[float] in {hint, *typing.get_args(hint)}:
            kinds_of_key[name] = int if int in kinds and float not in kinds else float
    return kinds_of_key


def candidate_values(name: str, kind: type) -> list[Any]:
    """Numbers at, just inside and just outside the bounds of a key, and those that nothing takes."""
    limit = LIMITS.get(name)
    bounds = [bound for bound in (limit.low, limit.high) if math.isfinite(bound)] if limit else []
    if kind is int:
        near = [int(bound) + step for bound in bounds for step in (-1, 0, 1)]
        return list(dict.fromkeys([*near, -1, 0, 1, 2, 3, 2**31, 2**40, 2**64, -(2**70), 10**400, "1e400", "nan"]))
    near = [x for bound in bounds for x in (bound, math.nextafter(bound, -math.inf), math.nextafter(bound, math.inf))]
    return list(dict.fromkeys([*near, -1, 0, 0.5, 1, 1.5, 1e-320, 1e300, "inf", "-inf", "nan", "1e400", 10**400]))


def build(stage: str, keys: dict[str, Any], folder: Path = Path("runs")) -> StageSettings:
    recipe = Recipe("toy", folder, {"description": "A toy."}, {stage: {"use_cpu": True, **keys}})
    return stage_settings(recipe, stage, {}, shared_flags={}, output_dir=folder / stage)


def try_settings(stage: str, keys: dict[str, Any], folder: Path = Path("runs")) -> StageSettings | None:
    """The settings, or None where they are refused, in one sentence."""
    try:
        return build(stage, keys, folder)
    except ZooError as error:
        message = str(error)
        assert message.endswith((".", "?")) and "\n" not in message and len(message) < 600, message
        return None


def train_one_update(built: StageSettings) -> None:
    """One update over the toys, with the trainer of the stage."""
    tokenizer, text = make_tokenizer(), ["abcdef", "bcdefg", "cdefgh", "defghi"] * 2
    if built.stage == "sft":
        from trl import SFTTrainer, get_peft_config

        rows = Dataset.from_dict({"text": text})
        own = {"model": make_policy(), "peft_config": get_peft_config(built.model)}
        parts = {**own, "train_dataset": rows, "eval_dataset": rows, "processing_class": tokenizer}
        trainer = make_trainer(SFTTrainer, built, **parts)
    elif built.stage == "reward":
        from trl import RewardTrainer

        rows = Dataset.from_dict({"prompt": text, "chosen": ["g"] * 8, "rejected": ["a"] * 8})
        parts = {"train_dataset": rows, "eval_dataset": rows, "processing_class": tokenizer}
        trainer = make_trainer(RewardTrainer, built, model=make_reward_model(), **parts)
    else:
        from rlhf_zoo.ppo.trainer import PPOTrainer

        parts = {"train_dataset": prompt_rows(8), "eval_dataset": prompt_rows(4), "processing_class": tokenizer}
        trainer = PPOTrainer(args=built.trainer, model=make_policy(), reward_funcs=good, **parts)
    trainer.train()
    assert trainer.state.global_step >= 1


@pytest.fixture(autouse=True)
def plain_logs() -> None:
    import transformers

    transformers.utils.logging.set_verbosity_error()


def test_every_numeric_key_has_limits() -> None:
    keys = {name.removeprefix("evaluation.") for stage in ("recipe", *STAGES) for name in numeric_keys(stage)}
    assert keys - LIMITS.keys() == UNBOUNDED and LIMITS.keys() <= keys


@pytest.mark.parametrize("stage", STAGES)
def test_values_at_limits_are_accepted_or_named(stage: str) -> None:
    """Settings within the bounds come out, or the sentence names the key: for a value outside, it does."""
    for name, kind in numeric_keys(stage).items():
        base = {**TOYS[stage], **WITH.get(name, {})}
        if name == "total_episodes":
            base.pop("max_steps")
        for value in candidate_values(name, kind):
            built = try_settings(stage, {**base, name: [value] if name == "reward_weights" else value})
            if built is not None:
                check_limits(name, getattr(built.data, name, getattr(built.trainer, name, None)))
        outside = [] if name in UNBOUNDED | {"max_steps"} else [-1]
        no_number = [] if name == "pad_to_multiple_of" else ["nan", "1e400"]  # which takes text
        for bad in (-(10**400), *outside, *no_number):
            with pytest.raises(ZooError, match=f"^{name} in .* is "):
                build(stage, {**base, name: [bad] if name == "reward_weights" else bad})


@pytest.mark.parametrize(
    ("stage", "keys", "message"),
    [
        ("sft", {"max_length": 0}, "max_length in runs/sft.yaml is 0: "),
        ("ppo", {"gamma": 0}, "gamma in runs/ppo.yaml is 0: "),
        ("ppo", {"dual_clip": 1}, "dual_clip in runs/ppo.yaml is 1: "),
        ("sft", {"adam_beta2": 1.0}, "adam_beta2 in runs/sft.yaml is 1.0: "),
        ("sft", {"save_steps": 1.5}, "The settings of the stage sft of toy do not work: --save_steps must be an"),
        ("ppo", {"neftune_noise_alpha": 0}, "neftune_noise_alpha is 0"),
        ("ppo", {"kl_coef": 10**5000}, "kl_coef in runs/ppo.yaml is too large to show, but it takes whole numbers"),
    ],
)  # fmt: skip
def test_limit_errors_name_key_and_file(stage: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ZooError) as caught:
        build(stage, {**TOYS[stage], **keys})
    assert str(caught.value).startswith(message)


# Values that no key may have


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": "b\0c"}, "text without NUL characters or lone surrogates"),
        ({1: 2}, "mappings whose keys are text"),
        ({"a": b"x"}, "text, numbers, true and false, lists and mappings"),
        (nested(65), "at most 64 levels of nesting"),
        ({"a": 2**70}, "whole numbers of at most 63 bits"),
        ("{" + '"a":{' * 50_000, "YAML or JSON (it is nested more than 63 deep)"),
        ('{"a": ' + "9" * 5000 + "}", "YAML or JSON (a number has more than 400 characters)"),
        ('{"a": "\\u0000"}', "text without NUL characters or lone surrogates"),
    ],
)  # fmt: skip
def test_settings_reject_values_that_run_json_cannot_hold(value: Any, expected: str) -> None:
    with pytest.raises(ZooError) as caught:
        build("sft", {"lr_scheduler_kwargs": value})
    message = str(caught.value)
    assert message.startswith("lr_scheduler_kwargs in runs/sft.yaml is ") and message.endswith(
        f"but it takes {expected}."
    )
    assert len(message) < 400


# Accepted values train


@pytest.mark.parametrize(
    ("stage", "name", "value"),
    [
        ("sft", "max_length", 2), ("sft", "save_steps", 0.5), ("sft", "adam_beta1", 0), ("sft", "seed", 2**32 - 1),
        ("reward", "gradient_accumulation_steps", 2**31 - 1), ("reward", "warmup_steps", 2**31 - 1),
        ("ppo", "response_length", 1), ("ppo", "temperature", 1e-4), ("ppo", "logging_steps", 1e-320),
    ],
)  # fmt: skip
def test_extreme_accepted_values_train(stage: str, name: str, value: Any, tmp_path: Path) -> None:
    train_one_update(build(stage, {**TOYS[stage], name: value}, tmp_path))


@pytest.mark.parametrize(
    ("stage", "keys", "message"),
    [
        (
            "reward",
            {"max_length": 2},
            "max_length 2 of the stage reward leaves no example to train on: raise max_length",
        ),
        (
            "sft",
            {"router_aux_loss_coef": 1},
            "The settings of the stage sft do not work: `router_aux_loss_coef` is set",
        ),
    ],
)
def test_trainer_errors_are_readable(stage: str, keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ZooError) as caught:
        train_one_update(build(stage, {**TOYS[stage], **keys}, tmp_path))
    assert str(caught.value).startswith(message)
