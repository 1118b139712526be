"""An embedded Hub in a thread of the test's own process, which the clients of that process talk to."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rlhf_zoo.hub.server import create_token
from rlhf_zoo.hub.server.application import Application
from rlhf_zoo.hub.server.git import Quarantine, TreeEdit
from rlhf_zoo.hub.server.handler import HubServer
from rlhf_zoo.hub.server.names import RepoId
from rlhf_zoo.hub.server.storage import Storage

if TYPE_CHECKING:
    from huggingface_hub import HfApi

__all__ = ["ThreadHub", "at_module_hub", "module_hub", "thread_hub"]


class ThreadHub:
    """An embedded Hub in a thread of this process."""

    def __init__(self, root: Path) -> None:
        root.mkdir(mode=0o700)
        self.root, self.storage = root, Storage(root)
        self.server = HubServer("127.0.0.1", 0, Application(root))
        self.url, self.token = self.server.url, create_token(root, "write")
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def api(self, role: str | None = "write") -> HfApi:
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.url, token=self.token if role else False)

    def folder(self, name: str, kind: str = "model") -> Path:
        return self.storage.path(RepoId(kind, "local", name))

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


@contextlib.contextmanager
def _served(root: Path) -> Iterator[ThreadHub]:
    found = ThreadHub(root)
    yield found
    found.server.shutdown()
    found.server.server_close()


def _talk_to(hub: ThreadHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants, hf_api

    url = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(hf_api.api, "endpoint", hub.url)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    if "transformers.utils.hub" in sys.modules:  # its client keeps the address that it was first used with
        monkeypatch.setattr(sys.modules["transformers.utils.hub"], "_hf_api", None)


@pytest.fixture
def thread_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadHub]:
    """The clients of this process talk to it, with its token, and have a cache of their own."""
    with _served(tmp_path / "hub") as found:
        _talk_to(found, tmp_path / "cache", monkeypatch)
        yield found


@pytest.fixture(scope="module")
def module_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadHub]:
    """One for all tests of a module, which may be filled before any of them."""
    with _served(tmp_path_factory.mktemp("served") / "hub") as found:
        yield found


@pytest.fixture
def at_module_hub(module_hub: ThreadHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ThreadHub:
    """The clients of this process talk to `module_hub`, each test's with a cache of its own."""
    _talk_to(module_hub, tmp_path / "cache", monkeypatch)
    return module_hub
