"""The program code that a model brings (`auto_map`): it runs where the user said so on the command line, nowhere else.

A recipe cannot say it, for recipes are downloaded too. What ran is kept, for run.json and for the checkpoints that are
saved.
"""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ZooError

log = logging.getLogger(__name__)

FLAG = "--trust_remote_code"
#: Where a checkpoint says which classes it brings.
NAMED_IN = ("config.json", "tokenizer_config.json")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MODULE = re.compile(r"[\w-]+\.py")


@dataclass(frozen=True)
class CodeRun:
    """Code that ran: of which model, a repository at a commit or a folder, and the sha256 of each file.

    folder: where its files lie.
    """

    model: str
    commit: str | None
    files: Mapping[str, str]
    folder: Path

    @property
    def lineage(self) -> dict[str, Any]:
        """For run.json."""
        return {"model": self.model, "commit": self.commit, "files": dict(self.files)}


# One switch for the command, which threads and the libraries' own loading see too. None: no code runs.
_RUN: dict[Path, CodeRun] | None = None


@contextmanager
def trusting() -> Iterator[None]:
    """While open, models may bring code of their own, and it runs when they are loaded."""
    global _RUN
    before, _RUN = _RUN, {}
    try:
        yield
    finally:
        _RUN = before


def is_trusted() -> bool:
    return _RUN is not None


def code_run() -> list[CodeRun]:
    """What ran since the switch was set, each code once: of the first model that brought it."""
    found = {tuple(one.files.items()): one for one in reversed((_RUN or {}).values())}
    return sorted(found.values(), key=lambda one: one.model)


def refusal(what: str) -> str:
    """The sentence where `what`, such as "The model NAME", would run code and nobody said that it may."""
    return (
        f"{what} needs program code of its own (auto_map in its configuration), which runs only where you say so: read "
        f"the code, and give {FLAG} if you trust it, or take a model of an architecture that transformers has."
    )


def code_of(config: Mapping[str, Any]) -> list[str]:
    """The modules that a config.json or tokenizer_config.json takes classes from: NAME, or REPOSITORY--NAME."""
    named = (config.get("auto_map") if isinstance(config, Mapping) else None) or {}
    values = named.values() if isinstance(named, Mapping) else [named]
    classes = [one for value in values for one in (value if isinstance(value, list | tuple) else [value]) if one]
    return sorted({str(one).rpartition(".")[0] for one in classes})


def brings_code(config: Mapping[str, Any]) -> bool:
    """Whether a model with this config.json loads only with code of its own."""
    from transformers import CONFIG_MAPPING

    return bool(code_of(config)) and config.get("model_type") not in CONFIG_MAPPING


def use_code(find: Callable[[str], Path | None], what: str, *, name: str) -> None:
    """Notes and says the code that loading a model will run, if it may and there is any.

    find: the path of one of its files, by name; name: the model's, for people.

    Raises ZooError where classes are of another repository, of which no commit is named.
    """
    if _RUN is None:
        return
    modules: list[str] = []
    for file in NAMED_IN:
        path = find(file)
        if path is not None:
            modules += code_of(json.loads(path.read_text(encoding="utf-8")))
    if not modules:
        return
    if elsewhere := next((one for one in modules if "--" in one), None):
        raise ZooError(
            f"{what} takes code from another repository, {elsewhere.partition('--')[0]}, and names no commit of it: "
            "copy the files beside its config.json and take that repository's name out of auto_map."
        )
    found = _with_imports(find, modules, what)
    folder = next(iter(found.values())).parent
    digests = {file: hashlib.sha256(path.read_bytes()).hexdigest() for file, path in found.items()}
    if folder in _RUN and _RUN[folder].files == digests:
        return
    commit = folder.name if _COMMIT.fullmatch(folder.name) else None
    known = any(one.files == digests for one in _RUN.values())
    _RUN[folder] = CodeRun(name, commit, digests, folder)
    if not known:
        at = f" at commit {commit[:10]}" if commit else ""
        log.warning("%s%s runs its own program code: %s.", what, at, ", ".join(digests))


def _with_imports(find: Callable[[str], Path | None], modules: list[str], what: str) -> dict[str, Path]:
    """The files of these modules and of those that they import from beside them: name -> path."""
    from transformers.dynamic_module_utils import get_relative_imports

    found: dict[str, Path] = {}
    waiting = list(modules)
    while waiting:
        name = f"{waiting.pop()}.py"
        if name in found:
            continue
        if not _MODULE.fullmatch(name):
            raise ZooError(
                f"{what} names the code {name!r} in auto_map, which is no file beside it: take another model."
            )
        path = find(name)
        if path is None:
            raise ZooError(f"{what} names the code {name} in auto_map and does not have it: copy it again, whole.")
        found[name] = path
        waiting += get_relative_imports(path)
    return dict(sorted(found.items()))


def add_code(checkpoint: Path) -> None:
    """Puts code that ran beside what was trained with it: transformers saves the file of the trained class alone."""
    for folder in (checkpoint, *(path.parent for path in checkpoint.glob("*/config.json"))):
        modules: set[str] = set()
        for name in NAMED_IN:
            if (folder / name).is_file():
                modules.update(code_of(json.loads((folder / name).read_text(encoding="utf-8"))))
        held = [one for one in code_run() if {f"{module}.py" for module in modules} <= one.files.keys()]
        if not modules or not held:
            continue
        saved = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.py")}
        own = max(held, key=lambda one: len(saved.items() & one.files.items()))
        for file in own.files.keys() - saved.keys():
            shutil.copyfile(own.folder / file, folder / file)
