"""Recipes: folders of YAML files. They are found, read and copied here; `runs.settings.parse` checks their keys.

They come with this package, lie in a folder that is named by its path, or come with another package that registers the
folder in which one of them lies as an entry point of `rlhf_zoo.runs.recipe`: NAME = "package.folder". Nothing of that
package is imported for it.

A recipe.yaml that says `extends: NAME` has the keys of that recipe, a folder beside it or one of the package, and its
own on top of them, file by file. That one may not extend another.
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
from ..hub.client.data_gate import find_outward_link
from ..hub.client.downloads import CARD, DOWNLOADED, MARK, PARTIAL, find_download
from ..plugins import RECIPES, did_you_mean, entry_points, registered
from .registry import STAGES

SHARED, EXTENDS = "recipe", "extends"
#: Of a recipe for a public model: what was published of it, and its miniature; `zoo_table` and `miniature` read it.
ZOO = "zoo"
_NAME = re.compile(r"[A-Za-z0-9]([\w.-]{0,78}[A-Za-z0-9])?", re.ASCII)


@dataclass(frozen=True)
class Recipe:
    """`shared`: the keys of recipe.yaml; `stages`: those of sft.yaml, reward.yaml, ppo.yaml, where there are any.

    zoo: of zoo.yaml, {} where there is none. base: the folder of the recipe that it extends. package: name and version
    of the package that registers it; {} of one of ours, and of a folder. download: what shows that its folder was
    downloaded, None of any other: what it names is then a stranger's word, and `runs.settings.parse` reads it so.
    """

    name: str
    folder: Path
    shared: Mapping[str, Any]
    stages: Mapping[str, Mapping[str, Any]]
    zoo: Mapping[str, Any] = field(default_factory=dict)
    base: Path | None = None
    package: Mapping[str, str] = field(default_factory=dict)
    download: Path | None = None

    @property
    def called(self) -> str:
        """How a command names it: by its name, or by the path that it was found at."""
        return self.name if self.package or self.folder.parent == shipped() else shlex.quote(str(self.folder))

    def sources(self, stage: str) -> list[Path]:
        """The files that a stage's keys come from, the recipe's own last; the stage may be 'recipe'."""
        folders = [folder for folder in (self.base, self.folder) if folder is not None]
        there = [path for folder in folders if (path := folder / f"{stage}.yaml").is_file()]
        return there or [self.folder / f"{stage}.yaml"]

    def source(self, stage: str) -> Path:
        """The file that a mistake in a stage's keys is mended in."""
        return self.sources(stage)[-1]


def is_repository_name(name: str) -> bool:
    """Whether a Hub would take this as a namespace, or as a repository's name with "-reward" after it."""
    return bool(_NAME.fullmatch(name)) and "--" not in name and ".." not in name


def shipped() -> Path:
    """The folder of the recipes that come with the package."""
    package = Path(__file__).parents[1]
    inside = package / "_recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def list_recipes() -> list[str]:
    """The names of the recipes that come with the package."""
    return sorted(path.parent.name for path in shipped().glob(f"*/{SHARED}.yaml"))


def list_others() -> list[str]:
    """The names of the recipes that other packages register, but for those that are taken by ours."""
    ours = list_recipes()
    return [name for name in registered(RECIPES) if name not in ours]


def find_recipe(name: str) -> Path:
    """The folder of a recipe: a path, one that comes with the package, or one that another package registers.

    Raises ZooError for none of these.
    """
    return _find(name)[0]


def _find(name: str) -> tuple[Path, Mapping[str, str]]:
    """A recipe's folder, and the package that registers it."""
    folder = Path(name)
    if (folder / f"{SHARED}.yaml").is_file():
        return folder, {}
    if (shipped() / name / f"{SHARED}.yaml").is_file():
        return shipped() / name, {}
    if name in (others := list_others()):
        return _registered(name)
    hint = did_you_mean(name, [*list_recipes(), *others])
    raise ZooError(f"There is no recipe {name!r}{hint or ': `rlhf-zoo recipes list` shows them, or give a folder.'}")


