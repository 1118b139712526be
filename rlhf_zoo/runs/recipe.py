"""Recipes: folders of YAML files. This module finds, reads and copies them; `runs.settings.parse` checks their keys.

A recipe comes with this package, is a folder given by its path, or comes with another package. That package registers
the folder as an entry point of the group `rlhf_zoo.recipes`: NAME = "package.folder". None of its code is imported.

A recipe whose recipe.yaml has `extends: NAME` inherits all files of another recipe (a folder next to it, or a recipe of
a package). The keys in each of its own files override the same keys in the inherited file. The extended recipe may not
extend another recipe.
"""

import importlib.util
import re
import shlex
import shutil
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ZooError
from ..fileio import BadYAML, load_yaml
from ..hub.client.downloads import CARD_FILE, DOWNLOAD_FOLDER, PARTIAL_FOLDER, RECIPE_MARK, find_download
from ..hub.client.links import find_outward_link
from ..plugins import RECIPES, did_you_mean, entry_points, registered_names
from .registry import STAGES

#: Name of recipe.yaml, whose keys all stages share, and its key that names the recipe to extend.
SHARED, EXTENDS = "recipe", "extends"
#: Name of zoo.yaml, which describes the recipe for the table of recipes and for `rlhf-zoo smoke`.
ZOO = "zoo"
_NAME = re.compile(r"[A-Za-z0-9]([\w.-]{0,78}[A-Za-z0-9])?", re.ASCII)


@dataclass(frozen=True)
class Recipe:
    """The keys of a recipe's YAML files.

    Attributes:
        name: Name of the recipe.
        folder: Folder of the recipe.
        shared: Keys of recipe.yaml.
        stages: Stage -> keys of sft.yaml, reward.yaml and ppo.yaml, for the files that exist.
        zoo: Keys of zoo.yaml; {} without that file.
        base: Folder of the extended recipe; None if the recipe extends none.
        package: {name, version} of the package that registers the recipe; {} for a recipe of this package or a folder.
        download_mark: The file or folder that marks the recipe, or the one that it extends, as downloaded; None if
            neither was downloaded. The names in a downloaded recipe are not trusted, so `runs.settings.parse` checks
            them.
    """

    name: str
    folder: Path
    shared: Mapping[str, Any]
    stages: Mapping[str, Mapping[str, Any]]
    zoo: Mapping[str, Any] = field(default_factory=dict)
    base: Path | None = None
    package: Mapping[str, str] = field(default_factory=dict)
    download_mark: Path | None = None

    @property
    def cli_name(self) -> str:
        """The argument RECIPE of a command: the recipe's name or the quoted path of its folder."""
        return self.name if self.package or self.folder.parent == shipped_folder() else shlex.quote(str(self.folder))

    def yaml_files(self, stage: str) -> list[Path]:
        """Returns the files with a stage's keys: the extended recipe's, then the recipe's own.

        Args:
            stage: Name of the stage, or "recipe".

        Returns:
            The files that exist; if there are none, the path that the recipe's own file would have.
        """
        folders = [folder for folder in (self.base, self.folder) if folder is not None]
        paths = [folder / f"{stage}.yaml" for folder in folders]
        return [path for path in paths if path.is_file()] or paths[-1:]

    def yaml_file(self, stage: str) -> Path:
        """Returns the file in which to correct a stage's keys.

        Args:
            stage: Name of the stage, or "recipe".
        """
        return self.yaml_files(stage)[-1]


def is_repository_name(name: str) -> bool:
    """Whether a Hub accepts a name as a namespace, and as a repository's name with "-reward" appended.

    Args:
        name: A namespace, or the name of a recipe.
    """
    return bool(_NAME.fullmatch(name)) and "--" not in name and ".." not in name


def shipped_folder() -> Path:
    """Returns the folder of the recipes that come with the package."""
    package_folder = Path(__file__).parents[1]
    wheel_folder = package_folder / "_recipes"
    return wheel_folder if wheel_folder.is_dir() else package_folder.parent / "recipes"


def list_recipes() -> list[str]:
    """Returns the names of the recipes that come with the package."""
    return sorted(path.parent.name for path in shipped_folder().glob(f"*/{SHARED}.yaml"))


def list_registered_recipes() -> list[str]:
    """Returns the names of the recipes that other packages register, except names that this package uses itself."""
    own_names = list_recipes()
    return [name for name in registered_names(RECIPES) if name not in own_names]


