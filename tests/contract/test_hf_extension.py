"""`hf rlhf-zoo ...`: installed for the real `hf`, run by it, and removed without a trace."""

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
    # Where `hf` would ask GitHub, it hears nothing.
    quiet = {"HF_HUB_DISABLE_UPDATE_CHECK": "1", "NO_COLOR": "1", "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": ""}
    return subprocess.run(
        [BIN / "hf", *arguments], env=environment(home, **quiet | env), capture_output=True, text=True, check=False
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the extension goes, which is nowhere yet."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / FOLDER


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


def test_installed_run_and_removed(tmp_path):
    """By `hf` itself: arguments and exit codes pass, it lists the extension, and knows it no more at the end."""
    other = tmp_path / ".local/share/hf/extensions/hf-other"
    other.mkdir(parents=True)
    done = zoo("hub", "extension", "install", home=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"`hf rlhf-zoo` runs {SCRIPT}:" in done.stdout
    assert "rlhf-zoo hub extension uninstall" in done.stdout
    before = files(tmp_path / FOLDER)
    assert zoo("hub", "extension", "install", home=tmp_path).stdout == f"`hf rlhf-zoo` runs {SCRIPT} already.\n"
    assert files(tmp_path / FOLDER) == before

    arguments = ["recipes", "show", "no such recipe; $(x) 'y'"]
    through, plain = hf("rlhf-zoo", *arguments, home=tmp_path), zoo(*arguments, home=tmp_path)
    assert (through.returncode, through.stderr) == (2, plain.stderr)
    assert "no such recipe; $(x) 'y'" in through.stderr
    assert hf("rlhf-zoo", "run", "--help", home=tmp_path).stdout.startswith("Usage: rlhf-zoo run ")
    assert "The RLHF model zoo" in hf("--help", home=tmp_path).stdout
    rows = json.loads(hf("extensions", "list", "--format", "json", home=tmp_path).stdout)
    (row,) = [row for row in rows if row["command"] == "hf rlhf-zoo"]
    assert (row["source"], row["type"]) == ("pip:rlhf-zoo", "python")

    assert zoo("hub", "extension", "uninstall", home=tmp_path).stdout == "`hf rlhf-zoo` is removed.\n"
    assert list(other.parent.iterdir()) == [other]
    assert hf("rlhf-zoo", "--version", home=tmp_path).returncode == 2
    assert zoo("hub", "extension", "uninstall", home=tmp_path).stdout == "`hf rlhf-zoo` was not installed.\n"


def test_github_is_asked_for_nothing(tmp_path, folder):
    """With `hf`'s own checks for updates on: GitHub has no such extension, and a stranger's is never installed."""
    extension.install()
    before = files(folder)
    asked: list[str] = []

    class Closed(BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            asked.append(self.requestline)
            self.send_error(502)

    with ThreadingHTTPServer(("127.0.0.1", 0), Closed) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        env = {"HTTPS_PROXY": f"http://127.0.0.1:{proxy.server_port}", "HF_HUB_DISABLE_UPDATE_CHECK": "0"}
        assert hf("rlhf-zoo", "--version", home=tmp_path, **env).returncode == 0
        assert asked  # `hf`'s check of its own version: the proxy is in its way
        assert not [line for line in asked if "github" in line], asked
        updated = hf("extensions", "update", "rlhf-zoo", home=tmp_path, **env)
        assert "Could not check updates" in updated.stdout + updated.stderr
        assert [line for line in asked if "github.com" in line]
        proxy.shutdown()
    assert files(folder) == before


def test_an_environment_that_moved(tmp_path, folder):
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
def test_anothers_extension_of_the_name_is_left_alone(folder, content):
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


def test_a_link_is_anothers(tmp_path, folder):
    """Removing through it would empty a folder elsewhere."""
    extension.install()
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ZooError, match="another extension"):
        extension.uninstall()
    assert (tmp_path / "elsewhere" / "manifest.json").exists()


def test_files_of_others_in_our_folder(folder):
    folder.mkdir(parents=True)  # an empty one is nobody's
    assert extension.install() is None
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ZooError, match=r"holds files that are not ours \(notes.txt\)"):
        extension.uninstall()
    assert sorted(files(folder)) == [".latest_commit", "manifest.json", "notes.txt"]
    (folder / "notes.txt").unlink()
    assert extension.uninstall()
    assert not folder.exists()


def test_what_cannot_be_installed_is_one_sentence(tmp_path, folder, monkeypatch):
    (tmp_path / ".local").write_text("")
    done = zoo("hub", "extension", "install", home=tmp_path)
    assert (done.returncode, done.stdout, len(errors(done.stderr))) == (2, "", 1)
    assert str(folder) in done.stderr
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


def test_ctrl_c_leaves_time_to_save(tmp_path, folder):
    """`hf` alone would kill its child after a quarter of a second. A shell's script gets its terminal back: only who
    is in the foreground may change the terminal's settings."""
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
    said, pressed, deadline = b"", False, time.monotonic() + 60
    while time.monotonic() < deadline and select.select([terminal], [], [], 60)[0]:
        try:
            said += os.read(terminal, 65536)
        except OSError:  # its last process has ended
            break
        if not pressed and b"ready" in said:
            os.write(terminal, b"\x03")
            pressed = True
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert all(word in said for word in (b"saved", b"code 130", b"done")), said
