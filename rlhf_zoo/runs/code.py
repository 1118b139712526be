"""Digests of the code that a recipe names, by which a run knows whether it goes on with what it was begun with."""

import ast
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from ..plugins import JUDGES, PREFERENCES, REWARDS, module_of, split_settings, top_module
from .data.sources import check_unchanged, digest_of
from .settings.judge_names import kind_of
from .settings.parse import StageSettings

#: The kinds of judges that are somebody's code, and the group of entry points that names it.
_GROUPS = {"function": JUDGES, "rule": REWARDS, "unlabeled": JUDGES, "pairs": JUDGES}


def stage_code(settings: StageSettings) -> dict[str, Any]:
    """The code of the rewards and preferences that a stage calls, as run.json records it.

    Args:
        settings: The stage's.

    Returns:
        Of each name, its `module` and `files`, the digest of its sources. What this package itself offers has none.

    Raises:
        ZooError: A name cannot be imported.
    """
    data = settings.data
    loader, preference = (getattr(data, key, None) for key in ("reward_model_loader", "preference"))
    named = [*(getattr(data, "reward_funcs", None) or []), *([loader] if loader else [])]
    code = _code_of((name, REWARDS) for name in named)
    if preference and data.simulated_pairs is not None:
        code |= _code_of([(preference, PREFERENCES)])
    return code


def judges_code(names: Iterable[str]) -> dict[str, Any]:
    """The code of judges, by their names in the recipe: as `stage_code`."""
    code = {}
    for name in names:
        kind, argument = kind_of(name)
        if kind in _GROUPS and (found := _code_of([(argument, _GROUPS[kind])])):
            code[name] = found[argument]
    return code


def check_code(code: Mapping[str, Any], before: Mapping[str, Any] | None) -> None:
    """Checks that code is what the run was begun with.

    Args:
        code: What is there now.
        before: What run.json says; a name that it does not know passes.

    Raises:
        ZooError: Some of it changed.
    """
    for name, now in code.items():
        check_unchanged(f"The code of {name}, module {now['module']},", now, (before or {}).get(name))


def is_same_code(code: Mapping[str, Any], before: Mapping[str, Any] | None) -> bool:
    """Whether no code that was recorded is another one now."""
    return all((before or {}).get(name, now)["files"] == now["files"] for name, now in code.items())


def _code_of(named: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Of each (name, group), its module and the digest of its sources, but for those of this package."""
    code = {}
    for name, group in named:
        module = module_of(split_settings(name)[0], group=group)
        folder, files = _sources(module)
        if files:
            code[name] = {"module": module.__name__, "files": digest_of(folder, files)}
    return code


def _sources(module: ModuleType) -> tuple[Path, set[Path]]:
    """The files that make a module what it is, and the folder that they lie in.

    Those of its package; of a module by itself its file, and those beside it that it imports.
    """
    top = top_module(module)
    if top.__name__ == __name__.partition(".")[0]:  # whose version run.json records
        return Path(), set()
    if hasattr(top, "__path__"):
        folder = Path(next(iter(top.__path__)))
        return folder, set(folder.rglob("*.py"))
    if not getattr(top, "__file__", None):  # built in
        return Path(), set()
    file = Path(str(top.__file__))
    installed = {Path(path).resolve() for path in sysconfig.get_paths().values()}
    if file.parent.resolve() in installed:
        return file.parent, {file}
    found, waiting = {file}, [file]
    while waiting:
        beside = set(_imported(waiting.pop())) - found
        found |= beside
        waiting += beside
    return file.parent, found


def _imported(file: Path) -> Iterator[Path]:
    """The files beside a file that it imports."""
    with suppress(OSError, SyntaxError, ValueError):  # which Python would not import either
        for node in ast.walk(ast.parse(file.read_bytes())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            for name in names:
                path = file.parent / name.partition(".")[0]
                if path.is_dir():
                    yield from path.rglob("*.py")
                elif (alone := path.with_suffix(".py")).is_file():
                    yield alone
