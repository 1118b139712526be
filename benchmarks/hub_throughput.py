"""Upload and download rates of the embedded Hub, against what the same client reaches without a Hub behind it.

    python benchmarks/hub_throughput.py                       # one file of 500 MB, three rounds
    python benchmarks/hub_throughput.py --size-mb 2000 --rounds 5 --folder /data

The ceilings, measured in turn with the Hub, in the same rounds:
download  the same client, from a server that knows one file and hands it out by sendfile;
upload    the same client (which hashes the file first), to a server that only copies what arrives into a file and
          flushes it to the disk; and, without HTTP, sha256 of the file and then a flushed copy of it in one process.

Prints the medians in seconds and the ratios Hub / ceiling as a table on stderr and as JSON on stdout. Every client is
a process of its own with a cache of its own; its start is not counted. Rates move with the machine: quote the ratios.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rlhf_zoo.hub_server import create_token
from rlhf_zoo.hub_server.cli import client_environment

COMMIT = "0" * 40
BLOCK = 2**20
SYNC_EVERY = 64 * 2**20
# Each with its ceilings.
KINDS = {
    "download_static": (),
    "download": ("download_static",),
    "download_xet_on": ("download_static",),
    "hash_and_copy": (),
    "upload_copied": (),
    "upload": ("upload_copied", "hash_and_copy"),
    "upload_xet_on": ("upload_copied", "hash_and_copy"),
}

CLIENT = """
import sys, time
from huggingface_hub import HfApi
from huggingface_hub.utils import disable_progress_bars

what, repo, path = sys.argv[1:]
disable_progress_bars()
api = HfApi()
if what == "upload":
    api.create_repo(repo)
    api.upload_file(path_or_fileobj=b"\\0warm", path_in_repo="warm.bin", repo_id=repo)
    start = time.perf_counter()
    api.upload_file(path_or_fileobj=path, path_in_repo="w.bin", repo_id=repo)
else:
    start = time.perf_counter()
    api.hf_hub_download(repo, "w.bin", cache_dir=path)
print(time.perf_counter() - start)
"""


class Plain(BaseHTTPRequestHandler):
    """What a client can be served with the least work: any download is `source`, any upload goes into `target`."""

    protocol_version = "HTTP/1.1"
    source: Path
    target: Path
    etag: str

    def do_HEAD(self) -> None:
        """What huggingface_hub asks for before it downloads."""
        size = self.source.stat().st_size
        self._answer({"X-Repo-Commit": COMMIT, "ETag": f'"{self.etag}"', "Content-Length": str(size)})

    def do_GET(self) -> None:
        """The file."""
        self.do_HEAD()
        with open(self.source, "rb") as file:
            self.connection.sendfile(file)

    def do_POST(self) -> None:
        """The calls around an upload, each with the answer that lets the client go on."""
        fields = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        address = f"http://{self.headers['Host']}"
        answer: dict[str, object] = {"url": f"{address}/local/m", "commitUrl": f"{address}/local/m/commit/{COMMIT}"}
        answer["commitOid"] = COMMIT
        if "/preupload/" in self.path:
            files = json.loads(fields)["files"]
            answer = {"files": [{"path": f["path"], "uploadMode": "lfs", "shouldIgnore": False} for f in files]}
        elif self.path.endswith("/batch"):
            action = {"upload": {"href": f"{address}/sink"}}
            objects = [{**each, "actions": action} for each in json.loads(fields)["objects"]]
            answer = {"transfer": "basic", "objects": objects}
        content = json.dumps(answer).encode()
        self._answer({"Content-Type": "application/json", "Content-Length": str(len(content))})
        self.wfile.write(content)

    def do_PUT(self) -> None:
        """Copy the body into a file."""
        left = int(self.headers["Content-Length"])
        buffer = memoryview(bytearray(BLOCK))
        with open(self.target, "wb", buffering=0) as file:
            unsynced = 0
            while left:
                count = self.rfile.readinto(buffer[: min(left, BLOCK)])
                file.write(buffer[:count])
                left -= count
                unsynced += count
                if unsynced >= SYNC_EVERY:
                    os.fdatasync(file.fileno())
                    unsynced = 0
            os.fsync(file.fileno())
        self._answer({"Content-Length": "0"})

    def _answer(self, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Silence."""


@contextmanager
def plain_server(source: Path, target: Path, etag: str) -> Iterator[str]:
    """A `Plain` server in a process of its own, as the Hub is one; yields the address."""
    handler = type("Handler", (Plain,), {"source": source, "target": target, "etag": etag})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    child = os.fork()
    if child == 0:
        try:
            server.serve_forever()
        finally:
            os._exit(0)
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        server.server_close()


