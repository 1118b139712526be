"""The Hub on a read-only disk, with folders in the place of files, and on a machine whose clock jumps."""

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
def file_hub(in_process_hub: ThreadHub) -> ThreadHub:
    """A Hub with a repository that holds a file."""
    in_process_hub.make("m", {"README.md": "x"})
    return in_process_hub


@pytest.fixture
def make_read_only(file_hub: ThreadHub, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes every write below the Hub's folder fail, as on a disk that was remounted read-only."""
    root = str(file_hub.root)

    def fail_writes(real: Callable[..., Any], writes: Callable[..., bool]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **keywords: Any) -> Any:
            if str(path).startswith(root) and writes(*arguments, **keywords):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return real(path, *arguments, **keywords)

        return call

    def patch_os() -> None:
        flags = os.O_WRONLY | os.O_RDWR | os.O_CREAT
        monkeypatch.setattr(os, "open", fail_writes(os.open, lambda mode, *_, **__: bool(mode & flags)))
        for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "chmod"):
            monkeypatch.setattr(os, name, fail_writes(getattr(os, name), lambda *_, **__: True))
        monkeypatch.setattr(os, "access", deny_write_access(os.access))

    def deny_write_access(real: Callable[..., bool]) -> Callable[..., bool]:
        return lambda path, mode: real(path, mode) and not (mode & os.W_OK and str(path).startswith(root))

    return patch_os


def test_read_only_root_serves_reads_and_answers_507_to_writes(
    file_hub: ThreadHub, make_read_only: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    oid = "0" * 64
    link = file_hub.batch(REPO, oid, 5)["actions"]["upload"]["href"]
    slug = file_hub.api().create_collection("c").slug
    make_read_only()
    for path in ("/api/models", f"/api/models/{REPO}", f"/{REPO}/resolve/main/README.md", "/api/collections"):
        assert file_hub.send("GET", path).status == 200, path
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
    answers = [file_hub.send(method, path, body) for method, path, body in writes]
    answers.append(file_hub.commit(REPO, {"key": "file", "value": {"path": "a", "content": "x"}}))
    for answer, request in zip(answers, [*writes, "commit"], strict=True):
        assert (answer.status, b"cannot write under" in answer.content) == (507, True), (request, answer)
        assert b"Read-only file system" in answer.content
    assert not [record for record in caplog.records if record.exc_info]
    with pytest.raises(ZooError, match=r"cannot write under .*Read-only file system"):
        process.serve(file_hub.root)


def test_folder_in_place_of_file_is_reported_as_damage(file_hub: ThreadHub) -> None:
    lock = file_hub.root / "locks" / "models--local--m"
    lock.unlink()
    lock.mkdir()
    answer = file_hub.commit(REPO, {"key": "file", "value": {"path": "a", "content": "x"}})
    assert (answer.status, b"is damaged" in answer.content) == (410, True)
    (file_hub.root / "tokens.json").rename(file_hub.root / "kept")
    (file_hub.root / "tokens.json").mkdir()
    assert file_hub.send("GET", "/api/whoami-v2").status == 410
    assert file_hub.send("GET", f"/api/models/{REPO}", role=None).status == 200


def set_age(path: Path, seconds: float) -> Path:
    os.utime(path, (time.time() - seconds,) * 2)
    return path


def test_sweep_keeps_files_being_written(tmp_path: Path) -> None:
    """They are kept even if they look two days old because the clock jumped."""
    hub = Storage(tmp_path)
    other = Storage(tmp_path)  # another server on the same folder
    hub.create(repo := storage.RepoId("model", "local", "m"), private=False, sdk=None, variables={})
    folder = hub.path(repo)
    epoch = current_epoch(folder, hub.clock.now())
    with Quarantine(folder) as quarantine:
        oid = quarantine.add_blob(b"x")
        (incoming,) = folder.glob("incoming-*")
        set_age(incoming, 2 * DAY)

        def pieces() -> Any:
            (partial,) = (folder / "lfs" / "incomplete").iterdir()
            set_age(partial, 2 * DAY)
            other.sweep()
            yield memoryview(b"x")

        digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
        LargeFiles(folder).receive(digest, 1, pieces())

        def xorb() -> Any:
            base = folder / "xet" / epoch
            for path in (base / "xorbs", *(base / "incomplete").iterdir(), base):
                set_age(path, 2 * DAY)
            other.sweep()
            yield memoryview(b"x")

        XetStore(folder, epoch).receive("0" * 64, xorb())
        assert quarantine.read(oid) == b"x"
    assert LargeFiles(folder).size(digest) == 1
    leftover = folder / "lfs" / "incomplete" / "left"
    leftover.write_bytes(b"x")
    set_age(leftover, 2 * DAY)
    other.sweep()
    assert not leftover.exists()


def test_sweep_continues_when_repository_is_deleted_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub, scan = Storage(tmp_path), os.scandir
    repos = [storage.RepoId("model", "local", name) for name in ("deleted", "kept")]
    for repo in repos:
        hub.create(repo, private=False, sdk=None, variables={})
    leftover = hub.path(repos[1]) / "lfs" / "incomplete" / "left"
    leftover.write_bytes(b"x")
    set_age(leftover, 2 * DAY)
    deleted = hub.path(repos[0])

    def delete_first(path: Any = ".") -> Any:
        if path == deleted:
            deleted.rename(tmp_path / "moved" / "away")
        return scan(path)

    monkeypatch.setattr(os, "scandir", delete_first)
    hub.sweep()
    assert not deleted.exists() and not leftover.exists()


def test_sweep_ignores_clock_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Storage(tmp_path)
    fresh = tmp_path / "trash" / "new-1"
    fresh.mkdir()
    real = time.time
    for jump in (30 * DAY, -30 * DAY):
        monkeypatch.setattr(durable.time, "time", lambda jump=jump: real() + jump)
        hub.sweep()
        assert fresh.exists(), jump
    monkeypatch.setattr(durable.time, "time", real)
    set_age(fresh, 2 * DAY)
    hub.sweep()
    assert not fresh.exists()


def test_sweep_warns_and_continues_when_unlink_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub = Storage(tmp_path)
    for name in ("old-1", "old-2"):
        (tmp_path / "trash" / name).write_text("x")
        set_age(tmp_path / "trash" / name, 2 * DAY)
    real = Path.unlink

    def unlink(path: Path, *arguments: Any, **keywords: Any) -> None:
        if path.name == "old-1":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        real(path, *arguments, **keywords)

    monkeypatch.setattr(Path, "unlink", unlink)
    hub.sweep()
    assert [path.name for path in (tmp_path / "trash").iterdir()] == ["old-1"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
