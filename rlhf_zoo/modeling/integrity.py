"""Checks that a checkpoint has not changed since it was saved. COMPLETE lists the size and SHA-256 of each file.

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
# Suffixes of files that only resuming needs. Users may delete them to save space.
_RESUME_ONLY = (".pt", ".pth", ".bin")
#: The suffix of weight files.
WEIGHTS_SUFFIX = ".safetensors"
_TRAINER_STATE = "trainer_state.json"
_THREADS = 4
#: The exceptions that reading a damaged JSON document may raise.
_JSON_ERRORS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
_Stamp = tuple[int, int, int, int]  # inode, size, times of the last change to content and to metadata in ns
# Digests by path. A file is hashed again only when its inode, size or a time has changed.
_DIGESTS: dict[Path, tuple[_Stamp, str]] = {}
_DIGESTS_LOCK = threading.Lock()


def flush_and_hash(folder: Path) -> dict[str, dict[str, Any]]:
    """Flushes every file of a folder to the disk and returns the digests that COMPLETE will list.

    Returns:
        {path in the folder: {size, sha256}}.
    """
    names = sorted(_file_names(folder))
    with ThreadPoolExecutor(_THREADS) as pool:
        entries = list(pool.map(lambda name: _flush_and_hash_file(folder / name), names))
    return dict(zip(names, entries, strict=True))


def check_integrity(folder: Path | str, *, for_resuming: bool = False) -> None:
    """Checks that the files of a complete checkpoint are as they were saved. A folder without COMPLETE passes.

    Args:
        folder: The checkpoint.
        for_resuming: Whether to also check files that only resuming needs.

    Raises:
        ZooError: A file is damaged. The message names it and the newest intact checkpoint next to this one.
    """
    folder = Path(folder)
    if not (folder / COMPLETE).is_file():
        return
    problem = find_damage(folder, for_resuming=for_resuming)
    if problem is None:
        return
    siblings = (path for path in folder.parent.glob("checkpoint-*") if (path / COMPLETE).is_file() and path != folder)
    newest_first = sorted(siblings, key=lambda path: (len(path.name), path.name), reverse=True)
    sibling = next((path for path in newest_first if find_damage(path, for_resuming=for_resuming) is None), None)
    hint = f"; {sibling} is intact" if sibling is not None else ""
    raise ZooError(f"{problem}: restore it from a copy, or train the stage again with --restart{hint}.")


def find_damage(folder: Path, *, for_resuming: bool = False) -> str | None:
    """Finds the first damaged file of a complete checkpoint.

    Args:
        folder: The checkpoint.
        for_resuming: Whether to also check files that only resuming needs.

    Returns:
        The beginning of an error message, which names the file; None if all checked files are intact.
    """
    try:
        files = _read_complete(folder)
    except (*_JSON_ERRORS, OSError):
        return f"{folder / COMPLETE} is damaged"
    for name, (size, sha256) in files.items():
        if for_resuming or not (name.endswith(_RESUME_ONLY) or name == _TRAINER_STATE):
            path = folder / name
            try:
                problem = _find_difference(path, size, sha256)
            except (OSError, ValueError) as error:  # ValueError: COMPLETE names a file that cannot exist
                problem = f"{path!s:.200} cannot be read ({getattr(error, 'strerror', None) or error})"
            if problem is not None:
                return problem
    return None


def weights_digest(folder: Path | str) -> str | None:
    """Hashes a model's weights, so that copies of the model can be recognized wherever they are stored or published.

    Other files do not count, because they may differ between copies: adapter_config.json names the path of the base.
    The weights of a critic, which are in a folder of their own, do not count either.

    Args:
        folder: A checkpoint. One that was pulled from a Hub has no COMPLETE.

    Returns:
        The SHA-256 in hex of the names and digests of the weight files; None if there are no weight files.

    Raises:
        ZooError: COMPLETE is damaged.
    """
    folder = Path(folder)
    names = sorted(path.name for path in folder.glob(f"*{WEIGHTS_SUFFIX}"))
    if not names:
        return None
    try:
        recorded_files = _read_complete(folder) if (folder / COMPLETE).is_file() else {}
    except (*_JSON_ERRORS, OSError) as error:
        raise ZooError(
            f"{folder / COMPLETE} is damaged: restore it, or train the stage again with --restart."
        ) from error
    digests = {name: sha256 for name, (_, sha256) in recorded_files.items()}
    lines = (f"{name} {digests.get(name) or _digest(folder / name)}\n" for name in names)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _read_complete(folder: Path) -> dict[str, tuple[int, str]]:
    """Returns {path: (size, sha256)} of the files that COMPLETE lists."""
    files = json.loads((folder / COMPLETE).read_bytes())["files"]
    return {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in files.items()}


def _find_difference(path: Path, size: int, sha256: str) -> str | None:
    # Compare sizes first, because most damaged files are truncated and hashing gigabytes takes a long time.
    current_size = path.stat().st_size
    if current_size != size:
        return f"{path} has {current_size} bytes, but {size} were saved"
    return None if _digest(path) == sha256 else f"{path} has a different sha256 from when it was saved"


def _file_names(folder: Path) -> Iterator[str]:
    for root, _, names in os.walk(folder):
        for name in names:
            path = (Path(root) / name).relative_to(folder).as_posix()
            if path != COMPLETE:
                yield path


def _flush_and_hash_file(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return {"size": path.stat().st_size, "sha256": _digest(path)}


def _digest(path: Path) -> str:
    """Returns the SHA-256 of a file in hex, from the cache if the file has not changed."""
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
