"""Which run directories this user's rlhf-zoo wrote: a signature in run.json, whose key lies outside of every run.

A run's settings name Python objects, such as reward functions, and commands import them again. A folder that was
downloaded can hold a run.json too, so a file of that name says nothing. What `StageRecord.write` begins, it signs with
a key in `home()`; a copied or renamed directory keeps its signature, and no repository can make one. The user may also
say so (`--trust_run`).
"""

import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from ...fileio import home, sync_folder

log = logging.getLogger(__name__)

FLAG = "--trust_run"
SIGNATURE = "signature"
KEY_FILE = "run-key"
_KEY_BYTES = 32

# One switch for the command, as `remote_code` has one.
_TRUSTED = False


@contextlib.contextmanager
def trusting() -> Iterator[None]:
    """While open, every run directory counts as this user's: the user said so of the one that the command reads."""
    global _TRUSTED
    before, _TRUSTED = _TRUSTED, True
    try:
        yield
    finally:
        _TRUSTED = before


def signed(document: Mapping[str, Any]) -> dict[str, Any]:
    """`document`, as it stands in JSON, with its signature; without one where the key cannot be kept.

    The run then goes on, and its directory counts as a stranger's: the log says why.
    """
    bare = {name: value for name, value in document.items() if name != SIGNATURE}
    try:
        return {**bare, SIGNATURE: _signature(bare, _made_key())}
    except (OSError, RuntimeError) as error:  # no home directory, or one that cannot be written
        log.warning(
            "No key for the signatures of runs can be kept (%s), so commands will read this run as a stranger's: set "
            "RLHF_ZOO_HOME to a folder that can be written.",
            error,
        )
        return bare


def is_own(document: Mapping[str, Any]) -> bool:
    """Whether a run.json was written by this user's rlhf-zoo and not changed since, or the user trusts it."""
    if _TRUSTED:
        return True
    given = document.get(SIGNATURE)
    try:
        key = _read_key()
    except (OSError, RuntimeError):
        return False
    bare = {name: value for name, value in document.items() if name != SIGNATURE}
    if key is None or not isinstance(given, str) or not given.isascii():
        return False
    return hmac.compare_digest(given, _signature(bare, key))


def _signature(document: Mapping[str, Any], key: bytes) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _read_key() -> bytes | None:
    """The key; None where there is none, or half a one."""
    path = home() / KEY_FILE
    key = path.read_bytes() if path.is_file() else b""
    return key if len(key) == _KEY_BYTES else None


def _made_key() -> bytes:
    """The key, made where there is none: of two processes at once, both take the first one's. Raises OSError."""
    if (known := _read_key()) is not None:
        return known
    folder = home()
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f".{KEY_FILE}.{secrets.token_hex(8)}.tmp"
    descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(made, folder / KEY_FILE)  # fails where another process was faster
        except FileExistsError:
            if _read_key() is None:  # what a full disk left
                os.replace(made, folder / KEY_FILE)
    finally:
        made.unlink(missing_ok=True)
    sync_folder(folder)
    key = _read_key()
    assert key is not None
    return key
