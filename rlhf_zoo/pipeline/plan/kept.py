"""Keeps what was planned and traced under $RLHF_ZOO_HOME, so that the same question takes no time again.

A key covers everything that the answer depends on, code and library versions included. So a kept answer never ages.
"""

import hashlib
import logging
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ...errors import ZooError
from ...fileio import canonical_json, home, read_json, write_json

log = logging.getLogger(__name__)

LIBRARIES = ("torch", "transformers", "peft", "trl")
PACKAGE = Path(__file__).parents[2]
#: Files of one kind that are kept; when there are more, the older half is deleted.
MAX_FILES = 2000


@cache
def versions() -> dict[str, str]:
    """Versions of the libraries that decide how much memory a model takes; "" for one that is not installed."""
    installed = {}
    for name in LIBRARIES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = ""
    return installed


@cache
def code_state() -> str:
    """A digest of name, size and time of every source and data file of this package."""
    state = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in (".py", ".json", ".yaml"):
            status = path.stat()
            state.update(f"{path.relative_to(PACKAGE)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return state.hexdigest()


def digest(key: Any) -> str:
    """The digest of a key.

    Args:
        key: JSON values.
    """
    return hashlib.sha256(canonical_json(key).encode()).hexdigest()


def read(kind: str, name: str) -> Any:
    """Reads what is kept.

    Args:
        kind: "plans" or "traces".
        name: The digest of its key.

    Returns:
        The JSON value; None if there is none, or if it cannot be read.
    """
    path = home() / kind / f"{name}.json"
    if not path.is_file():
        return None
    try:
        return read_json(path)
    except (OSError, ValueError, ZooError) as error:
        log.info("%s is made again (%s).", path, error)
        return None


def write(kind: str, name: str, value: Any) -> None:
    """Keeps a value. Where nothing can be written, the next command computes it again.

    Args:
        kind: "plans" or "traces".
        name: The digest of its key.
        value: JSON values.
    """
    folder = home() / kind
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"{name}.json", value)
        files = list(folder.glob("*.json"))
        if len(files) > MAX_FILES:
            _delete_older_half(files)
    except (OSError, ZooError) as error:
        log.info("Nothing is kept in %s (%s).", folder, error)


def _delete_older_half(files: Sequence[Path]) -> None:
    by_age = sorted(files, key=lambda path: path.stat().st_mtime_ns)
    for path in by_age[: len(by_age) // 2]:
        path.unlink(missing_ok=True)