@contextmanager
def embedded_hub(folder: Path) -> Iterator[tuple[str, str]]:
    """Start a Hub; yields its address and a write token."""
    root, ready = folder / "hub", folder / "ready.json"
    command = [sys.executable, "-m", "rlhf_zoo.hub_server", "--root", str(root), "--ready-file", str(ready)]
    process = subprocess.Popen([*command, "--parent", str(os.getpid())])
    try:
        while not ready.exists():
            if process.poll() is not None:
                raise SystemExit("The Hub did not start.")
            time.sleep(0.02)
        yield json.loads(ready.read_text())["url"], create_token(root, "write")
    finally:
        process.terminate()
        process.wait()


def hash_and_copy(source: Path, target: Path) -> float:
    """Seconds for sha256 of a file, and then for a flushed copy of it."""
    start = time.perf_counter()
    digest = hashlib.sha256()
    with open(source, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    with open(source, "rb") as file, open(target, "xb", buffering=0) as copy:
        unsynced = 0
        while block := file.read(BLOCK):
            copy.write(block)
            unsynced += len(block)
            if unsynced >= SYNC_EVERY:
                os.fdatasync(copy.fileno())
                unsynced = 0
        os.fsync(copy.fileno())
    seconds = time.perf_counter() - start
    target.unlink()
    return seconds


class Bench:
    """One file, one Hub, one static server."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        self.source = folder / "source.bin"
        self.target = folder / "target" / "target.bin"
        self.target.parent.mkdir()
        digest = hashlib.sha256()
        with open(self.source, "wb") as file:
            for _ in range(0, size, BLOCK):
                block = os.urandom(BLOCK)
                digest.update(block)
                file.write(block)
        self.sha256 = digest.hexdigest()
        self.count = 0

    def client(self, what: str, url: str, token: str, repo: str, path: Path, *, xet: bool) -> float:
        """Seconds that a client of its own needed."""
        self.count += 1
        home = self.folder / f"home{self.count}"
        env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING_FACE"))}
        env |= client_environment(url, token, home) | {"HF_HUB_DISABLE_XET": "0" if xet else "1"}
        command = [sys.executable, "-c", CLIENT, what, repo, str(path)]
        os.sync()
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        shutil.rmtree(home, ignore_errors=True)
        return float(done.stdout.split()[-1])

    def round(self, url: str, token: str, plain: str) -> dict[str, float]:
        """Each kind once, the ceilings among them."""
        seconds = {}
        for kind in KINDS:
            if kind == "hash_and_copy":
                os.sync()
                seconds[kind] = hash_and_copy(self.source, self.folder / "copy.bin")
            elif kind == "upload_copied":
                seconds[kind] = self.client("upload", plain, token, "local/m", self.source, xet=False)
                self.check(self.target.parent)
                self.target.unlink()
            elif kind.startswith("upload"):
                self.count += 1
                repo = f"local/m{self.count}"
                seconds[kind] = self.client("upload", url, token, repo, self.source, xet=kind == "upload_xet_on")
                self.check(self.folder / "hub" / "repos" / "models" / f"{repo}.git" / "lfs" / "objects")
                self.drop(url, token, repo)
            else:
                cache = self.folder / "cache"
                where, repo = (plain, "local/m") if kind == "download_static" else (url, "local/m")
                seconds[kind] = self.client("download", where, token, repo, cache, xet=kind == "download_xet_on")
                self.check(cache)
                shutil.rmtree(cache)
        return seconds

    def check(self, folder: Path) -> None:
        """A rate counts only where the file arrived."""
        large = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        with open(large, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != self.sha256:
                raise SystemExit(f"{large} is not what was sent.")

    @staticmethod
    def drop(url: str, token: str, repo: str) -> None:
        """Free the disk for the next round."""
        from huggingface_hub import HfApi

        HfApi(endpoint=url, token=token).delete_repo(repo)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mb", type=int, default=500, help="size of the file in MB (default: 500)")
    parser.add_argument("--rounds", type=int, default=3, help="medians are over so many rounds (default: 3)")
    parser.add_argument("--folder", help="where files and Hub are put, four times the size (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        bench = Bench(folder, options.size_mb * 10**6)
        with embedded_hub(folder) as (url, token), plain_server(bench.source, bench.target, bench.sha256) as plain:
            bench.client("upload", url, token, "local/m", bench.source, xet=False)
            rounds = [bench.round(url, token, plain) for _ in range(options.rounds)]
    size = -(-options.size_mb * 10**6 // BLOCK) * BLOCK
    medians = {kind: statistics.median(each[kind] for each in rounds) for kind in KINDS}
    ratios = {kind: {c: medians[kind] / medians[c] for c in ceilings} for kind, ceilings in KINDS.items() if ceilings}
    print(f"{'':20}{'seconds':>9}{'MB/s':>7}  ratio to", file=sys.stderr)
    for kind, seconds in medians.items():
        shown = ", ".join(f"{ceiling} {ratio:.2f}" for ceiling, ratio in ratios.get(kind, {}).items())
        print(f"{kind:20}{seconds:9.3f}{size / 1e6 / seconds:7.0f}  {shown}", file=sys.stderr)
    figures = {
        "size_bytes": size,
        "rounds": rounds,
        "median_seconds": medians,
        "ratios": ratios,
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
