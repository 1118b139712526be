"""The command line as a user runs it: a (warm) process of its own, with its own RLHF_ZOO_HOME."""

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
    """Nothing of the user's own: caches, tokens and the embedded Hub lie under `home`. Plots are not drawn: warm.py."""
    own = {"HOME": str(home), "RLHF_ZOO_HOME": str(home / "zoo"), "COLUMNS": "100", "WARM_QUICK": "1"}
    return base_environment() | own | more


def zoo(*arguments: str | Path, home: Path, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """`rlhf-zoo ARGUMENTS`, to its end."""
    command = [*COMMAND, *map(str, arguments)]
    done = subprocess.run(command, env=environment(home, **env), cwd=cwd, capture_output=True, text=True, check=False)
    assert hubs_over(home) == [], "an embedded Hub outlived its command"
    return done


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def loopback() -> dict[str, str]:
    """What torch's processes need to find each other where no other network is."""
    return {"GLOO_SOCKET_IFNAME": next(name for _, name in socket.if_nameindex() if name.startswith("lo"))}


def together(
    command: list[str], logs: Path, env: dict[str, str], *, seconds: float = 240
) -> tuple[list[int], list[str]]:
    """A command in two processes, which end as a launcher ends them. Returns their exit codes and stderr.

    They meet where this process listens, as torchrun has it: a port that was free may be taken before they do.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = env | loopback() | {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    processes, said = [], [logs / f"stderr-{rank}" for rank in "01"]
    for rank, log in zip("01", said, strict=True):
        with open(log, "w") as stderr, open(logs / f"stdout-{rank}", "w") as stdout:
            ranked = env | {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}
            processes.append(subprocess.Popen(command, env=ranked, stdout=stdout, stderr=stderr))
    deadline = time.monotonic() + seconds
    while any(each.poll() is None for each in processes):
        late = time.monotonic() > deadline
        if late or any(each.poll() for each in processes):
            for each in processes:
                each.send_signal(signal.SIGKILL if late else signal.SIGTERM)
        assert not late, [log.read_text()[-3000:] for log in said]
        time.sleep(0.05)
    return [each.returncode for each in processes], [log.read_text() for log in said]


def program(folder: Path) -> Path:
    """A folder for $PATH with a warm `rlhf-zoo`."""
    path = folder / "bin" / "rlhf-zoo"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    path.chmod(0o755)
    return path.parent


def errors(stderr: str) -> list[str]:
    """What a command said on stderr, without progress bars and the lines that name Hub, namespace and plan."""
    lines = stderr.replace("\r", "\n").splitlines()
    notes = ("Hub: ", "Publishing to ", "Not publishing", "Plan for ", "No plan: ")
    bars = ("%|", "%), ", "?it/s", " examples/s")
    return [line for line in lines if line.strip() and not line.startswith(notes) and not any(b in line for b in bars)]


def hubs_over(home: Path) -> list[int]:
    """Process ids of Hub servers over a root under `home`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        if "rlhf_zoo.hub.server" in words and any(word.startswith(f"{home}/") for word in words):
            found.append(int(path.parent.name))
    return found


def wait_until(ready: Callable[[], bool], process: subprocess.Popen | None = None, seconds: float = 120) -> None:
    """Until `ready()`; fails when that takes too long or the process ends first."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert process is None or process.poll() is None, "the process ended first"
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def answers(port: int) -> bool:
    """Whether a page is served there."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=10) as answer:
        return answer.status == 200
    return False
