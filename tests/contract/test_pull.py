"""`rlhf-zoo pull`: the revision that is meant, whole and checked, going on where it stopped, and nothing else."""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hub_fixture import RunningHub
from zoo_process import COMMAND, environment, errors, wait_until, zoo

from rlhf_zoo.hub.publish import SENT
from rlhf_zoo.record import StageRecord, fingerprint

REPO = "local/toy-ppo"
BIG = 12 * 2**20
STALL = 5 * 2**20
CHUNK = 2**20  # what pull reads at once
STEPS = (4, 40, 1000)


def weights(step: int, size: int = 5000) -> bytes:
    return hashlib.shake_256(str(step).encode()).digest(size)


def content(step: int) -> dict[str, bytes]:
    """A large file, small ones, one in a folder, and an empty one whose name needs quoting."""
    return {
        "model.safetensors": weights(step, BIG if step == 40 else 5000),
        "critic/model.safetensors": weights(-step),
        "config.json": json.dumps({"step": step}).encode(),
        "notes for #1?.txt": b"",
    }


def commit(hub: RunningHub, repo: str, files: Mapping[str, bytes], message: str = "toy") -> str:
    from huggingface_hub import CommitOperationAdd

    hub.api().create_repo(repo, exist_ok=True)
    return hub.api().create_commit(
        repo, [CommitOperationAdd(name, data) for name, data in files.items()], commit_message=message
    ).oid  # fmt: skip


@pytest.fixture(scope="module")
def commits(shared_hub: RunningHub) -> dict[int, str]:
    """REPO with a commit and a tag for each of STEPS, `best` at 40, a branch, and a tag called 7 at step 4."""
    api, found = shared_hub.api(), {}
    for step in STEPS:
        found[step] = commit(shared_hub, REPO, content(step), f"step {step}")
        api.create_tag(REPO, tag=f"step-{step:06d}", revision=found[step])
    api.create_tag(REPO, tag="best", revision=found[40])
    api.create_tag(REPO, tag="7", revision=found[4])
    api.create_tag(REPO, tag="step-000007", revision=found[1000])
    api.create_branch(REPO, branch="side/way", revision=found[4])
    return found


def pull(hub: RunningHub, folder: Path, *arguments: str | Path, url: str | None = None) -> Any:
    options = ("--hub", url or hub.url)
    return zoo("pull", *arguments, *options, home=folder / "home", cwd=folder, RLHF_ZOO_HUB_TOKEN=hub.token)