def find_recipe(name: str) -> Path:
    """Finds the folder of a recipe.

    Args:
        name: A path, or the name of a recipe that this package has or another package registers.

    Raises:
        ZooError: There is no such recipe, or several packages register it.
    """
    return _find_with_package(name)[0]


def _find_with_package(name: str) -> tuple[Path, Mapping[str, str]]:
    """Returns a recipe's folder and the package that registers it."""
    folder = Path(name)
    if (folder / f"{SHARED}.yaml").is_file():
        return folder, {}
    if (shipped_folder() / name / f"{SHARED}.yaml").is_file():
        return shipped_folder() / name, {}
    registered_recipes = list_registered_recipes()
    if name in registered_recipes:
        return _find_registered(name)
    hint = did_you_mean(name, [*list_recipes(), *registered_recipes])
    if name and not hint and folder.exists():
        problem = f"The folder {name} holds no {SHARED}.yaml" if folder.is_dir() else f"{name} is a file"
        raise ZooError(f"{problem}: name the folder of a recipe, or one that `rlhf-zoo recipes list` shows.")
    remedy = hint or ": `rlhf-zoo recipes list` shows them, and `rlhf-zoo new` writes yours. Or name a folder."
    raise ZooError(f"There is no recipe {name!r}{remedy}")


def _find_registered(name: str) -> tuple[Path, dict[str, str]]:
    dists = {entry.value: entry.dist for entry in entry_points(RECIPES, name)}
    dist_names = {location: f"{dist.name} {dist.version}" if dist else location for location, dist in dists.items()}
    if len(dists) > 1:
        raise ZooError(
            f"Installed packages register the recipe {name!r} more than once, "
            f"{' and '.join(sorted(dist_names.values()))}: uninstall one of them, or pass the recipe's folder."
        )
    [(location, dist)] = dists.items()
    import_name, *subfolders = location.split(".")
    try:
        spec = importlib.util.find_spec(import_name)  # for a top-level name, find_spec imports nothing
    except (ImportError, ValueError):
        spec = None
    package_folders = spec.submodule_search_locations if spec is not None else None
    for package_folder in package_folders or []:
        folder = Path(package_folder, *subfolders)
        if (folder / f"{SHARED}.yaml").is_file():
            return folder, {"name": dist.name, "version": dist.version} if dist else {}
    raise ZooError(
        f"The package {dist_names[location]} registers the recipe {name!r} as {location}, but that folder has no "
        f"{SHARED}.yaml: install a version that has it, or uninstall the package."
    )


def load_recipe(name: str) -> Recipe:
    """Reads a recipe's files.

    Args:
        name: As in `find_recipe`.

    Raises:
        ZooError: A file is missing, is not a mapping or repeats a key; the recipe's name is not valid in the name of a
            repository; or the extended recipe cannot be used.
    """
    folder, package = _find_with_package(name)
    recipe_name = name if package else folder.resolve().name
    if not is_repository_name(recipe_name):
        subject = f"The recipe of {package['name']}" if package else "The recipe's folder"
        raise ZooError(
            f"{subject} is called {recipe_name!r}, which is not a valid name for its repositories: use at most 80 "
            "letters, digits, '-', '_' and '.', with a letter or digit at both ends and without '--' or '..'."
        )
    files = own_files = _read_files(folder)
    base_folder: Path | None = None
    base = own_files[SHARED].pop(EXTENDS, None)
    if base is not None:
        base_folder = _find_base(
            folder, str(base), is_downloaded=not package and _find_download_mark(folder) is not None
        )
        files = _read_files(base_folder)
        if EXTENDS in files[SHARED]:
            raise ZooError(
                f"{folder / SHARED}.yaml extends {base}, which itself extends {files[SHARED][EXTENDS]}: extend "
                f"{files[SHARED][EXTENDS]} instead."
            )
        for file_name, keys in own_files.items():
            files[file_name] = {**files.get(file_name, {}), **keys}
    stages = {stage: files[stage] for stage in STAGES if stage in files}
    folders = [] if package else [path for path in (folder, base_folder) if path is not None]
    download_mark = next(filter(None, map(_find_download_mark, folders)), None)
    return Recipe(recipe_name, folder, files[SHARED], stages, files.get(ZOO, {}), base_folder, package, download_mark)


