"""Which Hub a command talks to: settled in the environment, and in what clients have read from it.

After `connect`, the rest of the package uses the plain clients and cannot tell one Hub from another.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import ZooError

__all__ = ["EMBEDDED", "REAL", "Hub", "choose", "connect", "home", "point_clients"]

REAL = "https://huggingface.co"
QUIET = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    "GRADIO_ANALYTICS_ENABLED": "0",
}
EMBEDDED = "RLHF_ZOO_EMBEDDED_HUB"
"""Set to the address of the embedded Hub while a command runs one: messages call it by its name."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
CLIENT_STATE = (
    "HF_TOKEN",
    "HF_TOKEN_PATH",
    "HUGGING_FACE_HUB_TOKEN",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "HF_ASSETS_CACHE",
    "HF_XET_CACHE",
    "HF_DATASETS_CACHE",
    "HF_MODULES_CACHE",
    "HF_EVALUATE_CACHE",
)
START_SECONDS = 30


@dataclass(frozen=True)
class Hub:
    """kind: 'local' (the embedded Hub), 'huggingface' or 'other'; endpoint: its address, None until it is started.

    token_from: the environment variable whose token this Hub is given.
    """

    kind: str
    endpoint: str | None
    why: str
    token_from: str = "HF_TOKEN"

    @property
    def label(self) -> str:
        """What run.json, cards and printed commands call it."""
        return "local" if self.kind == "local" else str(self.endpoint)

    @property
    def described(self) -> str:
        name = "the embedded Hub" if self.kind == "local" else str(self.endpoint)
        return f"{name} ({self.why})"


def home() -> Path:
    """Where rlhf-zoo keeps what outlives a run: $RLHF_ZOO_HOME, else ~/.cache/rlhf-zoo."""
    return Path(os.environ.get("RLHF_ZOO_HOME") or Path.home() / ".cache" / "rlhf-zoo").expanduser()


def choose(flag: str | None, *, push_to_hub: bool, environment: Mapping[str, str] | None = None) -> Hub:
    """The flag, else HF_ENDPOINT, else the real Hub with both a token and --push_to_hub, else the embedded one.

    Raises ZooError for a flag that is neither 'local' nor an address.
    """
    environment = os.environ if environment is None else environment
    if flag is not None:
        if flag == "local":
            return Hub("local", None, "--hub local")
        return _at(flag, "--hub")
    if environment.get("HF_ENDPOINT"):
        return _at(environment["HF_ENDPOINT"], "HF_ENDPOINT")
    if push_to_hub and _has_token(environment):
        return Hub("huggingface", REAL, "a token and --push_to_hub")
    return Hub("local", None, "no --hub, no HF_ENDPOINT, and not both a token and --push_to_hub")


def _at(address: str, why: str) -> Hub:
    try:
        parts = urlsplit(address)
        parts.port  # noqa: B018  (the property checks it)
    except ValueError as error:
        raise ZooError(f"{why} is {address!r} ({error}): give 'local' or an address such as {REAL}.") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ZooError(f"{why} is {address!r}: give 'local' or an address such as {REAL}.")
    if parts.scheme == "http" and parts.hostname not in LOOPBACK:
        raise ZooError(f"{why} is {address!r}, which would send a token unencrypted: use https.")
    endpoint = address.rstrip("/")
    return Hub("huggingface" if endpoint == REAL else "other", endpoint, why)


def _has_token(environment: Mapping[str, str]) -> bool:
    if environment.get("HF_TOKEN"):
        return True
    caches = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    default = Path(environment.get("HF_HOME") or Path(caches) / "huggingface").expanduser() / "token"
    return Path(environment.get("HF_TOKEN_PATH") or default).is_file()