def _registered(name: str) -> tuple[Path, dict[str, str]]:
    packages = {entry.value: entry.dist for entry in entry_points(RECIPES, name)}
    by = {where: f"{dist.name} {dist.version}" if dist else where for where, dist in packages.items()}
    if len(by) > 1:
        raise ZooError(
            f"Installed packages register the recipe {name!r} more than once, {' and '.join(sorted(by.values()))}: "
            "uninstall one, or give the folder of the one that you mean."
        )
    [(where, dist)] = packages.items()
    top, *below = where.split(".")
    try:
        spec = importlib.util.find_spec(top)  # which imports nothing
    except (ImportError, ValueError):
        spec = None
    for folder in (spec.submodule_search_locations if spec is not None else None) or []:
        if (found := Path(folder, *below) / f"{SHARED}.yaml").is_file():
            return found.parent, {"name": dist.name, "version": dist.version} if dist else {}
    raise ZooError(
        f"The package {by[where]} registers the recipe {name!r} as {where}, and there is no {SHARED}.yaml in such a "
        "folder: install a version that has it, or uninstall the package."
    )


def load_recipe(name: str) -> Recipe:
    """Reads a recipe's files. Raises ZooError for one that is missing, is not a mapping, or says a key twice."""
    folder, package = _find(name)
    title = name if package else folder.resolve().name
    if not is_repository_name(title):
        called = f"The recipe of {package['name']}" if package else "The recipe's folder"
        raise ZooError(
            f"{called} is called {title!r}, and its repositories could not be: use at most 80 letters, "
            "digits, '-', '_' and '.', with a letter or digit at both ends."
        )
    files = _files(folder)
    below: Path | None = None
    base = files[SHARED].pop(EXTENDS, None)
    if base is not None:
        below = _base(folder, str(base), downloaded=not package and _is_downloaded(folder))
        own, files = files, _files(below)
        if EXTENDS in files[SHARED]:
            raise ZooError(
                f"{folder / SHARED}.yaml extends {base}, which extends {files[SHARED][EXTENDS]}: extend that one "
                "instead."
            )
        for name, keys in own.items():
            files[name] = {**files.get(name, {}), **keys}
    stages = {stage: files[stage] for stage in STAGES if stage in files}
    places = [place for place in (folder, below) if place is not None and place.resolve().parent != shipped().resolve()]
    marks = [] if package else filter(None, map(find_download, places))
    return Recipe(title, folder, files[SHARED], stages, files.get(ZOO, {}), below, package, next(iter(marks), None))


def _base(folder: Path, name: str, *, downloaded: bool) -> Path:
    """The folder of the recipe that one extends. Raises ZooError where a download would extend a recipe of its user's.

    Only what lies beside it came with it; a recipe elsewhere on this machine may be private.
    """
    beside = folder.resolve().parent / name
    if downloaded:
        inside = is_repository_name(name) and (not beside.exists() or beside.resolve() == beside)
        if not inside or (not beside.exists() and Path(name).exists()):
            raise ZooError(
                f"{folder / SHARED}.yaml, which was downloaded, extends {name!r:.200}, and it may extend only a recipe "
                "beside it or one that is installed: copy the keys that you trust into a recipe of your own."
            )
    return beside if (beside / f"{SHARED}.yaml").is_file() else find_recipe(name)


def _is_downloaded(folder: Path) -> bool:
    return folder.resolve().parent != shipped().resolve() and find_download(folder) is not None


def _files(folder: Path) -> dict[str, dict[str, Any]]:
    """The YAML files of a recipe's folder, by name without the ending; recipe.yaml is one of them."""
    names = [SHARED, *(name for name in (*STAGES, ZOO) if (folder / f"{name}.yaml").is_file())]
    return {name: read_mapping(folder / f"{name}.yaml") for name in names}


def copy_recipe(name: str, target: Path) -> Path:
    """Copies a recipe's folder, to be edited; the copy of a download is marked as one until its user has read it.

    Raises ZooError when the target is there already, and for a download with links to outside of it.
    """
    source = find_recipe(name)
    if target.exists():
        raise ZooError(f"{target} is there already: choose another name, or remove it first.")
    downloaded = _is_downloaded(source)
    if downloaded and (link := find_outward_link(source, hidden=True)) is not None:
        # Its copy would be a file of the recipe, which its stages may read and publish.
        raise ZooError(f"{source} was downloaded, and {link} in it is a link to outside of it: remove that first.")
    # The copy has a mark of its own, so that removing that one file is enough.
    marks = (MARK, PARTIAL, CARD, DOWNLOADED.parts[0])
    try:
        target.mkdir(parents=True)
        if downloaded:  # before the first file: a copy may be interrupted
            (target / MARK).write_text(
                "Copied from a download: read the recipe, and remove this file if you trust it.\n"
            )
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", *marks), dirs_exist_ok=True)
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise ZooError(f"{target} cannot be written ({error.strerror or error}): choose another place.") from error
    return target


def read_mapping(path: Path) -> dict[str, Any]:
    """The keys of a YAML file. Raises ZooError for one that is not a mapping, or says a key twice."""
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
