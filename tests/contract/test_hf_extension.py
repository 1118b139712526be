"""`hf rlhf-zoo ...` is installed for the real `hf`, run by it, and removed without a trace."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from zoo_process import environment, errors, zoo

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client import extension

BIN = Path(sys.executable).parent
FOLDER = ".local/share/hf/extensions/hf-rlhf-zoo"
SCRIPT = BIN / "hf-rlhf-zoo"


def hf(*arguments: str, home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    # `hf` must not reach GitHub.
    offline = {"HF_HUB_DISABLE_UPDATE_CHECK": "1", "NO_COLOR": "1", "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": ""}
    return subprocess.run(
        [BIN / "hf", *arguments], env=environment(home, **offline | env), capture_output=True, text=True, check=False
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the extension will be installed."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / FOLDER


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def test_extension_installs_runs_and_uninstalls(tmp_path):
    """`hf` passes on arguments and exit codes, lists the extension, and rejects it after its removal."""
    other = tmp_path / ".local/share/hf/extensions/hf-other"
    other.mkdir(parents=True)
    result = zoo("hub", "extension", "install", home=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert f"`hf rlhf-zoo` now runs {SCRIPT}:" in result.stdout
    assert "rlhf-zoo hub extension uninstall" in result.stdout
    before = files(tmp_path / FOLDER)
    assert zoo("hub", "extension", "install", home=tmp_path).stdout == f"`hf rlhf-zoo` already runs {SCRIPT}.\n"
    assert files(tmp_path / FOLDER) == before

    arguments = ["recipes", "show", "no such recipe; $(x) 'y'"]
    via_hf, direct = hf("rlhf-zoo", *arguments, home=tmp_path), zoo(*arguments, home=tmp_path)
    assert (via_hf.returncode, via_hf.stderr) == (2, direct.stderr)
    assert "no such recipe; $(x) 'y'" in via_hf.stderr
    assert hf("rlhf-zoo", "run", "--help", home=tmp_path).stdout.startswith("Usage: rlhf-zoo run ")
    assert "The RLHF model zoo" in hf("--help", home=tmp_path).stdout
    rows = json.loads(hf("extensions", "list", "--format", "json", home=tmp_path).stdout)
    (row,) = [row for row in rows if row["command"] == "hf rlhf-zoo"]
    assert (row["source"], row["type"]) == ("pip:rlhf-zoo", "python")

    assert zoo("hub", "extension", "uninstall", home=tmp_path).stdout == "`hf rlhf-zoo` is removed.\n"
    assert list(other.parent.iterdir()) == [other]
    assert hf("rlhf-zoo", "--version", home=tmp_path).returncode == 2
    assert zoo("hub", "extension", "uninstall", home=tmp_path).stdout == "`hf rlhf-zoo` was not installed.\n"


def test_hf_installs_nothing_from_github(tmp_path, folder):
    """With `hf`'s update checks on, an extension of this name on GitHub is never installed."""
    extension.install()
    before = files(folder)
    requests: list[str] = []

    class Closed(BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            requests.append(self.requestline)
            self.send_error(502)

    with ThreadingHTTPServer(("127.0.0.1", 0), Closed) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        env = {"HTTPS_PROXY": f"http://127.0.0.1:{proxy.server_port}", "HF_HUB_DISABLE_UPDATE_CHECK": "0"}
        assert hf("rlhf-zoo", "--version", home=tmp_path, **env).returncode == 0
        assert requests  # `hf` checks its own version through the proxy
        assert not [line for line in requests if "github" in line], requests
        update = hf("extensions", "update", "rlhf-zoo", home=tmp_path, **env)
        assert "Could not check updates" in update.stdout + update.stderr
        assert [line for line in requests if "github.com" in line]
        proxy.shutdown()
    assert files(folder) == before


def test_install_replaces_stale_executable_path(tmp_path, folder):
    extension.install()
    manifest = folder / "manifest.json"
    stale = str(tmp_path / "gone" / "bin" / "hf-rlhf-zoo")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"executable_path": stale}))
    assert extension.install() == stale
    assert json.loads(manifest.read_text())["executable_path"] == str(SCRIPT)
    assert extension.install() == str(SCRIPT)


@pytest.mark.parametrize(
    "content", ['{"repo_id": "someone/hf-rlhf-zoo", "owner": "someone"}', '{"repo_id": ', "[]", None], ids=repr
)
def test_extension_of_same_name_is_left_unchanged(folder, content):
    (folder / "venv").mkdir(parents=True)
    if content is not None:
        (folder / "manifest.json").write_text(content)
    before = files(folder)
    for call in (extension.install, extension.uninstall):
        with pytest.raises(
            ZooError, match=rf"^{folder} holds another extension of this name: run `hf extensions remove"
        ):
            call()
    assert files(folder) == before and (folder / "venv").is_dir()


def test_uninstall_rejects_symlinked_folder(tmp_path, folder):
    """Following the link would empty a folder elsewhere."""
    extension.install()
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ZooError, match="another extension"):
        extension.uninstall()
    assert (tmp_path / "elsewhere" / "manifest.json").exists()


def test_uninstall_rejects_folder_with_foreign_files(folder):
    folder.mkdir(parents=True)  # an empty folder belongs to nobody
    assert extension.install() is None
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ZooError, match=r"holds files that rlhf-zoo did not write \(notes.txt\)"):
        extension.uninstall()
    assert sorted(files(folder)) == [".latest_commit", "manifest.json", "notes.txt"]
    (folder / "notes.txt").unlink()
    assert extension.uninstall()
    assert not folder.exists()


def test_install_failure_is_one_sentence(tmp_path, folder, monkeypatch):
    (tmp_path / ".local").write_text("")
    result = zoo("hub", "extension", "install", home=tmp_path)
    assert (result.returncode, result.stdout, len(errors(result.stderr))) == (2, "", 1)
    assert str(folder) in result.stderr
    monkeypatch.setattr(extension.sysconfig, "get_path", lambda *_: str(tmp_path / "bin"))
    with pytest.raises(ZooError, match="has no hf-rlhf-zoo"):
        extension.install()


# Ctrl-C

LAUNCHER = f"""#!{sys.executable}
import signal, sys, time
from rlhf_zoo.hub.client.extension import foreground

signal.signal(signal.SIGINT, signal.default_int_handler)
with foreground():
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        time.sleep(1)  # four times as long as `hf` waits before it kills
        print("saved", flush=True)
        sys.exit(130)
"""


def test_extension_gives_child_time_to_save_on_ctrl_c(tmp_path, folder):
    """`hf` by itself kills its child after a quarter of a second.

    The shell also gets its terminal back: `stty` works only in the foreground.
    """
    extension.install()
    launcher, manifest = tmp_path / "launcher", folder / "manifest.json"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"executable_path": str(launcher)}))
    command = ["/bin/sh", "-c", f"{BIN / 'hf'} rlhf-zoo; echo code $?; stty sane && echo done"]
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execve(command[0], command, environment(tmp_path, HF_HUB_DISABLE_UPDATE_CHECK="1"))
    output, pressed, deadline = b"", False, time.monotonic() + 60
    while time.monotonic() < deadline and select.select([terminal], [], [], 60)[0]:
        try:
            output += os.read(terminal, 65536)
        except OSError:  # its last process has ended
            break
        if not pressed and b"ready" in output:
            os.write(terminal, b"\x03")
            pressed = True
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert all(word in output for word in (b"saved", b"code 130", b"done")), output
