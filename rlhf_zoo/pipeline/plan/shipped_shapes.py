"""Lists the models that a recipe uses, and reads recipes/shapes.yaml, which has the shapes of many of them."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ...fileio import parse_json
from ...runs.recipe import Recipe, read_mapping, shipped_folder
from ...runs.registry import STAGES, is_ensemble_member, reward_names
from .cache import digest


@cache
def shipped_shapes() -> Mapping[str, Mapping[str, Any]]:
    """Reads recipes/shapes.yaml, which ships with rlhf-zoo: repository -> shape, for models that recipes use."""
    return read_mapping(shipped_folder() / "shapes.yaml")


def model_names(recipe: Recipe, flags: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the folders and repositories of models that a recipe uses but does not train.

    Args:
        recipe: The recipe.
        flags: Stage -> key -> value.
    """
    values: list[Any] = []
    for stage, stage_keys in recipe.stages.items():
        keys = {**stage_keys, **flags.get(stage, {})}
        values += [keys.get("model_name_or_path"), keys.get("value_model_name_or_path")]
        values += reward_names(keys.get("reward_model_path")) if stage == "ppo" else []
    names = [str(name) for name in values if name is not None]
    return [name for name in names if name not in STAGES and not is_ensemble_member(name)]


def shape_digests(names: Sequence[str]) -> dict[str, str] | None:
    """Returns a digest for the shape of each model. A cached plan is valid as long as the digests stay the same.

    Args:
        names: Folders and repositories of models.

    Returns:
        Name -> digest of the configuration in a folder, or of a repository's entry in shapes.yaml. None if a Hub, an
        adapter, a GGUF file or a model's own code determines a shape.
    """
    shapes = shipped_shapes() if names else {}
    digests: dict[str, str] = {}
    for name in names:
        if Path(name).is_dir():
            shape_digest = _config_digest(Path(name))
        else:
            shape = shapes.get(name.partition("@")[0])
            shape_digest = None if shape is None else digest(shape)
        if shape_digest is None:
            return None
        digests[name] = shape_digest
    return digests


def _config_digest(folder: Path) -> str | None:
    """Returns the digest of a folder's config.json; None if the model's shape may depend on more than this file."""
    try:
        content = (folder / "config.json").read_bytes()
        config = parse_json(content)
    except (OSError, ValueError):
        return None
    # `configuration_files` names more files, and `auto_map` names code.
    needs_more_files = not isinstance(config, dict) or {"auto_map", "configuration_files"} & config.keys()
    return (
        None if needs_more_files or (folder / "adapter_config.json").exists() else hashlib.sha256(content).hexdigest()
    )
