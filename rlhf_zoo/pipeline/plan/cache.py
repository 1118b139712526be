"""Caches plans, and traces (the measured memory of model passes), under $RLHF_ZOO_HOME.

A cache key covers everything that its value depends on, including the versions of code and libraries, so a cached value
is never outdated.
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
#: Maximum number of files of each kind. When there are more, the older half is deleted.
MAX_FILES = 2000


@cache
def versions() -> dict[str, str]:
    """Returns the version of each library that affects the memory of a model; "" if it is not installed."""
    installed_versions = {}
    for name in LIBRARIES:
        try:
            installed_versions[name] = version(name)
        except PackageNotFoundError:
            installed_versions[name] = ""
    return installed_versions


@cache
def code_digest() -> str:
    """Returns a digest of the name, size and modification time of every source and data file of this package."""
    hasher = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in (".py", ".json", ".yaml"):
            status = path.stat()
            hasher.update(f"{path.relative_to(PACKAGE)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return hasher.hexdigest()


def digest(key: Any) -> str:
    """Returns the digest of a cache key.

    Args:
        key: The cache key, made of JSON values.
    """
    return hashlib.sha256(canonical_json(key).encode()).hexdigest()


def read_cached(kind: str, name: str) -> Any:
    """Reads a cached value.

    Args:
        kind: "plans" or "traces".
        name: Digest of the cache key.

    Returns:
        The JSON value; None if the cache does not have it or its file cannot be read.
    """
    path = home() / kind / f"{name}.json"
    if not path.is_file():
        return None
    try:
        return read_json(path)
    except (OSError, ValueError, ZooError) as error:
        log.info("%s cannot be read and is computed again (%s).", path, error)
        return None


def write_cached(kind: str, name: str, value: Any) -> None:
    """Caches a value. If the cache cannot be written, the next command computes the value again.

    Args:
        kind: "plans" or "traces".
        name: Digest of the cache key.
        value: A JSON value.
    """
    folder = home() / kind
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"{name}.json", value)
        files = list(folder.glob("*.json"))
        if len(files) > MAX_FILES:
            _delete_older_half(files)
    except (OSError, ZooError) as error:
        log.info("%s cannot be used as a cache (%s).", folder, error)


def _delete_older_half(files: Sequence[Path]) -> None:
    by_age = sorted(files, key=lambda path: path.stat().st_mtime_ns)
    for path in by_age[: len(by_age) // 2]:
        path.unlink(missing_ok=True)
