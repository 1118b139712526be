"""`rlhf-zoo hub serve|status|token|env` and the life of the server's process."""

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import pytest
from click.testing import CliRunner
from hub_fixture import base_environment
from huggingface_hub import HfApi
from zoo_process import wait_until

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.server import create_token, process
from rlhf_zoo.hub.server.application import Application
from rlhf_zoo.hub.server.cli import hub as group
from rlhf_zoo.hub.server.handler import HubServer

EXPORTS = {
    "HF_HUB_DISABLE_XET": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    "GRADIO_ANALYTICS_ENABLED": "0",
}


def start(*arguments: str, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "rlhf_zoo.hub.server", *arguments]
    return subprocess.Popen(
        command, env=base_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def run(*arguments: str) -> str:
    """Runs a command that must succeed, in this process; returns its stdout."""
    result = CliRunner().invoke(group, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*arguments: str) -> str:
    """Runs a command that must exit with 2; returns the one sentence on stderr."""
    result = CliRunner().invoke(group, arguments, catch_exceptions=False)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    return result.stderr


def wait_for(path: Path, process: subprocess.Popen | None = None) -> dict:
    wait_until(path.exists, process, 60)
    return json.loads(path.read_text())


@pytest.fixture
def server(tmp_path):
    """A Hub started as a user would."""
    process = start("--root", str(tmp_path / "hub"), "--ready-file", str(tmp_path / "ready"))
    wait_for(tmp_path / "ready", process)
    yield process
    process.kill()
    process.communicate()


def test_serve_status_token_and_env_agree(server, tmp_path):
    root = tmp_path / "hub"
    ready = json.loads((tmp_path / "ready").read_text())
    assert ready == {"url": ready["url"], "pid": server.pid}
    assert ready["url"].startswith("http://127.0.0.1:")
    assert json.loads((root / "server.json").read_text()) == ready

    token = run("token", "--root", str(root), "--role", "write")
    assert token.count("\n") == 1
    api = HfApi(endpoint=ready["url"], token=token.strip())
    api.create_repo("local/m")
    api.upload_file(path_or_fileobj=b"\0" * 1_000_000, path_in_repo="w.bin", repo_id="local/m")
    reader = HfApi(endpoint=ready["url"], token=run("token", "--root", str(root), "--role", "read").strip())
    assert reader.whoami()["auth"]["accessToken"]["role"] == "read"

    status = json.loads(run("status", "--root", str(root), "--json"))
    assert status.pop("bytes") > 1_000_000
    repositories = {"models": 1, "datasets": 0, "spaces": 0}
    assert status == {"running": True, **ready, "root": str(root), "repositories": repositories, "damaged": []}
    text = run("status", "--root", str(root))
    assert ready["url"] in text
    assert "1 models" in text

    script = 'eval "$1"; exec "$2" -c "import os, json; print(json.dumps(dict(os.environ)))"'
    exports = run("env", "--root", str(root))
    shell = subprocess.run(
        ["sh", "-c", script, "sh", exports, sys.executable], capture_output=True, text=True, check=True
    )
    values = json.loads(shell.stdout)
    assert {name: values[name] for name in EXPORTS} == EXPORTS
    assert values["HF_ENDPOINT"] == ready["url"]
    assert values["HF_HOME"] == str(root / "client")
    assert HfApi(endpoint=ready["url"], token=values["HF_TOKEN"]).whoami()["auth"]["accessToken"]["role"] == "write"


@pytest.mark.parametrize("stop_signal", [signal.SIGTERM, signal.SIGINT])
def test_serve_removes_its_files_on_signal(server, tmp_path, stop_signal):
    server.send_signal(stop_signal)
    assert server.wait(timeout=60) == 0
    assert not (tmp_path / "ready").exists()
    assert not (tmp_path / "hub" / "server.json").exists()
    status = json.loads(run("status", "--root", str(tmp_path / "hub"), "--json"))
    assert (status["running"], status["url"], status["pid"]) == (False, None, None)


def test_status_reports_killed_server_as_stopped(server, tmp_path):
    server.kill()
    server.wait()
    assert (tmp_path / "hub" / "server.json").exists()
    assert json.loads(run("status", "--root", str(tmp_path / "hub"), "--json"))["running"] is False
    assert "not running" in run("status", "--root", str(tmp_path / "hub"))
    assert "rlhf-zoo hub serve" in refusal("env", "--root", str(tmp_path / "hub"))


def test_serve_finishes_upload_on_sigterm(server, tmp_path):
    """SIGTERM in the middle of an upload: the upload is stored and answered, then the process ends."""
    url = json.loads((tmp_path / "ready").read_text())["url"]
    api = HfApi(endpoint=url, token=create_token(tmp_path / "hub", "write"))
    api.create_repo("local/m")
    content = b"\0" * 200_000
    oid = hashlib.sha256(content).hexdigest()
    answer = httpx2.post(
        f"{url}/local/m.git/info/lfs/objects/batch",
        headers={"Authorization": f"Bearer {api.token}"},
        json={"operation": "upload", "objects": [{"oid": oid, "size": len(content)}]},
    )
    href = answer.json()["objects"][0]["actions"]["upload"]["href"]
    port = int(url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        path = href.removeprefix(url)
        head = f"PUT {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode() + content[:100_000])
        time.sleep(0.3)  # the server has begun to read
        server.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        connection.sendall(content[100_000:])
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert server.wait(timeout=60) == 0
    assert (tmp_path / "hub/repos/models/local/m.git/lfs/objects" / oid[:2] / oid[2:4] / oid).read_bytes() == content


PARENT = """
import os, subprocess, sys, time
command = [sys.executable, "-m", "rlhf_zoo.hub.server", "--root", sys.argv[1], "--ready-file", sys.argv[2]]
child = subprocess.Popen([*command, "--parent", str(os.getpid())])
time.sleep(600)
"""


def test_server_ends_with_its_parent(tmp_path):
    command = [sys.executable, "-c", PARENT, str(tmp_path / "hub"), str(tmp_path / "ready")]
    parent = subprocess.Popen(command, env=base_environment())
    child = wait_for(tmp_path / "ready", parent)["pid"]
    assert child != parent.pid
    assert not (tmp_path / "hub" / "server.json").exists()
    os.kill(child, signal.SIGINT)  # Ctrl-C reaches the whole terminal group; the parent decides what it means
    time.sleep(1)
    os.kill(child, 0)
    parent.kill()
    parent.wait()
    wait_until(lambda: not Path(f"/proc/{child}/exe").exists(), seconds=60)
    assert not (tmp_path / "ready").exists()


def test_parent_monitor_watches_unrelated_process(tmp_path):
    other = subprocess.Popen(["sleep", "600"])
    is_alive = process._make_parent_check(other.pid)
    assert is_alive()
    other.kill()
    other.wait()
    assert not is_alive()
    server = start("--root", str(tmp_path / "hub"), "--parent", str(other.pid))
    assert server.wait(timeout=60) == 0


def test_hub_commands_reject_bad_input(server, tmp_path, monkeypatch):
    """None of the commands in this process starts to serve."""
    monkeypatch.setattr(process.os, "umask", lambda _: 0)
    monkeypatch.setattr(process.signal, "signal", lambda *_: None)
    taken = json.loads((tmp_path / "ready").read_text())["url"].rpartition(":")[2]
    (tmp_path / "file").write_text("")
    root = str(tmp_path / "other")
    for arguments, message in (
        (("serve", "--root", root, "--port", taken), f"Cannot listen on 127.0.0.1:{taken} .*: choose another --port"),
        (("serve", "--root", root, "--port", "70000"), "Port 70000"),
        (("serve", "--root", root, "--host", "no.such.host.invalid"), "--host"),
        (
            ("serve", "--root", root, "--ready-file", str(tmp_path / "none" / "ready")),
            rf"Cannot write {tmp_path}/none/ready \(No such file or directory\): choose another --ready-file",
        ),
        (("serve", "--root", str(tmp_path / "file")), "choose another --root"),
        (("token", "--root", str(tmp_path / "file")), "choose another --root"),
    ):
        assert re.search(message, refusal(*arguments)), arguments
    record = tmp_path / "other" / "server.json"
    assert not record.exists()
    record.mkdir()
    with pytest.raises(ZooError, match=rf"Cannot write {record} \(Is a directory\): choose another --root"):
        process.serve(root)
    with pytest.raises(ZooError, match="'admin' is unknown"):
        create_token(tmp_path, "admin")


def test_hub_commands_default_to_home_root(monkeypatch, tmp_path):
    monkeypatch.setenv("RLHF_ZOO_HOME", str(tmp_path / "home"))
    status = json.loads(CliRunner().invoke(group, ["status", "--json"]).stdout)
    assert status["root"] == str(tmp_path / "home" / "hub")
    assert not (tmp_path / "home").exists()  # status creates nothing
    token = CliRunner().invoke(group, ["token"]).stdout.strip()
    assert token
    assert token not in (tmp_path / "home" / "hub" / "tokens.json").read_text()


def test_server_url_for_all_interfaces_and_ipv6(tmp_path):
    for host, address in (("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("localhost", "localhost")):
        server = HubServer(host, 0, Application(tmp_path))
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        assert server.url.startswith(f"http://{address}:")
        assert httpx2.get(f"{server.url}/api/rlhf-zoo").json()["pid"] == os.getpid()
        server.shutdown()
        server.server_close()
