"""Recognizes run directories that this user's rlhf-zoo wrote, by a signature in run.json.

The settings of a run name Python objects, such as reward functions, which later commands import. A downloaded folder
can contain a run.json too, so the file alone proves nothing. `StageRecord.write` therefore signs run.json with a key in
`home()`, outside any run. The signature stays valid if the directory is copied or renamed, and no repository can forge
it. The user can also trust a run with `--trust_run`.
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

TRUST_RUN_FLAG = "--trust_run"
SIGNATURE = "signature"
KEY_FILE = "run-key"
_KEY_BYTES = 32

# The flag names no run, so it applies to every run that the command reads.
_trusts_all_runs = False


@contextlib.contextmanager
def trust_all_runs() -> Iterator[None]:
    """Trusts every run directory while the context is open, because the user passed `--trust_run`."""
    global _trusts_all_runs
    previous_value, _trusts_all_runs = _trusts_all_runs, True
    try:
        yield
    finally:
        _trusts_all_runs = previous_value


def sign(document: Mapping[str, object]) -> dict[str, Any]:
    """Signs a run.json document.

    If the key cannot be stored, the run continues without a signature. The log says why, and later commands treat the
    directory as downloaded.

    Args:
        document: The content of run.json. An existing signature is replaced.

    Returns:
        The document with its signature; without a signature if the key cannot be stored.
    """
    content = {name: value for name, value in document.items() if name != SIGNATURE}
    try:
        return {**content, SIGNATURE: _compute_signature(content, _read_or_create_key())}
    except (OSError, RuntimeError) as error:  # no home directory, or one that cannot be written
        log.warning(
            "Cannot store the key that signs runs (%s), so later commands will not trust this run: set RLHF_ZOO_HOME "
            "to a writable folder.",
            error,
        )
        return content


def is_own(document: Mapping[str, object]) -> bool:
    """Whether a run.json is unchanged since this user's rlhf-zoo wrote it, or the user trusts it.

    Args:
        document: The content of run.json.
    """
    if _trusts_all_runs:
        return True
    signature = document.get(SIGNATURE)
    try:
        key = _read_key()
    except (OSError, RuntimeError):
        return False
    content = {name: value for name, value in document.items() if name != SIGNATURE}
    # compare_digest raises TypeError for text that is not ASCII.
    if key is None or not isinstance(signature, str) or not signature.isascii():
        return False
    return hmac.compare_digest(signature, _compute_signature(content, key))


def _compute_signature(content: Mapping[str, object], key: bytes) -> str:
    # Sign canonical JSON, so that the order of keys and the whitespace in the file do not change the signature.
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _read_key() -> bytes | None:
    """Returns the key; None if the file is missing or does not hold a complete key, as after a crash."""
    path = home() / KEY_FILE
    key = path.read_bytes() if path.is_file() else b""
    return key if len(key) == _KEY_BYTES else None


def _read_or_create_key() -> bytes:
    """Returns the key, created on first use. Processes that create it at the same time share one. Raises OSError."""
    key = _read_key()
    if key is not None:
        return key
    folder = home()
    folder.mkdir(parents=True, exist_ok=True)
    temporary_file = folder / f".{KEY_FILE}.{secrets.token_hex(8)}.tmp"
    # Write the key to the disk before the file gets its final name, so that no reader sees half a key.
    descriptor = os.open(temporary_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary_file, folder / KEY_FILE)  # unlike replace, it fails if another process was faster
        except FileExistsError:
            if _read_key() is None:  # the existing file is truncated, as after a full disk
                os.replace(temporary_file, folder / KEY_FILE)
    finally:
        temporary_file.unlink(missing_ok=True)
    sync_folder(folder)
    key = _read_key()
    assert key is not None
    return key
