"""An embedded Hub in a separate process with a new root, for tests that call it with the real client."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from warm import PYTHON

import rlhf_zoo
from rlhf_zoo.hub.server import create_token
from rlhf_zoo.hub.server.cli import client_environment

if TYPE_CHECKING:
    from huggingface_hub import HfApi

SOURCES = str(Path(next(iter(rlhf_zoo.__path__))).parent)
STARTUP_SECONDS = 60

# huggingface_hub reads these when it is imported, so they must be set before a test imports it.
for _name in ("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_UPDATE_CHECK"):
    os.environ.setdefault(_name, "1")


@dataclass
class Answer:
    """An HTTP response."""

    status: int
    headers: dict[str, str]
    content: bytes

    def json(self) -> Any:
        return json.loads(self.content)


@dataclass
class Hub:
    """A Hub: its URL, root and write token, the environment of its client processes, and their cache."""

    url: str
    root: Path
    token: str
    env: dict[str, str]
    cache: Path
    _apis: dict[str | None, Any] = field(default_factory=dict, init=False)

    def api(self, role: str | None = "write") -> HfApi:
        """The real client, with a token of this role; None for no token."""
        from huggingface_hub import HfApi

        if role not in self._apis:
            token: str | bool = (
                False if role is None else self.token if role == "write" else create_token(self.root, role)
            )
            self._apis[role] = HfApi(endpoint=self.url, token=token)
        return self._apis[role]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def send(self, method: str, path: str, body: Any = None, role: str | None = "write", **headers: str) -> Answer:
        """Sends a request unchanged to a path or URL of this Hub; a client library would normalize it first."""
        all_headers = {"Authorization": f"Bearer {self.api(role).token}"} if role else {}
        all_headers |= {name.replace("_", "-"): value for name, value in headers.items()}
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path.removeprefix(self.url), content, all_headers)
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.headers), answer.read())
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def commit(self, repo: str, *lines: dict[str, Any]) -> Answer:
        """Sends a commit of these lines without a client, which might reject them."""
        content = [{"key": "header", "value": {"summary": "By hand"}}, *lines]
        return self.send("POST", f"/api/models/{repo}/commit/main", "\n".join(map(json.dumps, content)).encode())

    def push(self, repo: str, files: Mapping[str, bytes | str]) -> str:
        """Commits these files with the real client and returns the commit's id. Creates the repository if needed."""
        from huggingface_hub import CommitOperationAdd

        self.api().create_repo(repo, exist_ok=True)
        operations = [
            CommitOperationAdd(name, text if isinstance(text, bytes) else text.encode()) for name, text in files.items()
        ]
        return self.api().create_commit(repo, operations, commit_message="files").oid

    def batch(self, repo: str, oid: str, size: int) -> dict[str, Any]:
        """Asks, as git-lfs does, to upload a large file; returns the answer for it."""
        request = {"operation": "upload", "transfers": ["multipart"], "objects": [{"oid": oid, "size": size}]}
        return self.send("POST", f"/{repo}.git/info/lfs/objects/batch", request).json()["objects"][0]

    def git_dir(self, repo_id: str, kind: str = "model") -> Path:
        """The folder of a stored repository."""
        return self.root / "repos" / f"{kind}s" / f"{repo_id}.git"

    def git(self, repo_id: str, *arguments: str, kind: str = "model") -> str:
        """Runs git in a stored repository and returns its stdout and stderr; fails if git fails."""
        command = ["git", "-c", "safe.directory=*", "-C", str(self.git_dir(repo_id, kind)), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def run(self, *command: str, cwd: Path | None = None, **env: str) -> str:
        """Runs a client process in the Hub's environment, `run("hf", "download", ...)`, and returns its stdout."""
        programs = {"hf": [str(Path(sys.executable).with_name("hf"))], sys.executable: PYTHON}
        done = subprocess.run(
            [*programs.get(command[0], command[:1]), *command[1:]],
            env={**self.env, **env},
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def python(self, code: str, cwd: Path | None = None, **env: str) -> str:
        """Runs Python code in a client process."""
        return self.run(sys.executable, "-c", code, cwd=cwd, **env)


@dataclass
class RunningHub(Hub):
    """A Hub in a separate process that writes a log."""

    process: subprocess.Popen[bytes]
    log: Path

    def stop(self, how: int = signal.SIGTERM) -> int:
        """Stops the server and returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(timeout=60)


def base_environment() -> dict[str, str]:
    """This process's environment without any setting of a Hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING_FACE", "RLHF_"))}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [SOURCES, os.environ.get("PYTHONPATH")]))
    return kept | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}


def start_hub(folder: Path, *arguments: str, root: Path | None = None, **popen: Any) -> RunningHub:
    """Starts `python -m rlhf_zoo.hub.server` and waits until it listens."""
    folder.mkdir(parents=True, exist_ok=True)
    root = root or folder / "hub"
    ready = folder / "ready.json"
    ready.unlink(missing_ok=True)
    log = folder / "hub.log"
    command = [sys.executable, "-m", "rlhf_zoo.hub.server", "--verbose", "--parent", str(os.getpid())]
    command += ["--root", str(root), "--ready-file", str(ready), *arguments]
    with open(log, "ab") as output:
        process = subprocess.Popen(command, env=base_environment(), stderr=output, **popen)
    deadline = time.monotonic() + STARTUP_SECONDS
    while not ready.exists():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    url = json.loads(ready.read_text())["url"]
    token = create_token(root, "write")
    home = folder / "home"
    env = base_environment() | client_environment(url, token, home)
    return RunningHub(url, root, token, env, home / "hub", process, log)


@contextmanager
def running(folder: Path) -> Iterator[RunningHub]:
    """Runs an empty Hub; a traceback in its log fails the test."""
    running_hub = start_hub(folder)
    try:
        yield running_hub
    finally:
        running_hub.stop()
    assert "Traceback" not in running_hub.log.read_text(), running_hub.log.read_text()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[RunningHub]:
    """An empty Hub for one test."""
    with running(tmp_path / "server") as running_hub:
        yield running_hub


@pytest.fixture(scope="module")
def shared_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    """A Hub for all tests of a module, which must leave nothing behind."""
    with running(tmp_path_factory.mktemp("shared")) as running_hub:
        yield running_hub


@pytest.fixture
def hubs(tmp_path: Path) -> Iterator[Callable[..., RunningHub]]:
    """Starts any number of Hubs: `hubs("name", *arguments, root=...)`."""
    started: list[RunningHub] = []

    def start(name: str, *arguments: str, **options: Any) -> RunningHub:
        started.append(start_hub(tmp_path / name, *arguments, **options))
        return started[-1]

    try:
        yield start
    finally:
        for running_hub in started:
            running_hub.stop(signal.SIGKILL)