def tree(folder: Path) -> dict[str, str]:
    """Every file's sha256, through symbolic links."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def digests(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def without_attributes(found: dict[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in found.items() if name != ".gitattributes"}


# Which revision, and what comes of it


@pytest.mark.parametrize(
    ("wanted", "named", "step"),
    [
        ("", "main", 1000),
        ("@main", "main", 1000),
        ("@best", "best", 40),
        ("@step-000040", "step-000040", 40),
        ("@step-40", "step-000040", 40),
        ("@40", "step-000040", 40),
        ("@0040", "step-000040", 40),
        ("@7", "7", 4),  # a tag of that name goes before a step of that number
        ("@step-7", "step-000007", 1000),
        ("@side/way", "side/way", 4),
        ("@{commit}", "{commit}", 4),
    ],
)
def test_the_revision_that_is_meant(shared_hub, commits, tmp_path, wanted, named, step):
    wanted, named = wanted.format(commit=commits[4]), named.format(commit=commits[4])
    done = pull(shared_hub, tmp_path, f"{REPO}{wanted}", "--json")
    assert done.returncode == 0 and errors(done.stderr) == []
    document = json.loads(done.stdout)
    assert (document["repo"], document["revision"], document["commit"]) == (REPO, named, commits[step])
    assert without_attributes(tree(Path(document["path"]))) == digests(content(step))


def test_json_says_what_came(shared_hub, commits, tmp_path):
    done = pull(shared_hub, tmp_path, f"{REPO}@best", "--output_dir", "out", "--json")
    document = json.loads(done.stdout)
    assert list(document) == ["repo", "revision", "commit", "path", "files", "bytes", "mended", "others"]
    assert document["path"] == str(tmp_path / "out") and (document["mended"], document["others"]) == ([], [])
    files = {file["path"]: file for file in document["files"]}
    assert {name: file["sha256"] for name, file in files.items()} == tree(tmp_path / "out")
    sizes = {name: (tmp_path / "out" / name).stat().st_size for name in files}
    assert {name: file["size"] for name, file in files.items()} == sizes
    assert document["bytes"] == sum(sizes.values())
    plain = pull(shared_hub, tmp_path, f"{REPO}@best", "--output_dir", "out")
    assert (plain.returncode, plain.stdout) == (0, f"{tmp_path / 'out'}\n") and errors(plain.stderr) == []


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (f"{REPO}@step-41", "local/toy-ppo has no revision 'step-41', did you mean 'step-000040'?"),
        (f"{REPO}@22", "local/toy-ppo has no revision '22', did you mean 'step-000007'?"),
        (f"{REPO}@zzz", "local/toy-ppo has no revision 'zzz': it has 7, best, step-000004, step-000007, step-000040"),
        (f"{REPO}@{'0' * 40}", f"local/toy-ppo has no revision '{'0' * 40}'"),
        ("local/none@best", "There is no repository 'local/none'"),
        ("a/b/c", "'a/b/c' is no repository: write NAMESPACE/NAME or NAMESPACE/NAME@TAG."),
    ],
)
def test_no_such_revision_is_one_sentence_and_leaves_nothing(shared_hub, commits, tmp_path, wanted, message):
    done = pull(shared_hub, tmp_path, wanted, "--output_dir", "out")
    assert (done.returncode, done.stdout) == (2, "")
    (said,) = errors(done.stderr)
    assert said.startswith(f"Error: {message}") and not (tmp_path / "out").exists()


def test_a_file_stands_where_the_folder_should(shared_hub, commits, tmp_path):
    (tmp_path / "out").write_text("mine")
    done = pull(shared_hub, tmp_path, REPO, "--output_dir", "out")
    assert done.returncode == 2 and (tmp_path / "out").read_text() == "mine"
    assert errors(done.stderr) == [
        "Error: out is a file, so nothing can be fetched into it: give another --output_dir."
    ]


def test_a_users_own_file_is_not_overwritten(shared_hub, commits, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("my own")
    done = pull(shared_hub, tmp_path, "local/toy-ppo@4", "--output_dir", "mine")
    assert done.returncode == 2 and done.stdout == ""
    assert "config.json would be overwritten, and" in done.stderr and "is of no earlier pull" in done.stderr
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {"config.json"}
    assert (tmp_path / "mine" / "config.json").read_text() == "my own"


def test_the_users_files_are_named_and_stay(shared_hub, commits, tmp_path):
    assert pull(shared_hub, tmp_path, f"{REPO}@4", "--output_dir", "out").returncode == 0
    (tmp_path / "out" / "critic" / "mine.txt").write_text("mine")
    done = pull(shared_hub, tmp_path, f"{REPO}@1000", "--output_dir", "out")
    assert done.returncode == 0
    again, others = errors(done.stderr)
    assert again == (
        "Had other content than this revision's, and fetched again: config.json, critic/model.safetensors, "
        "model.safetensors"
    )
    assert others == "Not of this revision, and left alone: critic/mine.txt"
    found = tree(tmp_path / "out")
    assert found.pop("critic/mine.txt") == hashlib.sha256(b"mine").hexdigest()
    assert without_attributes(found) == digests(content(1000))


# Interrupted, damaged, lied to: a proxy stands between client and Hub


@dataclass
class Proxy:
    """Forwards to a Hub. stall: path -> bytes of the body after which an answer hangs, once `stalled` is clear.

    change: what becomes of an answer's body, by path. etag: path -> the ETag that HEAD tells.
    sent: (path, Range, bytes of the body that were sent).
    """

    hub: RunningHub
    stall: dict[str, int] = field(default_factory=dict)
    change: Callable[[str, bytes], bytes] = lambda path, body: body
    etag: dict[str, str] = field(default_factory=dict)
    sent: list[tuple[str, str | None, int]] = field(default_factory=list)
    url: str = ""

    def downloads(self, name: str) -> list[tuple[str | None, int]]:
        return [(span, size) for path, span, size in self.sent if path.endswith(name)]


class _Forward(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        there = http.client.HTTPConnection(urlsplit(self.proxy.hub.url).netloc)
        headers = {name: value for name, value in self.headers.items() if name != "Host"}
        there.request(self.command, self.path, body, headers)
        answer = there.getresponse()
        said = answer.read()
        path = self.path.partition("?")[0]
        if self.command == "GET":
            said = self.proxy.change(path, said)
        self.send_response(answer.status)
        etag = next((etag for name, etag in self.proxy.etag.items() if path.endswith(name)), None)
        for name, value in answer.getheaders():
            if name == "ETag" and etag is not None:
                value = f'"{etag}"'
            if name.lower() not in ("content-length", "transfer-encoding", "connection") or self.command == "HEAD":
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        limit = next((size for name, size in self.proxy.stall.items() if path.endswith(name)), len(said))
        self.wfile.write(said[:limit] if self.command != "HEAD" else b"")
        self.wfile.flush()
        if self.command == "GET" and "/resolve/" in path:
            self.proxy.sent.append((path, self.headers.get("Range"), min(limit, len(said))))
        while limit < len(said) and self.proxy.stall:
            time.sleep(0.05)
        there.close()

    do_HEAD = do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that was killed is no event."""


