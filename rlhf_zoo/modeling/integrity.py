"""Checks that a checkpoint is what was saved. COMPLETE lists the size and the SHA-256 of each of its files.

Files added to the folder later (the record of its publication, a merged model) are not part of the checkpoint.
"""

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..errors import ZooError

COMPLETE = "COMPLETE"
#: Files that only resuming needs. A model loads without them, and people delete them to save space.
TRAINING = (".pt", ".pth", ".bin")
#: The suffix of weight files.
WEIGHTS = ".safetensors"
_TRAINER_STATE = "trainer_state.json"
_READERS = 4
#: What reading a damaged JSON document may raise.
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
_Stamp = tuple[int, int, int, int]
#: Digests of this process. A file is hashed again only when its inode, size or a time has changed.
_DIGESTS: dict[Path, tuple[_Stamp, str]] = {}
_DIGESTS_LOCK = threading.Lock()


def seal(folder: Path) -> dict[str, dict[str, Any]]:
    """Flushes every file of a folder to the disk and hashes it.

    Args:
        folder: The folder.

    Returns:
        {path in the folder: {size, sha256}}.
    """
    names = sorted(_names(folder))
    with ThreadPoolExecutor(_READERS) as pool:
        entries = list(pool.map(lambda name: _sealed(folder / name), names))
    return dict(zip(names, entries, strict=True))


def check_integrity(folder: Path | str, *, training: bool = False) -> None:
    """Checks that a complete checkpoint is what was saved. Folders without COMPLETE pass.

    Args:
        folder: The checkpoint.
        training: Whether to also check files that only resuming needs.

    Raises:
        ZooError: The message names the file that differs, and the newest intact checkpoint next to this one.
    """
    folder = Path(folder)
    if not (folder / COMPLETE).is_file():
        return
    problem = damage(folder, training=training)
    if problem is None:
        return
    siblings = (path for path in folder.parent.glob("checkpoint-*") if (path / COMPLETE).is_file() and path != folder)
    newest = sorted(siblings, key=lambda path: (len(path.name), path.name), reverse=True)
    last = next((path for path in newest if damage(path, training=training) is None), None)
    hint = f"; {last} is intact" if last is not None else ""
    raise ZooError(f"{problem}: restore it from a copy, or train the stage again with --restart{hint}.")


def damage(folder: Path, *, training: bool = False) -> str | None:
    """Finds what is wrong with a complete checkpoint.

    Args:
        folder: The checkpoint.
        training: Whether to also check files that only resuming needs.

    Returns:
        The start of a sentence about the first wrong file; None if all files are intact.
    """
    try:
        files = _recorded(folder)
    except (*_DAMAGED, OSError):
        return f"{folder / COMPLETE} is damaged"
    for name, recorded in files.items():
        if training or not (name.endswith(TRAINING) or name == _TRAINER_STATE):
            path = folder / name
            try:
                problem = _altered(path, *recorded)
            except (OSError, ValueError) as error:  # ValueError: no file can have such a name
                problem = f"{path!s:.200} cannot be read ({getattr(error, 'strerror', None) or error})"
            if problem is not None:
                return problem
    return None


def weights_digest(folder: Path | str) -> str | None:
    """Hashes a model's weights, to recognize them wherever they are stored or published.

    Files that say where a model came from, such as adapter_config.json with its base, do not count, because they differ
    between copies of a model. A critic, which has its own folder, does not count either.

    Args:
        folder: A checkpoint, complete or as pulled from a Hub.

    Returns:
        The SHA-256 in hex of the names and contents of its weight files; None if it has none.

    Raises:
        ZooError: COMPLETE is damaged.
    """
    folder = Path(folder)
    names = sorted(path.name for path in folder.glob(f"*{WEIGHTS}"))
    if not names:
        return None
    try:
        recorded = _recorded(folder) if (folder / COMPLETE).is_file() else {}
    except (*_DAMAGED, OSError) as error:
        raise ZooError(
            f"{folder / COMPLETE} is damaged: restore it, or train the stage again with --restart."
        ) from error
    digests = {name: sha256 for name, (_, sha256) in recorded.items()}
    lines = (f"{name} {digests.get(name) or _digest(folder / name)}\n" for name in names)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _recorded(folder: Path) -> dict[str, tuple[int, str]]:
    """Returns {path: (size, sha256)}, as COMPLETE lists them."""
    files = json.loads((folder / COMPLETE).read_bytes())["files"]
    return {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in files.items()}


def _altered(path: Path, size: int, sha256: str) -> str | None:
    present = path.stat().st_size
    if present != size:
        return f"{path} has {present} bytes, and {size} were saved"
    return None if _digest(path) == sha256 else f"{path} has another sha256 than when it was saved"


def _names(folder: Path) -> Iterator[str]:
    for root, _, names in os.walk(folder):
        for name in names:
            path = (Path(root) / name).relative_to(folder).as_posix()
            if path != COMPLETE:
                yield path


def _sealed(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return {"size": path.stat().st_size, "sha256": _digest(path)}


def _digest(path: Path) -> str:
    """Returns the SHA-256 in hex of a file as it is now."""
    absolute = path.absolute()
    with open(absolute, "rb") as file:
        stat = os.fstat(file.fileno())
        stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        with _DIGESTS_LOCK:
            cached = _DIGESTS.get(absolute)
        if cached is not None and cached[0] == stamp:
            return cached[1]
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    with _DIGESTS_LOCK:
        _DIGESTS[absolute] = stamp, digest
    return digest
