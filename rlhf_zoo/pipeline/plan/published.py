"""Lists the models that a recipe names, and reads the shapes that this package knows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...runs.recipe import Recipe, read_mapping, shipped
from ...runs.registry import STAGES, is_member, reward_names


def published_shapes() -> Mapping[str, Mapping[str, Any]]:
    """Returns repository -> shape of models that recipes use, from recipes/shapes.yaml."""
    return read_mapping(shipped() / "shapes.yaml")


def model_names(recipe: Recipe, flags: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the folders and repositories of models that a recipe uses but does not train.

    Args:
        recipe: The recipe.
        flags: Stage -> key -> value.
    """
    sources: list[Any] = []
    for stage, stage_keys in recipe.stages.items():
        keys = {**stage_keys, **flags.get(stage, {})}
        sources += [keys.get("model_name_or_path"), keys.get("value_model_name_or_path")]
        sources += reward_names(keys.get("reward_model_path")) if stage == "ppo" else []
    names = [str(name) for name in sources if name is not None]
    return [name for name in names if name not in STAGES and not is_member(name)]


def all_published(names: list[str]) -> bool:
    """Whether recipes/shapes.yaml has the shape of every model, so that neither a file nor a Hub can change it.

    Args:
        names: Names of models.
    """
    shapes = published_shapes() if names else {}
    return all(name.partition("@")[0] in shapes and not Path(name).is_dir() for name in names)
