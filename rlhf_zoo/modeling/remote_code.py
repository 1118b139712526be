"""A model's remote code (`auto_map`), which runs only if the user allows it on the command line.

A recipe cannot allow it, because recipes are downloaded too. Code that ran is recorded in run.json, and is copied into
saved checkpoints.
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

TRUST_CODE_FLAG = "--trust_remote_code"
# The files in which a checkpoint names its own classes.
_AUTO_MAP_FILES = ("config.json", "tokenizer_config.json")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MODULE = re.compile(r"[\w-]+\.py")


@dataclass(frozen=True)
class ExecutedCode:
    """A model's remote code that ran in this process.

    Attributes:
        model: A repository id or a folder.
        commit: The repository's commit; None for a folder.
        files: {file: SHA-256 in hex}.
        folder: The folder with the files.
    """

    model: str
    commit: str | None
    files: Mapping[str, str]
    folder: Path

    @property
    def lineage(self) -> dict[str, Any]:
        """The entry for run.json."""
        return {"model": self.model, "commit": self.commit, "files": dict(self.files)}


# The code that ran, by folder; None while no code may run. A global, because the permission must also apply in threads
# and where a library loads a model.
_EXECUTED: dict[Path, ExecutedCode] | None = None


@contextmanager
def allow_remote_code() -> Iterator[None]:
    """Allows models to run their own code when they are loaded, while this context is open."""
    global _EXECUTED
    previous, _EXECUTED = _EXECUTED, {}
    try:
        yield
    finally:
        _EXECUTED = previous


def is_code_trusted() -> bool:
    """Whether models may run their own code now."""
    return _EXECUTED is not None


def executed_code() -> list[ExecutedCode]:
    """Returns the code that ran in this `allow_remote_code` context: one entry for all models with the same files."""
    by_files = {tuple(code.files.items()): code for code in reversed((_EXECUTED or {}).values())}
    return sorted(by_files.values(), key=lambda code: code.model)


def untrusted_message(subject: str) -> str:
    """Returns the error message for a model that would run code without permission.

    Args:
        subject: The model's name in the message, such as "The model NAME".
    """
    return (
        f"{subject} needs program code of its own (auto_map in its configuration), which runs only if allowed: read "
        f"the code and pass {TRUST_CODE_FLAG} if you trust it, or choose an architecture that transformers has."
    )


def _remote_modules(config: Mapping[str, Any]) -> list[str]:
    """Lists the modules of the classes that a config names, sorted: NAME, or REPOSITORY--NAME of another repository."""
    auto_map = (config.get("auto_map") if isinstance(config, Mapping) else None) or {}
    values = auto_map.values() if isinstance(auto_map, Mapping) else [auto_map]
    classes = [name for value in values for name in (value if isinstance(value, list | tuple) else [value]) if name]
    return sorted({str(name).rpartition(".")[0] for name in classes})


def needs_remote_code(config: Mapping[str, Any]) -> bool:
    """Whether a model cannot be loaded without its own code.

    Args:
        config: The content of the model's config.json.
    """
    from transformers import CONFIG_MAPPING

    return bool(_remote_modules(config)) and config.get("model_type") not in CONFIG_MAPPING


def record_code(find: Callable[[str], Path | None], subject: str, *, name: str) -> None:
    """Records and logs the code that runs when a model is loaded, if it has code and `is_code_trusted`.

    Args:
        find: Maps a file's name to its path; to None if the model has no such file.
        subject: The model's name in errors.
        name: The model's name in the record.

    Raises:
        ZooError: Classes come from another repository, whose commit a config cannot name; or code is missing.
    """
    if _EXECUTED is None:
        return
    modules: list[str] = []
    for file in _AUTO_MAP_FILES:
        path = find(file)
        if path is not None:
            modules += _remote_modules(read_json(path))
    if not modules:
        return
    if foreign_module := next((module for module in modules if "--" in module), None):
        raise ZooError(
            f"{subject} takes code from another repository, {foreign_module.partition('--')[0]}, without naming a "
            "commit: copy the files next to its config.json and remove that repository's name from auto_map."
        )
    files = _code_files(find, modules, subject)
    folder = next(iter(files.values())).parent
    digests = {file: hashlib.sha256(path.read_bytes()).hexdigest() for file, path in files.items()}
    if folder in _EXECUTED and _EXECUTED[folder].files == digests:
        return
    commit = folder.name if _COMMIT.fullmatch(folder.name) else None
    already_logged = any(code.files == digests for code in _EXECUTED.values())
    _EXECUTED[folder] = ExecutedCode(name, commit, digests, folder)
    if not already_logged:
        commit_text = f" at commit {commit[:10]}" if commit else ""
        log.warning("%s%s runs its own program code: %s.", subject, commit_text, ", ".join(digests))


def _code_files(find: Callable[[str], Path | None], modules: list[str], subject: str) -> dict[str, Path]:
    """Returns the files of modules and of the modules that they import from the same folder: {name: path}."""
    from transformers.dynamic_module_utils import get_relative_imports

    paths: dict[str, Path] = {}
    pending_modules = list(modules)
    while pending_modules:
        name = f"{pending_modules.pop()}.py"
        if name in paths:
            continue
        # The model chose the name, so check that it does not lead out of the folder.
        if not _MODULE.fullmatch(name):
            raise ZooError(
                f"{subject} names the code {name!r} in auto_map, which is not a file next to it: choose another model."
            )
        path = find(name)
        if path is None:
            raise ZooError(f"{subject} names the code {name} in auto_map, but does not have it: copy all files again.")
        paths[name] = path
        pending_modules += get_relative_imports(path)
    return dict(sorted(paths.items()))


def copy_code(checkpoint: Path) -> None:
    """Copies into a checkpoint the code that ran, because transformers saves only the file of the trained class."""
    for folder in (checkpoint, *(path.parent for path in checkpoint.glob("*/config.json"))):
        modules: set[str] = set()
        for name in _AUTO_MAP_FILES:
            if (folder / name).is_file():
                modules.update(_remote_modules(read_json(folder / name)))
        candidates = [code for code in executed_code() if {f"{module}.py" for module in modules} <= code.files.keys()]
        if not modules or not candidates:
            continue
        saved_digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.py")}
        # Two models may have files of the same names. The files that transformers saved identify the right model.
        matching_code = max(candidates, key=lambda code: len(saved_digests.items() & code.files.items()))
        for file in matching_code.files.keys() - saved_digests.keys():
            shutil.copyfile(matching_code.folder / file, folder / file)
