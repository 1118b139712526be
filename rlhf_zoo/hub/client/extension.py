"""`hf rlhf-zoo ...`: what the `hf` command needs to find us, and the terminal while it waits for us.

`hf` looks for extensions in ~/.local/share/hf/extensions/hf-NAME/manifest.json alone, whatever HF_HOME or
XDG_DATA_HOME say (huggingface_hub 2.4, cli/extensions.py), and runs the executable named there as a child.
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
# No account of GitHub can have a colon in its name: `hf extensions update` finds no stranger's repository to install.
SOURCE = "pip:rlhf-zoo"
DESCRIPTION = "The RLHF model zoo: train, publish and compare."
# `hf` asks GitHub for the newest commit where the last time it did is a day ago. pip brings ours: 2100-01-01, UTC.
NEVER = 4_102_444_800


def folder() -> Path:
    """Where `hf` looks for the extension."""
    return Path("~/.local/share/hf/extensions").expanduser() / NAME


def executable() -> Path:
    """The script `hf-rlhf-zoo` of the environment that this runs in. Raises ZooError where it has none."""
    schemes = [sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user")]
    places = [Path(sysconfig.get_path("scripts", scheme)) for scheme in schemes]
    for place in places:
        if os.access(place / NAME, os.X_OK):
            return place / NAME
    raise ZooError(f"There is no {NAME} in {places[0]}: install the package rlhf-zoo there with pip.")


def install() -> str | None:
    """Make `hf rlhf-zoo` run this environment's script. Returns the script that it ran before, if any.

    Nothing is written where it runs this one already. Raises ZooError where another extension has the name, the folder
    cannot be written, or this environment has no such script.
    """
    script, at = executable(), folder()
    before = _ours(at)
    if before is None and os.path.lexists(at) and not (at.is_dir() and not any(at.iterdir())):
        raise ZooError(f"{at} holds another extension of this name: remove it with `hf extensions remove rlhf-zoo`.")
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
    if before is None or manifest != {key: value for key, value in before.items() if key != "installed_at"}:
        write_json(at / MANIFEST, manifest | {"installed_at": now()})
    if not _is_checked(at / CHECKED):
        write_bytes(at / CHECKED, b"")
        os.utime(at / CHECKED, (NEVER, NEVER))
    return before["executable_path"] if before else None


def uninstall() -> bool:
    """Remove what `install` wrote; False where there is nothing.

    Raises ZooError where the folder is another extension's, holds more than we wrote, or cannot be removed.
    """
    at = folder()
    if not os.path.lexists(at):
        return False
    if _ours(at) is None:
        raise ZooError(f"{at} holds another extension of this name: `hf extensions remove rlhf-zoo` removes it.")
    more = sorted(path.name for path in at.iterdir() if path.name not in (MANIFEST, CHECKED))
    if more:
        raise ZooError(f"{at} holds files that are not ours ({', '.join(more)}): move them away and try again.")
    try:
        for name in (CHECKED, MANIFEST):
            (at / name).unlink(missing_ok=True)
        at.rmdir()
    except OSError as error:
        raise ZooError(f"{at} cannot be removed ({error.strerror}): remove it by hand.") from error
    return True


def _ours(at: Path) -> dict[str, Any] | None:
    """The manifest in the folder if `install` wrote it."""
    if at.is_symlink():
        return None
    try:
        manifest = json.loads((at / MANIFEST).read_bytes())
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
    """Ctrl-C reaches this process alone, not `hf`, which would kill it a quarter of a second later.

    `hf` waits by subprocess.call, which on Ctrl-C kills the child before a checkpoint is saved, and ends with 1. So the
    child becomes a process group of its own, in the terminal's foreground, as a shell does with a job. Nothing changes
    without a terminal, in a pipe, in the background, and where a shell has done so already. Ctrl-Z is ignored
    meanwhile: the shell, which knows of `hf` only, could not continue us.
    """
    shared = os.getpgrp()
    if shared == os.getpid() or not all(map(os.isatty, (0, 1, 2))) or os.tcgetpgrp(0) != shared:
        yield
        return
    for number in (signal.SIGTTOU, signal.SIGTSTP):  # the first is what a group behind gets for changing the order
        signal.signal(number, signal.SIG_IGN)
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the terminal has been closed
            os.tcsetpgrp(0, shared)
