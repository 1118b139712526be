"""A model's remote code (`auto_map`), which runs only if the user allows it on the command line.

A recipe cannot allow it, because recipes are downloaded too. Code that ran is recorded for run.json and for the
checkpoints that are saved.
"""

import hashlib
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ZooError
from ..fileio import read_json

log = logging.getLogger(__name__)

FLAG = "--trust_remote_code"
#: Where a checkpoint lists its own classes.
NAMED_IN = ("config.json", "tokenizer_config.json")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MODULE = re.compile(r"[\w-]+\.py")


@dataclass(frozen=True)
class CodeRun:
    """Remote code of a model that ran.

    Attributes:
        model: A repository, or a folder.
        commit: The repository's commit; None for a folder.
        files: The sha256 of each file.
        folder: Where the files are.
    """

    model: str
    commit: str | None
    files: Mapping[str, str]
    folder: Path

    @property
    def lineage(self) -> dict[str, Any]:
        """The entry in run.json."""
        return {"model": self.model, "commit": self.commit, "files": dict(self.files)}


# One switch for the command, which also applies to threads and to loading by libraries. None: no code runs.
_RUN: dict[Path, CodeRun] | None = None


@contextmanager
def trusting() -> Iterator[None]:
    """Allows models to run their own code when they are loaded, while this context is open."""
    global _RUN
    before, _RUN = _RUN, {}
    try:
        yield
    finally:
        _RUN = before


def is_trusted() -> bool:
    """Whether models may run their own code now."""
    return _RUN is not None


def code_run() -> list[CodeRun]:
    """Returns the code that ran since `trusting` was opened, each code once, for the first model that had it."""
    by_files = {tuple(run.files.items()): run for run in reversed((_RUN or {}).values())}
    return sorted(by_files.values(), key=lambda run: run.model)


def refusal(subject: str) -> str:
    """Writes the error for a model that would run code without permission.

    Args:
        subject: Such as "The model NAME".
    """
    return (
        f"{subject} needs program code of its own (auto_map in its configuration), which runs only if allowed: read "
        f"the code and pass {FLAG} if you trust it, or choose an architecture that transformers has."
    )


def code_of(config: Mapping[str, Any]) -> list[str]:
    """Lists the modules from which a config takes classes.

    Args:
        config: The content of config.json or tokenizer_config.json.

    Returns:
        Their names: NAME, or REPOSITORY--NAME.
    """
    auto_map = (config.get("auto_map") if isinstance(config, Mapping) else None) or {}
    values = auto_map.values() if isinstance(auto_map, Mapping) else [auto_map]
    classes = [name for value in values for name in (value if isinstance(value, list | tuple) else [value]) if name]
    return sorted({str(name).rpartition(".")[0] for name in classes})


def brings_code(config: Mapping[str, Any]) -> bool:
    """Whether a model needs its own code to load.

    Args:
        config: The content of its config.json.
    """
    from transformers import CONFIG_MAPPING

    return bool(code_of(config)) and config.get("model_type") not in CONFIG_MAPPING


def use_code(find: Callable[[str], Path | None], subject: str, *, name: str) -> None:
    """Records and logs the code that loading a model will run, if that is allowed and there is any.

    Args:
        find: Returns the path of one of the model's files, by name.
        subject: What errors call the model.
        name: The model's name for the record.

    Raises:
        ZooError: Classes come from another repository without a named commit.
    """
    if _RUN is None:
        return
    modules: list[str] = []
    for file in NAMED_IN:
        path = find(file)
        if path is not None:
            modules += code_of(read_json(path))
    if not modules:
        return
    if elsewhere := next((item for item in modules if "--" in item), None):
        raise ZooError(
            f"{subject} takes code from another repository, {elsewhere.partition('--')[0]}, and names no commit of it: "
            "copy the files next to its config.json and remove that repository's name from auto_map."
        )
    files = _with_imports(find, modules, subject)
    folder = next(iter(files.values())).parent
    digests = {file: hashlib.sha256(path.read_bytes()).hexdigest() for file, path in files.items()}
    if folder in _RUN and _RUN[folder].files == digests:
        return
    commit = folder.name if _COMMIT.fullmatch(folder.name) else None
    is_known = any(item.files == digests for item in _RUN.values())
    _RUN[folder] = CodeRun(name, commit, digests, folder)
    if not is_known:
        commit_text = f" at commit {commit[:10]}" if commit else ""
        log.warning("%s%s runs its own program code: %s.", subject, commit_text, ", ".join(digests))


def _with_imports(find: Callable[[str], Path | None], modules: list[str], subject: str) -> dict[str, Path]:
    """Returns the files of modules and of the modules that they import from the same folder: {name: path}."""
    from transformers.dynamic_module_utils import get_relative_imports

    paths: dict[str, Path] = {}
    waiting = list(modules)
    while waiting:
        name = f"{waiting.pop()}.py"
        if name in paths:
            continue
        if not _MODULE.fullmatch(name):
            raise ZooError(
                f"{subject} names the code {name!r} in auto_map, which is not a file next to it: choose another model."
            )
        path = find(name)
        if path is None:
            raise ZooError(f"{subject} names the code {name} in auto_map and does not have it: copy all files again.")
        paths[name] = path
        waiting += get_relative_imports(path)
    return dict(sorted(paths.items()))


def add_code(checkpoint: Path) -> None:
    """Copies code that ran into a checkpoint, because transformers saves only the file of the trained class.

    Args:
        checkpoint: The checkpoint's folder.
    """
    for folder in (checkpoint, *(path.parent for path in checkpoint.glob("*/config.json"))):
        modules: set[str] = set()
        for name in NAMED_IN:
            if (folder / name).is_file():
                modules.update(code_of(read_json(folder / name)))
        candidates = [run for run in code_run() if {f"{module}.py" for module in modules} <= run.files.keys()]
        if not modules or not candidates:
            continue
        present = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.py")}
        best = max(candidates, key=lambda run: len(present.items() & run.files.items()))
        for file in best.files.keys() - present.keys():
            shutil.copyfile(best.folder / file, folder / file)
