"""The command line as a user runs it: a (warm) process of its own, with its own RLHF_ZOO_HOME."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from hub_fixture import base_environment
from warm import PYTHON

__all__ = ["COMMAND", "environment", "errors", "hubs_over", "program", "wait_until", "zoo"]

COMMAND = [*PYTHON, "-m", "rlhf_zoo.cli"]


def environment(home: Path, **more: str) -> dict[str, str]:
    """Nothing of the user's own: caches, tokens and the embedded Hub lie under `home`."""
    return base_environment() | {"HOME": str(home), "RLHF_ZOO_HOME": str(home / "zoo"), "COLUMNS": "100"} | more


def zoo(*arguments: str | Path, home: Path, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """`rlhf-zoo ARGUMENTS`, to its end."""
    command = [*COMMAND, *map(str, arguments)]
    done = subprocess.run(command, env=environment(home, **env), cwd=cwd, capture_output=True, text=True, check=False)
    assert hubs_over(home) == [], "an embedded Hub outlived its command"
    return done


def program(folder: Path) -> Path:
    """A folder for $PATH with a warm `rlhf-zoo`."""
    path = folder / "bin" / "rlhf-zoo"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    path.chmod(0o755)
    return path.parent


def errors(stderr: str) -> list[str]:
    """What a command said on stderr, without the two lines that name the Hub and the namespace, and progress bars."""
    lines = stderr.replace("\r", "\n").splitlines()
    notes = ("Hub: ", "Publishing to ", "Nothing is published: ")
    bars = ("%|", "?it/s", " examples/s")
    return [line for line in lines if line.strip() and not line.startswith(notes) and not any(b in line for b in bars)]


def hubs_over(home: Path) -> list[int]:
    """Process ids of Hub servers over a root under `home`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        if "rlhf_zoo.hub_server" in words and any(word.startswith(f"{home}/") for word in words):
            found.append(int(path.parent.name))
    return found


def wait_until(ready: Callable[[], bool], process: subprocess.Popen | None = None, seconds: float = 120) -> None:
    """Until `ready()`; fails when that takes too long or the process ends first."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert process is None or process.poll() is None, "the process ended first"
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)
