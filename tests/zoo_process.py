"""Runs commands as a user does: each in a separate (warm) process, with a separate RLHF_ZOO_HOME."""

import contextlib
import shlex
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from hub_fixture import base_environment
from warm import PYTHON

COMMAND = [*PYTHON, "-m", "rlhf_zoo.cli"]


def environment(home: Path, **more: str) -> dict[str, str]:
    """The environment of a command whose caches, tokens and embedded Hub are under `home`; warm.py skips its plots."""
    own = {"HOME": str(home), "RLHF_ZOO_HOME": str(home / "zoo"), "COLUMNS": "100", "WARM_QUICK": "1"}
    return base_environment() | own | more


def zoo(*arguments: str | Path, home: Path, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `rlhf-zoo ARGUMENTS` to its end."""
    command = [*COMMAND, *map(str, arguments)]
    done = subprocess.run(command, env=environment(home, **env), cwd=cwd, capture_output=True, text=True, check=False)
    assert hubs_over(home) == [], "an embedded Hub outlived its command"
    return done


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def loopback() -> dict[str, str]:
    """Environment with which torch's processes communicate over loopback."""
    return {"GLOO_SOCKET_IFNAME": next(name for _, name in socket.if_nameindex() if name.startswith("lo"))}


def run_two_processes(
    command: list[str], logs: Path, env: dict[str, str], *, seconds: float = 240
) -> tuple[list[int], list[str]]:
    """Runs a command in two processes, and ends both if one fails, like torchrun. Returns exit codes and stderr.

    This process serves their TCP store, like torchrun: a free port might be taken before they connect.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = env | loopback() | {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    processes, stderr_logs = [], [logs / f"stderr-{rank}" for rank in "01"]
    for rank, log in zip("01", stderr_logs, strict=True):
        with open(log, "w") as stderr, open(logs / f"stdout-{rank}", "w") as stdout:
            ranked = env | {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}
            processes.append(subprocess.Popen(command, env=ranked, stdout=stdout, stderr=stderr))
    deadline = time.monotonic() + seconds
    while any(each.poll() is None for each in processes):
        is_late = time.monotonic() > deadline
        if is_late or any(each.poll() for each in processes):
            for each in processes:
                each.send_signal(signal.SIGKILL if is_late else signal.SIGTERM)
        assert not is_late, [log.read_text()[-3000:] for log in stderr_logs]
        time.sleep(0.05)
    return [each.returncode for each in processes], [log.read_text() for log in stderr_logs]


def program(folder: Path) -> Path:
    """Makes a folder for $PATH with a warm `rlhf-zoo`."""
    path = folder / "bin" / "rlhf-zoo"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    path.chmod(0o755)
    return path.parent


def errors(stderr: str) -> list[str]:
    """Returns the lines of a command's stderr, except progress bars and the notes on Hub, namespace and plan."""
    lines = stderr.replace("\r", "\n").splitlines()
    notes = ("Hub: ", "Publishing to ", "Not publishing", "Plan for ", "No plan: ")
    bars = ("%|", "%), ", "?it/s", " examples/s")
    return [line for line in lines if line.strip() and not line.startswith(notes) and not any(b in line for b in bars)]


def hubs_over(home: Path) -> list[int]:
    """Returns the process ids of Hub servers whose root is under `home`."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # the process has ended
            continue
        if "rlhf_zoo.hub.server" in words and any(word.startswith(f"{home}/") for word in words):
            pids.append(int(path.parent.name))
    return pids


def wait_until(ready: Callable[[], bool], process: subprocess.Popen | None = None, seconds: float = 120) -> None:
    """Waits until `ready()`; fails after `seconds`, or if the process ends first."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert process is None or process.poll() is None, "the process ended first"
        assert time.monotonic() < deadline, f"not ready after {seconds:g} s"
        time.sleep(0.01)


def serves_page(port: int) -> bool:
    """Whether the port serves a page."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=10) as answer:
        return answer.status == 200
    return False