def _find_base(folder: Path, name: str, *, is_downloaded: bool) -> Path:
    """Returns the folder of the recipe that a recipe extends.

    A downloaded recipe may extend only a recipe next to it or an installed recipe, because a recipe elsewhere on this
    machine may be private. Otherwise this raises ZooError.
    """
    sibling = folder.resolve().parent / name
    if is_downloaded and (not is_repository_name(name) or _is_elsewhere(sibling)):
        raise ZooError(
            f"{folder / SHARED}.yaml, which was downloaded, extends {name!r:.200}, but may extend only a recipe "
            "next to it or an installed recipe: copy the keys that you trust into your own recipe."
        )
    return sibling if (sibling / f"{SHARED}.yaml").is_file() else find_recipe(name)


def _is_elsewhere(sibling: Path) -> bool:
    # A sibling may be a link. Without one, `find_recipe` would take its name for a path in the current directory.
    return sibling.resolve() != sibling if sibling.exists() else Path(sibling.name).exists()


def _find_download_mark(folder: Path) -> Path | None:
    return None if folder.resolve().parent == shipped_folder().resolve() else find_download(folder)


def _read_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the keys of each YAML file in a recipe's folder, by the file's name without its extension."""
    names = [SHARED, *(name for name in (*STAGES, ZOO) if (folder / f"{name}.yaml").is_file())]
    return {name: read_mapping(folder / f"{name}.yaml") for name in names}


def copy_recipe(name: str, target: Path) -> Path:
    """Copies a recipe's folder for editing. A copy of a download stays marked until the user removes the mark.

    Args:
        name: As in `find_recipe`.
        target: The new folder.

    Raises:
        ZooError: The target exists or cannot be written, or a download contains a link that leads out of its folder.
    """
    folder = find_recipe(name)
    if target.exists():
        raise ZooError(f"{target} already exists: choose another name, or remove it first.")
    is_downloaded = _find_download_mark(folder) is not None
    if is_downloaded and (link := find_outward_link(folder, include_hidden=True)) is not None:
        # The copy would contain the file behind the link, which the recipe's stages may read and publish.
        raise ZooError(f"{folder} was downloaded, and its link {link} leads out of the folder: remove the link first.")
    # The copy gets its own mark, so that removing that one file is enough.
    marks = (RECIPE_MARK, PARTIAL_FOLDER, CARD_FILE, DOWNLOAD_FOLDER.parts[0])
    try:
        target.mkdir(parents=True)
        if is_downloaded:  # written first, because the copy may be interrupted
            (target / RECIPE_MARK).write_text(
                "Copied from a download: read the recipe, and remove this file if you trust it.\n"
            )
        shutil.copytree(folder, target, ignore=shutil.ignore_patterns("__pycache__", *marks), dirs_exist_ok=True)
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise ZooError(f"{target} cannot be written ({error.strerror or error}): choose another place.") from error
    return target


def read_mapping(path: Path) -> dict[str, Any]:
    """Reads the keys of a YAML file.

    Args:
        path: The file.

    Returns:
        The keys; {} for an empty file.

    Raises:
        ZooError: The file cannot be read, is not a mapping or repeats a key.
    """
    try:
        content = load_yaml(path.read_text(encoding="utf-8"), loader=_strict_loader(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ZooError(f"{path} cannot be read ({error}): correct the file or its permissions.") from error
    except BadYAML as error:
        line = f", line {error.line}" if error.line is not None else ""
        raise ZooError(f"{path}{line} is not valid YAML ({error.reason}): correct it.") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ZooError(f"{path} holds a {type(content).__name__}: a recipe is a mapping of keys to values.")
    return content


def _strict_loader(path: Path) -> Any:
    """Returns the YAML loader of recipes, whose messages name `path`."""
    import yaml

    date = "tag:yaml.org,2002:timestamp"

    class StrictLoader(yaml.SafeLoader):
        """Reads dates as text, and refuses repeated keys. YAML would silently keep the last value of a repeated key."""

        yaml_implicit_resolvers = {
            first: [(tag, regexp) for tag, regexp in resolvers if tag != date]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
            keys = set()
            for key_node, _ in node.value:
                if key_node.tag == "tag:yaml.org,2002:merge":
                    continue
                key = self.construct_object(key_node, deep=True)
                if not isinstance(key, Hashable):
                    continue  # super() reports it
                if key in keys:
                    line = key_node.start_mark.line + 1
                    raise ZooError(f"{path}, line {line}, repeats the key {key!r}: keep one of them.")
                keys.add(key)
            return super().construct_mapping(node, deep)

    return StrictLoader
