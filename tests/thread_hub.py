"""An embedded Hub in a thread of the test's process, and clients of that process that use it."""

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hub_fixture import Hub, base_environment

from rlhf_zoo.hub.server import create_token
from rlhf_zoo.hub.server.application import Application
from rlhf_zoo.hub.server.cli import client_environment
from rlhf_zoo.hub.server.git_writes import Quarantine, TreeEdit
from rlhf_zoo.hub.server.handler import HubServer
from rlhf_zoo.hub.server.names import RepoId
from rlhf_zoo.hub.server.storage import Storage


class ThreadHub(Hub):
    """An embedded Hub in a thread of this process."""

    def __init__(self, root: Path) -> None:
        root.mkdir(mode=0o700, exist_ok=True)
        self.server = HubServer("127.0.0.1", 0, Application(root))
        self.storage = Storage(root)
        url, token, home = self.server.url, create_token(root, "write"), root.with_name("home")
        super().__init__(url, root, token, base_environment() | client_environment(url, token, home), home / "hub")
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def folder(self, name: str, kind: str = "model") -> Path:
        return self.git_dir(f"local/{name}", kind)

    def make(self, name: str, files: Mapping[str, str | bytes], kind: str = "model", private: bool = False) -> str:
        """Creates a repository with these files without the checks of a push. Returns the commit."""
        repo = RepoId(kind, "local", name)
        self.storage.create(repo, private=private, sdk="gradio" if kind == "space" else None, variables={})
        with self.storage.git(repo) as git, Quarantine(self.storage.path(repo)) as quarantine:
            edit = TreeEdit(git, git.root_tree(git.branch("main") or ""))
            for path, content in files.items():
                edit.put(path, quarantine.add_blob(content if isinstance(content, bytes) else content.encode()))
            commit = quarantine.add_commit(edit.write(quarantine), [git.branch("main") or ""], "files")
            quarantine.migrate()
            git.write_ref("refs/heads/main", commit)
        return commit


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connects commands in this process to a Hub that does not answer."""
    from rlhf_zoo.hub.client import connect

    hub = connect.Hub("other", "http://127.0.0.1:9", "a test")
    # Commands call `connect.connect`; a patch of a name that modules import directly would outlive the test in them.
    monkeypatch.setattr(connect, "connect", lambda *_: contextlib.nullcontext(hub))


@pytest.fixture
def in_process_hub(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[ThreadHub]:
    """An empty Hub for one test; an exception in the server fails the test."""
    thread_hub = ThreadHub(tmp_path / "hub")
    yield thread_hub
    thread_hub.close()
    assert not [record for record in caplog.get_records("call") if record.exc_info], caplog.text


def _point_clients_at(hub: ThreadHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> ThreadHub:
    """Makes the clients of this process use `hub` with its token, and cache files in `cache`."""
    from huggingface_hub import constants, hf_api

    url = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(hf_api.api, "endpoint", hub.url)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    if "transformers.utils.hub" in sys.modules:  # its client keeps the first endpoint that it used
        monkeypatch.setattr(sys.modules["transformers.utils.hub"], "_hf_api", None)
    hub.cache = cache
    return hub


def send_all(sender: Any) -> None:
    """Runs all uploads of a `Sender` in this thread, one after another."""
    while upload := sender.next_upload():
        upload.send()


@pytest.fixture
def thread_hub(in_process_hub: ThreadHub, monkeypatch: pytest.MonkeyPatch) -> ThreadHub:
    """A Hub for one test, which the clients of this process use with an empty cache."""
    return _point_clients_at(in_process_hub, in_process_hub.root.with_name("cache"), monkeypatch)


@pytest.fixture(scope="module")
def module_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadHub]:
    """A Hub for all tests of a module; a fixture may fill it first."""
    thread_hub = ThreadHub(tmp_path_factory.mktemp("served") / "hub")
    yield thread_hub
    thread_hub.close()


@pytest.fixture
def at_module_hub(module_hub: ThreadHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ThreadHub:
    """`module_hub`, which the clients of this process use with an empty cache for each test."""
    return _point_clients_at(module_hub, tmp_path / "cache", monkeypatch)