@pytest.fixture
def proxy(shared_hub: RunningHub) -> Iterator[Proxy]:
    found = Proxy(shared_hub)
    server = _Server(("127.0.0.1", 0), type("Forward", (_Forward,), {"proxy": found}))
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield found
    found.stall.clear()
    server.shutdown()
    server.server_close()


def partials(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.glob("**/.rlhf-zoo-partial/*")}


@pytest.mark.parametrize("place", ["cache", "output_dir"])
@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_an_interrupted_download_goes_on_where_it_stopped(proxy, commits, tmp_path, how, code, place):
    """Counted in bytes that the Hub sends: none that arrived comes twice, but for the chunk that was being read."""
    options = ["--output_dir", "out"] if place == "output_dir" else []
    proxy.stall["toy-ppo/resolve/" + commits[40] + "/model.safetensors"] = STALL
    process = subprocess.Popen(
        [*COMMAND, "pull", f"{REPO}@40", *options, "--hub", proxy.url], cwd=tmp_path, text=True,
        env=environment(tmp_path / "home", RLHF_ZOO_HUB_TOKEN=proxy.hub.token),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    digest = digests(content(40))["model.safetensors"]
    try:
        wait_until(lambda: partials(tmp_path).get(digest, 0) >= STALL - CHUNK, process)
        process.send_signal(how)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, stdout) == (code, ""), stderr
    if how == signal.SIGINT:
        assert errors(stderr) == ["Interrupted; the same command goes on from what is saved."]
    have = partials(tmp_path)[digest]
    assert not (tmp_path / "out" / "model.safetensors").exists()
    proxy.stall.clear()
    proxy.sent.clear()

    done = pull(proxy.hub, tmp_path, f"{REPO}@40", *options, url=proxy.url)
    assert done.returncode == 0, done.stderr
    assert without_attributes(tree(Path(done.stdout.strip()))) == digests(content(40))
    assert proxy.downloads(f"{commits[40]}/model.safetensors") == [(f"bytes={have}-", BIG - have)]
    assert have >= STALL - CHUNK and partials(tmp_path) == {}
    proxy.sent.clear()
    assert pull(proxy.hub, tmp_path, f"{REPO}@40", *options, url=proxy.url).stdout == done.stdout
    assert proxy.sent == []


def test_a_connection_that_breaks_is_taken_up_again(proxy, commits, tmp_path):
    def cut_once(path: str, body: bytes) -> bytes:
        whole = path.endswith("/model.safetensors") and "critic" not in path
        return body[:STALL] if whole and len(body) == BIG else body

    proxy.change = cut_once
    done = pull(proxy.hub, tmp_path, f"{REPO}@40", url=proxy.url)
    assert done.returncode == 0 and errors(done.stderr) == []
    assert proxy.downloads(f"{commits[40]}/model.safetensors") == [(None, STALL), (f"bytes={STALL}-", BIG - STALL)]
    assert without_attributes(tree(Path(done.stdout.strip()))) == digests(content(40))


