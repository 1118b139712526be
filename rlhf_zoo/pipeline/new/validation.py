"""Checks a recipe that `new` wrote, without the trainers' packages, whose import takes longer than all other checks."""

from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

from ...ppo.key_checks import check_keys, check_update
from ...runs.checks.splits import check_forms
from ...runs.recipe import Recipe, load_recipe
from ...runs.registry import STAGES
from ...runs.settings.declared import declared_keys, model_defaults, refused_keys
from ...runs.settings.model_keys import check_model
from ...runs.settings.parse import RecipeConfig, StageSettings, check_combinations, recipe_config
from ...runs.settings.values import convert_keys, type_hints


def check_recipe(folder: Path) -> None:
    """Checks every key of a recipe, keys that must work together, and that each stage can read its data.

    The trainers' configurations, which check the values of trl's and transformers' own keys, are not constructed here,
    because these values come from `new`'s templates. `doctor`, `recipes validate` and `run` construct them.

    Args:
        folder: The recipe's folder.

    Raises:
        ZooError: The recipe is not valid.
    """
    recipe = load_recipe(str(folder))
    shared = recipe_config(recipe)
    check_forms(shared, {stage: _settings(recipe, stage, shared) for stage in recipe.stages})


def _settings(recipe: Recipe, stage: str, shared: RecipeConfig) -> StageSettings:
    declarations = declared_keys(stage)
    defaults = {name: key.default for name, key in declarations.items()}
    own_classes = STAGES[stage].load("arguments"), STAGES[stage].load("release")
    hints = {name: key.type_hint for name, key in declarations.items()}
    # `coerce` takes any text for "Enum | str", because the trainers' configurations check it.
    enums = {name: enum for name, hint in hints.items() if (enum := _enum_of(hint)) is not None}
    hints |= enums
    for data_class in own_classes:
        hints |= type_hints(data_class)
    values = convert_keys(
        recipe.stages[stage],
        hints,
        str(recipe.yaml_file(stage)),
        subject=f"the stage {stage}",
        refused_names=refused_keys(stage),
    )
    data, release = (
        data_class(**{name: value for name, value in values.items() if name in type_hints(data_class)})
        for data_class in own_classes
    )
    # Has the attributes of trl's model configuration and of the trainer's, and stands for both below.
    keys = SimpleNamespace(**{**model_defaults(), **defaults, **values})
    vars(keys).update({name: enum(getattr(keys, name)) for name, enum in enums.items()})
    check_model(keys, stage, critic=getattr(keys, "critic", None))
    check_combinations(stage, data, keys, keys, release)
    if stage == "ppo":
        check_keys(keys, defaults)
        prompts = keys.per_device_train_batch_size * keys.gradient_accumulation_steps
        check_update(keys, prompts * keys.num_generations)
    return StageSettings(stage, shared, data, keys, keys, release, values.get("save_total_limit"), values)


def _enum_of(hint: Any) -> type[Enum] | None:
    """Returns the enumeration in a type such as "Enum | str"; None if there is none."""
    return next((kind for kind in get_args(hint) if isinstance(kind, type) and issubclass(kind, Enum)), None)
