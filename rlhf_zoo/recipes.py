"""Recipes: folders of YAML files. They are found, read and copied here; `stages.settings` checks their keys."""

from __future__ import annotations

import re
import shutil
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ZooError
from .plain_yaml import BadYAML, load_yaml
from .plugins import did_you_mean
from .stage import STAGES

__all__ = ["Recipe", "copy_recipe", "find_recipe", "is_repository_name", "list_recipes", "load_recipe"]

SHARED = "recipe"
_NAME = re.compile(r"[A-Za-z0-9]([\w.-]{0,78}[A-Za-z0-9])?", re.ASCII)


@dataclass(frozen=True)
class Recipe:
    """`shared`: the keys of recipe.yaml; `stages`: those of sft.yaml, reward.yaml, ppo.yaml, where there are any."""

    name: str
    folder: Path
    shared: Mapping[str, Any]
    stages: Mapping[str, Mapping[str, Any]]

    def source(self, stage: str) -> Path:
        """The file that a stage's keys come from; the stage may be 'recipe'."""
        return self.folder / f"{stage}.yaml"


def is_repository_name(name: str) -> bool:
    """Whether a Hub would take this as a namespace, or as a repository's name with "-reward" after it."""
    return bool(_NAME.fullmatch(name)) and "--" not in name and ".." not in name


def _shipped() -> Path:
    inside = Path(__file__).parent / "_recipes"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "recipes"


def list_recipes() -> list[str]:
    """The names of the recipes that come with the package."""
    return sorted(path.parent.name for path in _shipped().glob(f"*/{SHARED}.yaml"))


def find_recipe(name: str) -> Path:
    """The folder of a recipe: one that comes with the package, or a path. Raises ZooError for neither."""
    folder = Path(name)
    if (folder / f"{SHARED}.yaml").is_file():
        return folder
    if (_shipped() / name / f"{SHARED}.yaml").is_file():
        return _shipped() / name
    known = list_recipes()
    hint = did_you_mean(name, known) or f": `rlhf-zoo recipes list` shows {', '.join(known)}, or give a folder."
    raise ZooError(f"There is no recipe {name!r}{hint}")


def load_recipe(name: str) -> Recipe:
    """Reads a recipe's files. Raises ZooError for one that is missing, is not a mapping, or says a key twice."""
    folder = find_recipe(name)
    title = folder.resolve().name
    if not is_repository_name(title):
        raise ZooError(
            f"The recipe's folder is called {title!r}, and its repositories could not be: use at most 80 letters, "
            "digits, '-', '_' and '.', with a letter or digit at both ends."
        )
    stages = {stage: _read(folder / f"{stage}.yaml") for stage in STAGES if (folder / f"{stage}.yaml").is_file()}
    return Recipe(title, folder, _read(folder / f"{SHARED}.yaml"), stages)


def copy_recipe(name: str, target: Path) -> Path:
    """Copies a recipe's folder, to be edited. Raises ZooError when the target is there already."""
    source = find_recipe(name)
    if target.exists():
        raise ZooError(f"{target} is there already: choose another name, or remove it first.")
    try:
        shutil.copytree(source, target)
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise ZooError(f"{target} cannot be written ({error.strerror or error}): choose another place.") from error
    return target


def _read(path: Path) -> dict[str, Any]:
    try:
        content = load_yaml(path.read_text(encoding="utf-8"), loader=_strict(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ZooError(f"{path} cannot be read ({error}): mend the file or its permissions.") from error
    except BadYAML as error:
        line = f", line {error.line}" if error.line is not None else ""
        raise ZooError(f"{path}{line} is not valid YAML ({error.reason}): mend it.") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ZooError(f"{path} holds a {type(content).__name__}: a recipe is a mapping of keys to values.")
    return content


def _strict(path: Path) -> Any:
    """A loader for recipes, of the file `path`."""
    import yaml

    date = "tag:yaml.org,2002:timestamp"

    class Strict(yaml.SafeLoader):
        """Refuses a mapping that says a key twice, of which YAML would silently keep the last. A date is text."""

        yaml_implicit_resolvers = {
            first: [(tag, regexp) for tag, regexp in resolvers if tag != date]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
            seen = set()
            for key_node, _ in node.value:
                if key_node.tag == "tag:yaml.org,2002:merge":
                    continue
                key = self.construct_object(key_node, deep=True)
                if not isinstance(key, Hashable):
                    continue  # super() says so
                if key in seen:
                    line = key_node.start_mark.line + 1
                    raise ZooError(f"{path}, line {line}, says {key!r} a second time: keep one of them.")
                seen.add(key)
            return super().construct_mapping(node, deep)

    return Strict