@pytest.mark.parametrize("place", ["cache", "output_dir"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_what_was_damaged_is_found_named_and_mended(proxy, commits, tmp_path, place, name, damage):
    options = ["--output_dir", "out"] if place == "output_dir" else []
    folder = Path(pull(proxy.hub, tmp_path, f"{REPO}@4", *options, url=proxy.url).stdout.strip())
    file = (folder / name).resolve()
    data = file.read_bytes()
    file.write_bytes(data[:-1] + (bytes([data[-1] ^ 1]) if damage == "flipped" else b""))
    proxy.sent.clear()
    done = pull(proxy.hub, tmp_path, f"{REPO}@4", *options, "--json", url=proxy.url)
    assert done.returncode == 0
    assert errors(done.stderr) == [f"Had other content than this revision's, and fetched again: {name}"]
    assert json.loads(done.stdout)["mended"] == [name]
    assert without_attributes(tree(folder)) == digests(content(4))
    assert [(path, span) for path, span, _ in proxy.sent] == [(f"/{REPO}/resolve/{commits[4]}/{name}", None)]
    again = pull(proxy.hub, tmp_path, f"{REPO}@4", *options, url=proxy.url)
    assert (again.returncode, errors(again.stderr)) == (0, [])


def test_a_damaged_part_costs_a_new_download(proxy, commits, tmp_path):
    digest = digests(content(40))["model.safetensors"]
    part = tmp_path / "out" / ".rlhf-zoo-partial" / digest
    part.parent.mkdir(parents=True)
    part.write_bytes(b"\0" * STALL)
    done = pull(proxy.hub, tmp_path, f"{REPO}@40", "--output_dir", "out", url=proxy.url)
    assert done.returncode == 0, done.stderr
    assert [span for span, _ in proxy.downloads(f"{commits[40]}/model.safetensors")] == [f"bytes={STALL}-", None]
    assert without_attributes(tree(tmp_path / "out")) == digests(content(40))


@pytest.mark.parametrize("place", ["cache", "output_dir"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_hub_that_sends_something_else(proxy, commits, tmp_path, name, place):
    """Of the same length, so that only the checksum tells. Once is mended; twice is an error, and nothing is kept."""
    options = ["--output_dir", "out"] if place == "output_dir" else []
    lies = 1

    def lie(path: str, body: bytes) -> bytes:
        nonlocal lies
        if not path.endswith(f"{commits[4]}/{name}") or not lies:
            return body
        lies -= 1
        return b"x" * len(body)

    proxy.change = lie
    (tmp_path / "once").mkdir()
    done = pull(proxy.hub, tmp_path / "once", f"{REPO}@4", *options, url=proxy.url)
    assert (done.returncode, errors(done.stderr)) == (0, []) and lies == 0
    assert without_attributes(tree(Path(done.stdout.strip()))) == digests(content(4))

    lies = 99
    done = pull(proxy.hub, tmp_path, f"{REPO}@4", *options, url=proxy.url)
    assert (done.returncode, done.stdout) == (2, "")
    (said,) = errors(done.stderr)
    assert said.startswith(f"Error: {name} of {REPO} at commit {commits[4]} came twice with other content than")
    assert lies == 97
    wrong = b"x" * len(content(4)[name])
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and wrong in path.read_bytes()]
    assert kept == [] and etag(content(4)[name], name) not in partials(tmp_path)  # others may go on where they stopped


def etag(data: bytes, name: str) -> str:
    """What the Hub calls a file's content: sha256 of a large one, else git's blob."""
    if name.endswith(".safetensors"):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def test_a_hub_that_tells_the_client_another_file_than_its_tree(proxy, commits, tmp_path):
    """The snapshot in the cache is of the files that were checked, whatever ETags are told afterwards."""
    path = f"{commits[4]}/config.json"
    proxy.etag[path] = "f" * 40
    done = pull(proxy.hub, tmp_path, f"{REPO}@4", url=proxy.url)
    assert done.returncode == 0, done.stderr
    assert without_attributes(tree(Path(done.stdout.strip()))) == digests(content(4))
    assert len(proxy.downloads(path)) == 1


def test_a_tree_that_leads_out_of_the_folder(proxy, commits, tmp_path):
    for name in ("../evil.txt", "/tmp/evil.txt", "a/../../evil.txt", "..\\evil.txt", "a\u202etxt.exe"):
        proxy.change = lambda path, body, name=name: (
            body.replace(b'"config.json"', json.dumps(name).encode()) if "/tree/" in path else body
        )
        done = pull(proxy.hub, tmp_path, f"{REPO}@4", "--output_dir", "out", url=proxy.url)
        assert done.returncode == 2 and errors(done.stderr)[0].startswith(f"Error: {REPO} has a file ")
        assert len(errors(done.stderr)) == 1 and not (tmp_path / "out").exists()


def test_without_an_answer_the_cache_serves_if_it_is_whole(hubs, tmp_path):
    hub = hubs("server")
    commit(hub, REPO, content(4))
    hub.api().create_tag(REPO, tag="step-000004")
    folder = Path(pull(hub, tmp_path, f"{REPO}@4").stdout.strip())
    hub.stop(signal.SIGKILL)
    for wanted in ("@4", "@step-000004", f"@{folder.name}"):
        done = pull(hub, tmp_path, f"{REPO}{wanted}")
        assert (done.returncode, done.stdout) == (0, f"{folder}\n"), done.stderr
        (said,) = errors(done.stderr)
        assert re.fullmatch(r"The Hub does not answer \(.+\): this is the copy in the cache\.", said)
    done = pull(hub, tmp_path, f"{REPO}@5")
    assert done.returncode == 2 and f"{REPO}@5 is not in the cache, and {hub.url} does not give it (" in done.stderr
    file = (folder / "config.json").resolve()
    file.write_bytes(b"x" * file.stat().st_size)
    done = pull(hub, tmp_path, f"{REPO}@4")
    assert done.returncode == 2 and done.stdout == ""
    assert "config.json of local/toy-ppo@step-000004 is damaged in the cache" in errors(done.stderr)[0]


def test_two_at_once_fetch_a_file_once(proxy, commits, tmp_path):
    proxy.stall[f"{commits[40]}/model.safetensors"] = STALL
    env = environment(tmp_path / "home", RLHF_ZOO_HUB_TOKEN=proxy.hub.token)
    command = [*COMMAND, "pull", f"{REPO}@40", "--hub", proxy.url]
    both = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        wait_until(lambda: bool(proxy.downloads(f"{commits[40]}/model.safetensors")))
        time.sleep(1)  # the other one waits meanwhile
        assert len(proxy.downloads(f"{commits[40]}/model.safetensors")) == 1
        proxy.stall.clear()
        folders = {process.communicate(timeout=60)[0].strip() for process in both}
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert len(folders) == 1 and without_attributes(tree(Path(folders.pop()))) == digests(content(40))
    # The broken answer is taken up by the one that holds the file; nothing is fetched by both.
    assert sum(size for _, size in proxy.downloads(f"{commits[40]}/model.safetensors")) == BIG


def test_files_of_equal_content(hub, tmp_path):
    """They share a blob in the cache, and the name of the part while they are fetched."""
    twins = {f"{folder}{name}": data for folder in ("", "a/", "b/") for name, data in content(4).items()}
    commit(hub, REPO, twins)
    for options in ([], ["--output_dir", "out"]):
        for _ in range(2):
            done = pull(hub, tmp_path, REPO, *options)
            assert (done.returncode, errors(done.stderr)) == (0, [])
            assert without_attributes(tree(Path(done.stdout.strip()))) == digests(twins)
    assert partials(tmp_path) == {}


def test_progress_is_shown_on_a_terminal_only(shared_hub, commits, tmp_path):
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    env = environment(tmp_path / "home", RLHF_ZOO_HUB_TOKEN=shared_hub.token)
    command = [*COMMAND, "pull", f"{REPO}@40", "--hub", shared_hub.url]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=terminal, text=True)
    os.close(terminal)
    shown = b""
    try:
        while piece := os.read(master, 65536):
            shown += piece
    except OSError:  # the terminal's other end is closed
        pass
    stdout, _ = process.communicate(timeout=60)
    os.close(master)
    assert process.returncode == 0 and len(stdout.splitlines()) == 1
    last = [line for line in shown.decode().replace("\r", "\n").splitlines() if line.strip()][-1]
    assert last.startswith(f"{REPO}@step-000040: 100%|") and "12.6M/12.6M" in last and "5/5 files" in last


# The list of checkpoints


CARD = {
    "stage": "ppo", "recipe": "toy", "step": 40,
    "checkpoints": [
        {"step": 4, "tag": "step-000004", "commit": None, "reward": 0.5, "kl": 1.25},
        {"step": 40, "tag": "step-000040", "commit": None, "reward": 2.0, "kl": None},
        {"step": 99, "tag": "step-000099", "commit": "f" * 40, "reward": 9.0, "kl": 9.0},
    ],
}  # fmt: skip


def card_repo(hub: RunningHub, repo: str, card: Mapping[str, Any] | None, steps: tuple[int, ...] = (4, 40)) -> None:
    for step in steps:
        commit(hub, repo, content(4) | {"config.json": str(step).encode()})
        hub.api().create_tag(repo, tag=f"step-{step:06d}")
    if card is not None:
        commit(hub, repo, {"rlhf_card.json": json.dumps(card).encode()})
        hub.api().create_tag(repo, tag="best")


def test_the_checkpoints_of_a_repository(hub, tmp_path):
    card_repo(hub, REPO, CARD)
    hub.api().create_tag(REPO, tag="v1")
    done = pull(hub, tmp_path, REPO, "--list", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["repo"], found["stage"], found["recipe"], found["note"]) == (REPO, "ppo", "toy", None)
    tags = {ref.name: ref.target_commit for ref in hub.api().list_repo_refs(REPO).tags}
    assert [(row["revision"], row["step"], row["also"], row["metrics"]) for row in found["checkpoints"]] == [
        ("step-000004", 4, [], {"reward": 0.5, "kl": 1.25}),
        ("step-000040", 40, ["best", "main"], {"reward": 2.0}),
        ("v1", None, [], {}),
    ]
    dates = {commit.commit_id: commit.created_at for commit in hub.api().list_repo_commits(REPO)}
    for row in found["checkpoints"]:
        assert row["commit"] == tags[row["revision"]]
        assert row["date"] == dates[row["commit"]].isoformat(timespec="seconds")
    shown = pull(hub, tmp_path, REPO, "--list").stdout
    lines = [line.split() for line in shown.splitlines() if line.strip()]
    assert lines[0] == ["local/toy-ppo,", "ppo,", "recipe", "toy"]
    assert lines[1] == ["revision", "step", "reward", "kl", "commit", "date", "also"]
    day = found["checkpoints"][0]["date"][:10]
    assert ["step-000004", "4", "0.500", "1.250", tags["step-000004"][:10], day] in lines
    assert ["step-000040", "40", "2.000", tags["step-000040"][:10], day, "best", "main"] in lines


def test_the_step_that_was_chosen_is_best(hub, tmp_path):
    card_repo(hub, REPO, {**CARD, "chosen": {"step": 4, "rule": "a rule"}})
    rows = json.loads(pull(hub, tmp_path, REPO, "--list", "--json").stdout)["checkpoints"]
    assert [(row["step"], row["also"]) for row in rows] == [(4, ["best"]), (40, ["main"])]


def test_other_stages_and_no_card(hub, tmp_path):
    sft = {"stage": "sft", "recipe": "toy", "step": 4, "checkpoints": [{"tag": "step-000004", "eval_loss": 0.25}]}
    card_repo(hub, "local/toy-sft", sft, (4,))
    rows = json.loads(pull(hub, tmp_path, "local/toy-sft", "--list", "--json").stdout)["checkpoints"]
    assert [row["metrics"] for row in rows] == [{"eval_loss": 0.25}]
    assert "eval_loss" in pull(hub, tmp_path, "local/toy-sft", "--list").stdout
    card_repo(hub, "local/bare", None)
    found = json.loads(pull(hub, tmp_path, "local/bare", "--list", "--json").stdout)
    assert found["note"] == "it has no rlhf_card.json" and found["stage"] is None
    assert [(row["revision"], row["metrics"]) for row in found["checkpoints"]] == [
        ("step-000004", {}), ("step-000040", {}), ("main", {}),
    ]  # fmt: skip
    assert pull(hub, tmp_path, "local/bare", "--list").returncode == 0


def test_a_card_cannot_speak_to_the_terminal(hub, tmp_path):
    evil = "\x1b]0;owned\x07[bold]x"
    row = {"tag": "step-000004", evil: 1.0, "reward": evil, "kl": 10**400}
    card_repo(hub, REPO, {"stage": evil, "recipe": evil, "step": evil, "checkpoints": [row, evil, None]}, (4,))
    done = pull(hub, tmp_path, REPO, "--list")
    assert done.returncode == 0 and "\x1b" not in done.stdout + done.stderr and "[bold]x" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["local/none", "--list"], "There is no repository 'local/none'"),
        (["a/b/c", "--list"], "'a/b/c' is no repository: write NAMESPACE/NAME."),
        ([f"{REPO}@best", "--list"], f"--list shows all checkpoints: write {REPO} without a revision."),
        ([REPO, "--list", "--output_dir", "out"], "--list fetches nothing: leave out --output_dir."),
    ],
)
def test_mistakes_with_list(shared_hub, tmp_path, arguments, message):
    done = pull(shared_hub, tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (2, "") and errors(done.stderr)[0].startswith(f"Error: {message}")


# What was pushed comes back


PUSH = """
import os
from pathlib import Path
from rlhf_zoo.hub.connect import Hub
from rlhf_zoo.recipes import Recipe
from rlhf_zoo.stages.context import RunContext
from rlhf_zoo.stages.release import Sender
hub = Hub("other", os.environ["HF_ENDPOINT"], "test")
recipe = Recipe("toy", Path("."), {"description": "A toy."}, {})
context = RunContext(recipe=recipe, hub=hub, directory=Path("run"), namespace="local", publish=True)
Sender(context, stages=("ppo",)).send_all()
"""
LOAD = """
import sys, torch
from pathlib import Path
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer
from rlhf_zoo.value_head import AutoModelForCausalLMWithValueHead, read_value_head

kind, step, repo = sys.argv[1], int(sys.argv[2]), "local/toy-ppo"
here, tag = Path(f"run/ppo/checkpoint-{step}"), f"step-{step:06d}"
ids = torch.tensor([[3, 4, 5, 6]])
with torch.no_grad():
    ours = AutoModelForCausalLM.from_pretrained(here).eval()
    # transformers looks for `revision` in the base of an adapter too, which has no such tag
    where = {"adapter_kwargs": {"revision": tag}} if kind == "adapter" else {"revision": tag}
    theirs = AutoModelForCausalLM.from_pretrained(repo, **where).eval()
    assert torch.equal(ours(ids).logits, theirs(ids).logits)
    if kind == "adapter":
        base = AutoModelForCausalLM.from_pretrained("local/base").eval()
        assert not torch.equal(base(ids).logits, theirs(ids).logits)
        theirs = AutoModelForCausalLM.from_pretrained(f"pulled-{step}").eval()
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
        theirs = AutoModelForCausalLMWithValueHead.from_pretrained(repo, revision=tag).eval()
        assert torch.equal(ours(ids).logits, theirs(ids)[0])
    assert AutoTokenizer.from_pretrained(repo, revision=tag)("abc").input_ids == [3, 4, 5]
    if kind == "shared":
        head = load_file(here / "critic" / "value_head.safetensors")
        found = read_value_head(repo, revision=tag)
        assert {f"v_head.{key}": value.tolist() for key, value in found.items()} == {
            key: value.tolist() for key, value in head.items()}
        model = AutoModelForCausalLMWithValueHead.from_pretrained(repo, revision=tag).eval()
        logits, _, values = model(ids)
        hidden = ours(ids, output_hidden_states=True).hidden_states[-1]
        wanted = hidden @ head["v_head.summary.weight"].T + head["v_head.summary.bias"]
        assert torch.equal(logits, ours(ids).logits)
        assert torch.allclose(values, wanted.squeeze(-1), atol=1e-6) and values.abs().max() > 0  # two float32 products
    else:
        ours = AutoModelForTokenClassification.from_pretrained(here / "critic").eval()
        # where an adapter lies at the root, transformers loads its base instead of a subfolder
        where = (f"pulled-{step}/critic", {}) if kind == "adapter" else (repo, {"subfolder": "critic", "revision": tag})
        theirs = AutoModelForTokenClassification.from_pretrained(where[0], **where[1]).eval()
        assert torch.equal(ours(ids).logits, theirs(ids).logits) and ours(ids).logits.abs().max() > 0
print("same")
"""


def trained(folder: Path, kind: str) -> None:
    """Makes run/ppo with the checkpoints of steps 2 and 3 of a toy PPO run; an adapter's base is on the Hub."""
    from peft import LoraConfig
    from trainer_fixture import good, make_policy, make_reward_model, make_tokenizer, make_trainer

    policy, reward = make_policy(), make_reward_model()
    given = {"reward_model": reward, "reward_funcs": None} if kind == "critic" else {"reward_funcs": good}
    if kind == "shared":
        given |= {"critic": "shared", "critic_learning_rate": 1e-2}
    if kind == "adapter":
        policy.push_to_hub("local/base")
        policy.name_or_path = "local/base"
        given |= {"peft_config": LoraConfig(r=4), "critic_lora": False}
    trainer = make_trainer(
        folder / "toy", model=policy, max_steps=3, save_steps=1, save_strategy="steps", save_total_limit=2, **given
    )
    trainer.train()
    record = StageRecord(folder / "run" / "ppo")
    record.write(stage="ppo", recipe="toy", status="running", seed=1, hub="local", repo=None, parents={})
    record.write(fingerprint=fingerprint({}), resolved={}, versions={}, command="rlhf-zoo ppo toy")
    for step in (2, 3):
        record.append_metrics({"step": step, "objective/score": step / 10, "objective/kl": 0.1})
        path = record.checkpoint_path(step)
        shutil.copytree(folder / "toy" / f"checkpoint-{step}", path)
        make_tokenizer().save_pretrained(path)
        record.mark_complete(path)


@pytest.mark.parametrize("kind", ["critic", "shared", "adapter"])
def test_push_then_pull_rebuilds_the_same_folder(hub, tmp_path, kind):
    """Every file that is sent comes back bit for bit, and plain transformers loads it by its tag."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), hub.env["PYTHONPATH"]])
    code = f"from pathlib import Path; from test_pull import trained; trained(Path('.'), {kind!r})"
    hub.python(code, cwd=tmp_path, PYTHONPATH=path)
    stage = tmp_path / "run" / "ppo"
    hub.python(PUSH, cwd=tmp_path)
    weights_of = {}
    for step in (2, 3):
        checkpoint = stage / f"checkpoint-{step}"
        sent = {name: digest for name, digest in tree(checkpoint).items() if is_sent(name)}
        done = pull(hub, tmp_path, f"local/toy-ppo@{step}", "--output_dir", f"pulled-{step}")
        assert done.returncode == 0, done.stderr
        came = tree(tmp_path / f"pulled-{step}")
        assert {name: came.get(name) for name in sent} == sent
        assert {"README.md", "rlhf_card.json", "metrics.jsonl", "recipe.json"} <= came.keys()
        assert not any(name.endswith((".pt", ".pth", ".bin")) for name in came)
        weights_of[step] = {name: digest for name, digest in sent.items() if name.endswith(".safetensors")}
        assert hub.run(sys.executable, "-c", LOAD, kind, str(step), cwd=tmp_path).endswith("same\n")
    expected = {
        "critic": {"model.safetensors", "critic/model.safetensors"},
        "shared": {"model.safetensors", "critic/value_head.safetensors"},
        "adapter": {"adapter_model.safetensors", "critic/model.safetensors"},
    }[kind]
    assert set(weights_of[2]) == expected
    assert all(weights_of[2][name] != weights_of[3][name] for name in expected), "two steps, two models"


def is_sent(name: str) -> bool:
    path = Path(name)
    return str(path.parent) in (".", "critic") and any(path.match(pattern) for pattern in SENT)
