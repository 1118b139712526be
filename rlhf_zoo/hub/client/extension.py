"""Installs rlhf-zoo as an extension of `hf`, and lets `hf rlhf-zoo ...` handle Ctrl-C itself.

`hf` looks for extensions only in ~/.local/share/hf/extensions/hf-NAME/manifest.json, and ignores HF_HOME and
XDG_DATA_HOME (huggingface_hub 2.4, cli/extensions.py). It runs the executable in the manifest as a child process.
"""

import contextlib
import json
import os
import signal
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import ZooError
from ...fileio import now, write_bytes, write_json

NAME = "hf-rlhf-zoo"
MANIFEST = "manifest.json"
COMMIT_CACHE = ".latest_commit"
# `hf extensions update` installs from the GitHub repository of this name. No GitHub account may have a colon in its
# name, so nobody can create that repository.
SOURCE = "pip:rlhf-zoo"
DESCRIPTION = "The RLHF model zoo: train, publish and compare."
# `hf` asks GitHub for the newest commit when COMMIT_CACHE is a day old. pip updates this extension, so the file gets a
# timestamp far in the future: 2100-01-01, UTC.
FAR_FUTURE = 4_102_444_800


def folder() -> Path:
    """Returns the folder in which `hf` looks for the extension."""
    return Path("~/.local/share/hf/extensions").expanduser() / NAME


def executable() -> Path:
    """Returns the running environment's script `hf-rlhf-zoo`. Raises ZooError if the environment has none."""
    # pip uses the user scheme if the environment is read-only.
    schemes = [sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user")]
    folders = [Path(sysconfig.get_path("scripts", scheme)) for scheme in schemes]
    for script_folder in folders:
        if os.access(script_folder / NAME, os.X_OK):
            return script_folder / NAME
    raise ZooError(f"{folders[0]} has no {NAME}: install the package rlhf-zoo there with pip.")


def install() -> str | None:
    """Makes `hf rlhf-zoo` run this environment's script. Writes nothing if that is already so.

    Returns:
        The script that `hf rlhf-zoo` ran before; None if there was none.

    Raises:
        ZooError: Another extension has this name, the folder cannot be written, or this environment has no such script.
    """
    script, target = executable(), folder()
    old_manifest = _own_manifest(target)
    is_empty = target.is_dir() and not any(target.iterdir())  # as an interrupted installation leaves it
    if old_manifest is None and os.path.lexists(target) and not is_empty:
        raise ZooError(f"{target} holds another extension of this name: run `hf extensions remove rlhf-zoo`.")
    manifest = {
        "owner": SOURCE,
        "repo": NAME,
        "repo_id": SOURCE,
        "short_name": NAME.removeprefix("hf-"),
        "executable_path": str(script),
        "type": "python",
        "description": DESCRIPTION,
        "commit_sha": None,
    }
    if old_manifest is None or manifest != {key: value for key, value in old_manifest.items() if key != "installed_at"}:
        write_json(target / MANIFEST, manifest | {"installed_at": now()})
    if not _is_in_future(target / COMMIT_CACHE):
        write_bytes(target / COMMIT_CACHE, b"")
        os.utime(target / COMMIT_CACHE, (FAR_FUTURE, FAR_FUTURE))
    return old_manifest["executable_path"] if old_manifest else None


def uninstall() -> bool:
    """Removes the files that `install` wrote, and their folder.

    Returns:
        False if there was nothing to remove.

    Raises:
        ZooError: The folder belongs to another extension, holds files that `install` did not write, or cannot be
            removed.
    """
    target = folder()
    if not os.path.lexists(target):
        return False
    if _own_manifest(target) is None:
        raise ZooError(f"{target} holds another extension of this name: run `hf extensions remove rlhf-zoo`.")
    foreign_files = sorted(path.name for path in target.iterdir() if path.name not in (MANIFEST, COMMIT_CACHE))
    if foreign_files:
        names = ", ".join(foreign_files)
        raise ZooError(
            f"{target} holds files that rlhf-zoo did not write ({names}): move them elsewhere and try again."
        )
    try:
        # Remove the manifest last: if this is interrupted, the folder still counts as rlhf-zoo's.
        for name in (COMMIT_CACHE, MANIFEST):
            (target / name).unlink(missing_ok=True)
        target.rmdir()
    except OSError as error:
        raise ZooError(f"{target} cannot be removed ({error.strerror}): remove it by hand.") from error
    return True


def _own_manifest(target: Path) -> dict[str, Any] | None:
    """Returns the manifest in a folder, if `install` wrote it; otherwise None."""
    if target.is_symlink():  # to a developer's checkout, whose files must not change
        return None
    try:
        manifest = json.loads((target / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("repo_id") == SOURCE else None


def _is_in_future(path: Path) -> bool:
    try:
        return path.stat().st_mtime >= FAR_FUTURE
    except OSError:
        return False


@contextlib.contextmanager
def foreground() -> Iterator[None]:
    """Lets Ctrl-C reach this process only, and not the `hf` that started it.

    `hf` waits with subprocess.call, which kills the child a quarter of a second after Ctrl-C, before a checkpoint is
    saved. So this process gets its own process group in the terminal's foreground, like a job of a shell. From then on,
    it ignores Ctrl-Z, because the shell started only `hf` and could not continue this process.

    Does nothing without a terminal, in a pipe, in the background, or if this process already has its own group.
    """
    group = os.getpgrp()
    if group == os.getpid() or not all(map(os.isatty, (0, 1, 2))) or os.tcgetpgrp(0) != group:
        yield
        return
    # A background group that calls tcsetpgrp gets SIGTTOU, which would stop it. SIGTSTP is Ctrl-Z.
    for signal_number in (signal.SIGTTOU, signal.SIGTSTP):
        signal.signal(signal_number, signal.SIG_IGN)
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the terminal has been closed
            os.tcsetpgrp(0, group)
