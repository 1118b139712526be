"""An embedded Hub in a thread of the test's own process, which the clients of that process talk to."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hub_fixture import Hub, base_environment

from rlhf_zoo.hub.server import create_token
from rlhf_zoo.hub.server.application import Application
from rlhf_zoo.hub.server.cli import client_environment
from rlhf_zoo.hub.server.git import Quarantine, TreeEdit
from rlhf_zoo.hub.server.handler import HubServer
from rlhf_zoo.hub.server.names import RepoId
from rlhf_zoo.hub.server.storage import Storage

__all__ = ["Answer", "ThreadHub", "near_hub", "thread_hub"]


@dataclass
class Answer:
    """What came back, as it is."""

    status: int
    headers: dict[str, str]
    content: bytes

    def json(self) -> Any:
        return json.loads(self.content)


class ThreadHub(Hub):
    """An embedded Hub in a thread of this process."""

    def __init__(self, root: Path, **options: Any) -> None:
        root.mkdir(mode=0o700)
        self.server = HubServer("127.0.0.1", 0, Application(root, **options))
        self.storage, self.port = Storage(root), self.server.server_port
        url, token, home = self.server.url, create_token(root, "write"), root.with_name("home")
        super().__init__(url, root, token, base_environment() | client_environment(url, token, home), home / "hub")
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def send(self, method: str, path: str, body: Any = None, role: str | None = "write", **headers: str) -> Answer:
        """A request as it is, to a path or an address of this Hub: a client library would tidy it up first."""
        sent = {"Authorization": f"Bearer {self.api(role).token}"} if role else {}
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            sent |= {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path.removeprefix(self.url), content, sent)
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.headers), answer.read())
        finally:
            connection.close()

    def commit(self, repo: str, *lines: dict[str, Any]) -> Answer:
        """A commit of these lines, whatever a client would say of them."""
        content = [{"key": "header", "value": {"summary": "By hand"}}, *lines]
        return self.send("POST", f"/api/models/{repo}/commit/main", "\n".join(map(json.dumps, content)).encode())

    def batch(self, repo: str, oid: str, size: int) -> dict[str, Any]:
        """What git-lfs is told of the upload of a large file."""
        asked = {"operation": "upload", "transfers": ["multipart"], "objects": [{"oid": oid, "size": size}]}
        return self.send("POST", f"/{repo}.git/info/lfs/objects/batch", asked).json()["objects"][0]

    def folder(self, name: str, kind: str = "model") -> Path:
        return self.git_dir(f"local/{name}", kind)

    def make(self, name: str, files: dict[str, str], kind: str = "model", private: bool = False) -> str:
        """A repository with these files, whatever a push of them would be told. Returns the commit."""
        repo = RepoId(kind, "local", name)
        self.storage.create(repo, private=private, sdk="gradio" if kind == "space" else None, variables={})
        with self.storage.git(repo) as git, Quarantine(self.storage.path(repo)) as quarantine:
            edit = TreeEdit(git, git.root_tree(git.branch("main") or ""))
            for path, content in files.items():
                edit.put(path, quarantine.blob(content.encode()))
            commit = quarantine.commit(edit.write(quarantine), [git.branch("main") or ""], "files")
            quarantine.migrate()
            git.write_ref("refs/heads/main", commit)
        return commit


@pytest.fixture
def near_hub(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[ThreadHub]:
    """A Hub for one test, empty; a request that failed inside the server fails the test."""
    found = ThreadHub(tmp_path / "hub")
    yield found
    found.close()
    assert not [record for record in caplog.get_records("call") if record.exc_info], caplog.text


@pytest.fixture
def thread_hub(near_hub: ThreadHub, monkeypatch: pytest.MonkeyPatch) -> ThreadHub:
    """The clients of this process talk to it, with its token, and have a cache of their own."""
    from huggingface_hub import constants

    url, cache = near_hub.url, near_hub.root.with_name("cache")
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_TOKEN", near_hub.token)
    near_hub.cache = cache
    return near_hub
