"""Installs rlhf-zoo as an extension of `hf`, and handles Ctrl-C while `hf rlhf-zoo ...` runs.

`hf` looks for extensions only in ~/.local/share/hf/extensions/hf-NAME/manifest.json, whatever HF_HOME or XDG_DATA_HOME
say (huggingface_hub 2.4, cli/extensions.py). It runs the executable named there as a child.
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
CHECKED = ".latest_commit"
# `hf extensions update` installs from the GitHub repository of this name. No GitHub account has a colon in its name, so
# nobody can create that repository.
SOURCE = "pip:rlhf-zoo"
DESCRIPTION = "The RLHF model zoo: train, publish and compare."
# `hf` asks GitHub for the newest commit once a day, by the time stamp of CHECKED. We are updated by pip, so the stamp
# lies far in the future: 2100-01-01, UTC.
NEVER = 4_102_444_800


def folder() -> Path:
    """Returns the folder in which `hf` looks for the extension."""
    return Path("~/.local/share/hf/extensions").expanduser() / NAME


def executable() -> Path:
    """Returns the script `hf-rlhf-zoo` of the running environment. Raises ZooError if it has none."""
    # pip installs into the user's scheme if the environment cannot be written.
    schemes = [sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user")]
    folders = [Path(sysconfig.get_path("scripts", scheme)) for scheme in schemes]
    for script_folder in folders:
        if os.access(script_folder / NAME, os.X_OK):
            return script_folder / NAME
    raise ZooError(f"{folders[0]} has no {NAME}: install the package rlhf-zoo there with pip.")


def install() -> str | None:
    """Makes `hf rlhf-zoo` run this environment's script. Writes nothing if it already does.

    Returns:
        The script that it ran before, if any.

    Raises:
        ZooError: Another extension has the name, the folder cannot be written, or this environment has no such script.
    """
    script, target = executable(), folder()
    previous = _ours(target)
    # An empty folder was left by an interrupted installation.
    if previous is None and os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
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
    if previous is None or manifest != {key: value for key, value in previous.items() if key != "installed_at"}:
        write_json(target / MANIFEST, manifest | {"installed_at": now()})
    if not _is_checked(target / CHECKED):
        write_bytes(target / CHECKED, b"")
        os.utime(target / CHECKED, (NEVER, NEVER))
    return previous["executable_path"] if previous else None


def uninstall() -> bool:
    """Removes what `install` wrote.

    Returns:
        False if there was nothing to remove.

    Raises:
        ZooError: The folder belongs to another extension, holds files that we did not write, or cannot be removed.
    """
    target = folder()
    if not os.path.lexists(target):
        return False
    if _ours(target) is None:
        raise ZooError(f"{target} holds another extension of this name: run `hf extensions remove rlhf-zoo`.")
    more = sorted(path.name for path in target.iterdir() if path.name not in (MANIFEST, CHECKED))
    if more:
        raise ZooError(f"{target} holds files that are not ours ({', '.join(more)}): move them away and try again.")
    try:
        # The manifest goes last: without it the folder would no longer count as ours if this is cut off.
        for name in (CHECKED, MANIFEST):
            (target / name).unlink(missing_ok=True)
        target.rmdir()
    except OSError as error:
        raise ZooError(f"{target} cannot be removed ({error.strerror}): remove it by hand.") from error
    return True


def _ours(target: Path) -> dict[str, Any] | None:
    """The manifest in the folder, if `install` wrote it."""
    if target.is_symlink():  # a developer's checkout: writing or removing would change the files that it leads to
        return None
    try:
        manifest = json.loads((target / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("repo_id") == SOURCE else None


def _is_checked(path: Path) -> bool:
    try:
        return path.stat().st_mtime >= NEVER
    except OSError:
        return False


@contextlib.contextmanager
def foreground() -> Iterator[None]:
    """Lets Ctrl-C reach this process only, and not the `hf` that started it.

    `hf` waits by subprocess.call. On Ctrl-C that kills the child after a quarter of a second, before a checkpoint is
    saved, and exits with 1. So this process becomes a process group of its own in the terminal's foreground, as a shell
    does with a job. Ctrl-Z is ignored meanwhile, because the shell knows only `hf` and could not continue us.

    Does nothing without a terminal, in a pipe, in the background, or if a shell has made such a group already.
    """
    shared = os.getpgrp()
    if shared == os.getpid() or not all(map(os.isatty, (0, 1, 2))) or os.tcgetpgrp(0) != shared:
        yield
        return
    # The kernel sends SIGTTOU to a background group that calls tcsetpgrp, which would stop us. SIGTSTP is Ctrl-Z.
    for number in (signal.SIGTTOU, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the terminal has been closed
            os.tcsetpgrp(0, shared)
