"""A disk that is read-only, has something else in the place of a file, or whose machine has its clock set."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from thread_hub import ThreadHub

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.server import durable, process, storage
from rlhf_zoo.hub.server.git_writes import Quarantine
from rlhf_zoo.hub.server.large_files import LargeFiles
from rlhf_zoo.hub.server.storage import Storage
from rlhf_zoo.hub.server.xet_store import XetStore, current_epoch

pytestmark = pytest.mark.attack

REPO = "local/m"
DAY = 24 * 3600.0


@pytest.fixture
def here(near_hub: ThreadHub) -> ThreadHub:
    """With a repository that holds a file."""
    near_hub.make("m", {"README.md": "x"})
    return near_hub


@pytest.fixture
def read_only(here: ThreadHub, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes every write below the Hub's folder fail, as a disk does that was mounted again without them."""
    root = str(here.root)

    def refusing(real: Callable[..., Any], writes: Callable[..., bool]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **keywords: Any) -> Any:
            if str(path).startswith(root) and writes(*arguments, **keywords):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return real(path, *arguments, **keywords)

        return call

    def start() -> None:
        flags = os.O_WRONLY | os.O_RDWR | os.O_CREAT
        monkeypatch.setattr(os, "open", refusing(os.open, lambda how, *_, **__: bool(how & flags)))
        for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "chmod"):
            monkeypatch.setattr(os, name, refusing(getattr(os, name), lambda *_, **__: True))
        monkeypatch.setattr(os, "access", refusing_access(os.access))

    def refusing_access(real: Callable[..., bool]) -> Callable[..., bool]:
        return lambda path, mode: real(path, mode) and not (mode & os.W_OK and str(path).startswith(root))

    return start


def test_a_read_only_root_is_read_and_says_why_it_is_not_written(
    here: ThreadHub, read_only: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    oid = "0" * 64
    link = here.batch(REPO, oid, 5)["actions"]["upload"]["href"]
    slug = here.api().create_collection("c").slug
    read_only()
    for path in ("/api/models", f"/api/models/{REPO}", f"/{REPO}/resolve/main/README.md", "/api/collections"):
        assert here.send("GET", path).status == 200, path
    files = {"files": [{"path": "a.bin", "size": 5, "sample": ""}]}
    writes = [
        ("POST", "/api/repos/create", {"name": "n"}),
        ("POST", "/api/repos/move", {"fromRepo": REPO, "toRepo": "local/n"}),
        ("DELETE", "/api/repos/delete", {"name": "m"}),
        ("PUT", f"/api/models/{REPO}/settings", {"private": True}),
        ("POST", f"/api/models/{REPO}/preupload/main", files),
        ("POST", f"/api/models/{REPO}/tag/main", {"tag": "t"}),
        ("POST", f"/api/models/{REPO}/branch/b", {}),
        ("POST", "/api/collections", {"title": "d"}),
        ("DELETE", f"/api/collections/{slug}", None),
        ("GET", f"/api/models/{REPO}/xet-write-token/main", None),
        ("PUT", link, b"12345"),
        ("POST", f"/{REPO}.git/info/lfs/objects/batch", {"operation": "upload", "objects": [{"oid": oid, "size": 9}]}),
    ]
    answers = [here.send(method, path, body) for method, path, body in writes]
    answers.append(here.commit(REPO, {"key": "file", "value": {"path": "a", "content": "x"}}))
    for answer, asked in zip(answers, [*writes, "commit"], strict=True):
        assert (answer.status, b"cannot write under" in answer.content) == (507, True), (asked, answer)
        assert b"Read-only file system" in answer.content
    assert not [record for record in caplog.records if record.exc_info]
    with pytest.raises(ZooError, match=r"cannot write under .*Read-only file system"):
        process.serve(here.root)


def test_a_folder_in_the_place_of_a_file_is_no_defect_of_the_hub(here: ThreadHub) -> None:
    lock = here.root / "locks" / "models--local--m"
    lock.unlink()
    lock.mkdir()
    answer = here.commit(REPO, {"key": "file", "value": {"path": "a", "content": "x"}})
    assert (answer.status, b"is damaged" in answer.content) == (410, True)
    (here.root / "tokens.json").rename(here.root / "kept")
    (here.root / "tokens.json").mkdir()
    assert here.send("GET", "/api/whoami-v2").status == 410
    assert here.send("GET", f"/api/models/{REPO}", role=None).status == 200


def age(path: Path, seconds: float) -> Path:
    os.utime(path, (time.time() - seconds,) * 2)
    return path


def test_a_sweep_spares_what_is_being_written(tmp_path: Path) -> None:
    """Whatever the clock says: here each is as old as a clock that jumped by two days makes it."""
    hub = Storage(tmp_path)
    other = Storage(tmp_path)  # another server over the same folder
    hub.create(repo := storage.RepoId("model", "local", "m"), private=False, sdk=None, variables={})
    folder = hub.path(repo)
    epoch = current_epoch(folder, hub.clock.now())
    with Quarantine(folder) as quarantine:
        oid = quarantine.blob(b"x")
        (incoming,) = folder.glob("incoming-*")
        age(incoming, 2 * DAY)

        def pieces() -> Any:
            (half,) = (folder / "lfs" / "incomplete").iterdir()
            age(half, 2 * DAY)
            other.sweep()
            yield memoryview(b"x")

        digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
        LargeFiles(folder).receive(digest, 1, pieces())

        def xorb() -> Any:
            base = folder / "xet" / epoch
            for path in (base / "xorbs", *(base / "incomplete").iterdir(), base):
                age(path, 2 * DAY)
            other.sweep()
            yield memoryview(b"x")

        XetStore(folder, epoch).receive("0" * 64, xorb())
        assert quarantine.read(oid) == b"x"
    assert LargeFiles(folder).size(digest) == 1
    left = folder / "lfs" / "incomplete" / "left"
    left.write_bytes(b"x")
    age(left, 2 * DAY)
    other.sweep()
    assert not left.exists()


def test_a_clock_that_is_set_makes_nothing_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Storage(tmp_path)
    fresh = tmp_path / "trash" / "new-1"
    fresh.mkdir()
    real = time.time
    for jump in (30 * DAY, -30 * DAY):
        monkeypatch.setattr(durable.time, "time", lambda jump=jump: real() + jump)
        hub.sweep()
        assert fresh.exists(), jump
    monkeypatch.setattr(durable.time, "time", real)
    age(fresh, 2 * DAY)
    hub.sweep()
    assert not fresh.exists()


def test_what_cannot_be_swept_stops_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub = Storage(tmp_path)
    for name in ("old-1", "old-2"):
        (tmp_path / "trash" / name).write_text("x")
        age(tmp_path / "trash" / name, 2 * DAY)
    real = Path.unlink

    def unlink(path: Path, *arguments: Any, **keywords: Any) -> None:
        if path.name == "old-1":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        real(path, *arguments, **keywords)

    monkeypatch.setattr(Path, "unlink", unlink)
    hub.sweep()
    assert [path.name for path in (tmp_path / "trash").iterdir()] == ["old-1"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