@contextlib.contextmanager
def connect(hub: Hub) -> Iterator[Hub]:
    """Settles the environment for `hub`, starting the embedded one for as long as the context is open.

    Raises ZooError when the embedded Hub does not start.
    """
    if hub.kind == "local":
        with _embedded(home() / "hub") as (endpoint, token):
            _own_client(home() / "hub-cache", token)
            _direct()
            os.environ.update(QUIET, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0", HF_DATASETS_OFFLINE="0")
            os.environ[EMBEDDED] = endpoint
            point_clients()
            yield Hub("local", endpoint, hub.why)
        return
    if (os.environ.get("HF_ENDPOINT") or REAL).rstrip("/") != hub.endpoint:
        # The user's token belongs to the Hub that HF_ENDPOINT (or its absence) names, and goes nowhere else.
        host = urlsplit(str(hub.endpoint)).netloc.replace(":", "_")
        _own_client(home() / "hubs" / host, os.environ.get("RLHF_ZOO_HUB_TOKEN"))
        hub = replace(hub, token_from="RLHF_ZOO_HUB_TOKEN")
    if hub.kind == "other" and urlsplit(str(hub.endpoint)).hostname in LOOPBACK:
        _direct()
        os.environ.update(QUIET)
    os.environ["HF_ENDPOINT"] = str(hub.endpoint)
    point_clients()
    yield hub


def point_clients() -> None:
    """Clients that are imported already, which read HF_ENDPOINT, HF_HOME and the like only then, read them anew."""
    for name in ("huggingface_hub.constants", "datasets.config", "evaluate.config"):
        if name in sys.modules:
            importlib.reload(sys.modules[name])
    if "huggingface_hub.hf_api" in sys.modules:
        from huggingface_hub import constants, hf_api

        hf_api.api.endpoint = constants.ENDPOINT


def _direct() -> None:
    """Plain LFS, which is what `hub serve` speaks, and no proxy: for a Hub on this machine."""
    unproxied = ",".join(filter(None, [os.environ.get("NO_PROXY"), *LOOPBACK]))
    os.environ.update(HF_HUB_DISABLE_XET="1", NO_PROXY=unproxied, no_proxy=unproxied)


def _own_client(directory: Path, token: str | None) -> None:
    """A cache and a token of this Hub's own: the client's cache is keyed by repository, not by Hub."""
    _make_private(directory)
    for name in CLIENT_STATE:
        os.environ.pop(name, None)
    os.environ["HF_HOME"] = str(directory)
    if token:
        os.environ["HF_TOKEN"] = token


def _make_private(folder: Path) -> None:
    from ..hub_server.durable import make_private

    with _writing(folder):
        make_private(folder)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ZooError(
            f"{folder} cannot be written ({error.strerror}): set RLHF_ZOO_HOME to a place that can."
        ) from error


@contextlib.contextmanager
def _embedded(root: Path) -> Iterator[tuple[str, str]]:
    from ..hub_server.durable import write_bytes
    from ..hub_server.tokens import TokenFile, create_token

    _make_private(root)
    kept = root / "client-token"
    with _writing(root):
        if (
            not kept.is_file() or TokenFile(root).role(kept.read_text(errors="replace")) != "write"
        ):  # it may have been revoked
            write_bytes(kept, create_token(root, "write", name="--hub local").encode())
    with tempfile.TemporaryDirectory(prefix="rlhf-zoo-hub-") as scratch:
        ready = Path(scratch) / "ready.json"
        log = Path(scratch) / "log"
        options = ["--root", str(root), "--ready-file", str(ready), "--parent", str(os.getpid())]
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "rlhf_zoo.hub_server", *options],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                # Ctrl-C reaches the whole process group; the Hub must outlive it until the last checkpoint is sent.
                start_new_session=True,
            )
        try:
            deadline = time.monotonic() + START_SECONDS
            while not ready.is_file():
                if process.poll() is not None or time.monotonic() > deadline:
                    said = log.read_text(errors="replace").strip().splitlines()
                    raise ZooError(f"The embedded Hub did not start: {said[-1] if said else 'it said nothing'}")
                time.sleep(0.02)
            yield json.loads(ready.read_text())["url"], kept.read_text()
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
