"""Digests of the code that a recipe names, so that a resumed run notices when that code has changed."""

import ast
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from ..plugins import JUDGES, PREFERENCES, REWARDS, import_module_of, split_settings
from .data.digests import check_unchanged, digest_of
from .settings.judge_names import split_judge_name
from .settings.parse import StageSettings

#: Kind of judge that is code -> the entry-point group in which its name is looked up.
_GROUPS = {"function": JUDGES, "rule": REWARDS, "unlabeled": JUDGES, "pairs": JUDGES}


def stage_code(settings: StageSettings) -> dict[str, Any]:
    """Identifies the code of the rewards and preferences that a stage calls, for run.json.

    Args:
        settings: Settings of the stage.

    Returns:
        Name -> {module, files}, where `files` is the digest of the module's source files. Code of this package is left
        out, because run.json records the package's version.

    Raises:
        ZooError: A name cannot be imported.
    """
    data = settings.data
    loader, preference = (getattr(data, key, None) for key in ("reward_model_loader", "preference"))
    names = [*(getattr(data, "reward_funcs", None) or []), *([loader] if loader else [])]
    code = _code_of((name, REWARDS) for name in names)
    if preference and data.simulated_pairs is not None:
        code |= _code_of([(preference, PREFERENCES)])
    return code


def judges_code(names: Iterable[str]) -> dict[str, Any]:
    """Identifies the code of judges, for run.json.

    Args:
        names: The judges, as the recipe names them.

    Returns:
        Name -> {module, files}, as in `stage_code`.

    Raises:
        ZooError: A name cannot be imported.
    """
    code = {}
    for name in names:
        kind, argument = split_judge_name(name)
        if kind in _GROUPS and (judge_code := _code_of([(argument, _GROUPS[kind])])):
            code[name] = judge_code[argument]
    return code


def check_code(code: Mapping[str, Any], recorded_code: Mapping[str, Any] | None) -> None:
    """Checks that the code is the same as when the run began.

    Args:
        code: The present code, as `stage_code` or `judges_code` returns it.
        recorded_code: The code in run.json. A name that is missing there passes.

    Raises:
        ZooError: The digest of a name differs.
    """
    for name, current in code.items():
        check_unchanged(f"The code of {name}, module {current['module']},", current, (recorded_code or {}).get(name))


def is_same_code(code: Mapping[str, Any], recorded_code: Mapping[str, Any] | None) -> bool:
    """Whether the code is the same as when the run began.

    Args:
        code: The present code, as `stage_code` or `judges_code` returns it.
        recorded_code: The code in run.json. A name that is missing there counts as unchanged.

    Returns:
        False if the digest of any name differs.
    """
    return all((recorded_code or {}).get(name, current)["files"] == current["files"] for name, current in code.items())


def _code_of(names: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Returns name -> {module, files} for each (name, group), leaving out code of this package."""
    code = {}
    for name, group in names:
        module = import_module_of(split_settings(name)[0], group=group)
        folder, files = _source_files(module)
        if files:
            code[name] = {"module": module.__name__, "files": digest_of(folder, files)}
    return code


def _source_files(module: ModuleType) -> tuple[Path, set[Path]]:
    """Returns a module's folder and the files whose content decides what the module does.

    For a module in a package these are all files of the package; for any other module, its own file and the files that
    it imports from the same folder.
    """
    package = sys.modules[module.__name__.partition(".")[0]]
    if package.__name__ == __name__.partition(".")[0]:  # this package: run.json records its version instead
        return Path(), set()
    if hasattr(package, "__path__"):
        folder = Path(next(iter(package.__path__)))
        return folder, set(folder.rglob("*.py"))
    if not getattr(package, "__file__", None):  # built in
        return Path(), set()
    file = Path(str(package.__file__))
    system_folders = {Path(path).resolve() for path in sysconfig.get_paths().values()}
    if file.parent.resolve() in system_folders:  # the folder's other files are other packages
        return file.parent, {file}
    files, to_parse = {file}, [file]
    while to_parse:
        imported_files = set(_imported_files(to_parse.pop())) - files
        files |= imported_files
        to_parse += imported_files
    return file.parent, files


def _imported_files(file: Path) -> Iterator[Path]:
    """Yields the files that a file imports from its own folder."""
    with suppress(OSError, SyntaxError, ValueError):  # a file that cannot be parsed cannot be imported either
        for node in ast.walk(ast.parse(file.read_bytes())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            for name in names:
                path = file.parent / name.partition(".")[0]
                if path.is_dir():
                    yield from path.rglob("*.py")
                elif (module_file := path.with_suffix(".py")).is_file():
                    yield module_file
