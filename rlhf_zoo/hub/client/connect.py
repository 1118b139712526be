"""Which Hub a command talks to, and which one models and data come from: objects, made once and passed on.

Libraries that read the environment (transformers, datasets) find the first of the two there after `connect`.
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
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...errors import ZooError
from ...fileio import home, replace_file
from . import bounds

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
ANSWER_SECONDS = 5
OUT_OF_ORDER = (500, 502, 503, 504)
SOURCE = "--source_hub"


@dataclass(frozen=True)
class Hub:
    """A Hub: its kind ('local' is the embedded one, 'huggingface', 'other'), address, and why it was chosen.

    endpoint, token, cache: None is as huggingface_hub is set up; token False sends none. An embedded Hub has no
    endpoint until it is started. token_from: the environment variable whose token this Hub is given. cache, data_cache:
    of files and of prepared data sets; they are keyed by repository, so no two Hubs may share one. offline: what is
    cached alone. source: where models and data come from that this Hub has no repository of. flag: the one that names
    another Hub in its place.
    """

    kind: str
    endpoint: str | None
    why: str
    token: str | bool | None = field(default=None, repr=False)
    token_from: str = "HF_TOKEN"
    cache: Path | None = None
    data_cache: Path | None = None
    offline: bool = False
    source: Hub | None = None
    flag: str = "--hub"

    @property
    def address(self) -> str:
        if self.endpoint is None:
            from huggingface_hub import constants

            return constants.ENDPOINT
        return self.endpoint

    @property
    def label(self) -> str:
        """What run.json, cards and printed commands call it."""
        return "local" if self.kind == "local" else self.address

    @property
    def name(self) -> str:
        """What a message calls it: the embedded one's address dies with the command."""
        embedded = self.kind == "local" or os.environ.get(EMBEDDED) == self.address
        return "the embedded Hub" if embedded else f"{'the source ' if self.flag == SOURCE else ''}{self.address}"

    @property
    def described(self) -> str:
        return f"{'the embedded Hub' if self.kind == 'local' else self.endpoint} ({self.why})"

    def api(self) -> Any:
        """The client's `HfApi` of this Hub. Raises what the client raises offline."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import OfflineModeIsEnabled

        if self.offline:
            raise OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
        return HfApi(endpoint=self.endpoint, token=self.token)

    def file(self, repo: str, name: str, **options: Any) -> Path:
        """A file of a repository, in the cache. options: revision, repo_type."""
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(repo, name, **self._client, **options))

    def snapshot(self, repo: str, **options: Any) -> Path:
        """A revision of a repository, in the cache. options: of `snapshot_download`."""
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(repo, **self._client, **options))

    def silence(self) -> Exception | None:
        """Why this Hub gives no answer, asked once; None where it does, or is not to be asked.

        The client itself asks six times for a commit, and for ever where nobody hangs up.
        """
        from huggingface_hub.errors import HfHubHTTPError, HTTPError
        from huggingface_hub.utils import get_session

        if self.offline:
            return None
        try:
            answer = get_session().head(self.address, timeout=ANSWER_SECONDS)
        except (HTTPError, OSError) as error:
            return error
        told = f"{answer.status_code} {answer.reason_phrase}"
        return HfHubHTTPError(told, response=answer) if answer.status_code in OUT_OF_ORDER else None

    @property
    def _client(self) -> dict[str, Any]:
        offline = {"local_files_only": True} if self.offline else {}
        return {"endpoint": self.endpoint, "token": self.token, "cache_dir": self.cache, **offline}


#: As huggingface_hub is set up.
CLIENT = Hub("other", None, "as huggingface_hub is set up")


def choose(flag: str | None, *, push_to_hub: bool, option: str = "--hub") -> Hub:
    """The flag, else HF_ENDPOINT, else the real Hub with both a token and --push_to_hub, else the embedded one.

    Raises ZooError for a flag that is neither 'local' nor an address.
    """
    if flag is not None:
        if flag == "local":
            return Hub("local", None, f"{option} local", flag=option)
        return replace(_at(flag, option), flag=option)
    if named := os.environ.get("HF_ENDPOINT"):
        return _at(named, "HF_ENDPOINT")
    if push_to_hub and (os.environ.get("HF_TOKEN") or _token_file().is_file()):
        return Hub("huggingface", REAL, "a token and --push_to_hub")
    return Hub("local", None, "no --hub, no HF_ENDPOINT, and not both a token and --push_to_hub")


def choose_source(flag: str | None, target: Hub) -> Hub | None:
    """Where models and data come from that `target` has not: the flag, else HF_ENDPOINT, else the real Hub.

    None where that is the target itself, and for 'none'. Raises ZooError for a flag that is no address.
    """
    if flag == "none":
        return None
    named = os.environ.get("HF_ENDPOINT")
    if flag is not None:
        source = choose(flag, push_to_hub=False, option=SOURCE)
    else:
        try:
            source = _at(named or REAL, "HF_ENDPOINT" if named else "as huggingface_hub has it")
        except ZooError:  # with --hub nobody asked for it
            return None
    return None if (source.kind, source.endpoint) == (target.kind, target.endpoint) else replace(source, flag=SOURCE)


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


def _token_file() -> Path:
    return Path(os.environ.get("HF_TOKEN_PATH") or _client_home() / "token").expanduser()


def _client_home() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HF_HOME") or Path(caches) / "huggingface").expanduser()


@contextlib.contextmanager
def connect(choice: Hub, source: Hub | None = None) -> Iterator[Hub]:
    """Opens a Hub and the source of models and data, and settles the environment for the first.

    An embedded one runs for as long as the context is open. Raises ZooError when it does not start.
    """
    with contextlib.ExitStack() as opened:
        # First: the user's own token and caches are theirs only until the environment is that of another Hub.
        found = None if source is None else opened.enter_context(_open(source, "RLHF_ZOO_SOURCE_TOKEN"))
        found = found and replace(found, token=found.token or False)
        hub = opened.enter_context(_open(choice, "RLHF_ZOO_HUB_TOKEN"))
        _settle(hub)
        bounds.install()
        yield replace(hub, source=found)


@contextlib.contextmanager
def _open(choice: Hub, token_from: str) -> Iterator[Hub]:
    """The Hub with its address, its token and caches of its own; the environment stays as it is.

    The user's own token belongs to the Hub that HF_ENDPOINT (or its absence) names, and goes nowhere else.
    """
    environment = os.environ
    if choice.kind == "local":
        with _embedded(home() / "hub") as (endpoint, token):
            yield _in_own_folder(replace(choice, endpoint=endpoint, token=token), home() / "hub-cache")
    elif choice.endpoint != (environment.get("HF_ENDPOINT") or REAL).rstrip("/"):
        host = urlsplit(str(choice.endpoint)).netloc.replace(":", "_")
        token = environment.get(token_from, "")
        yield _in_own_folder(replace(choice, token=token or False, token_from=token_from), home() / "hubs" / host)
    else:
        own = _client_home()
        token = environment.get("HF_TOKEN") or environment.get("HUGGING_FACE_HUB_TOKEN") or ""
        if not token and (file := _token_file()).is_file():
            token = file.read_text(encoding="utf-8", errors="replace").strip()
        files = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE") or own / "hub"
        data = environment.get("HF_DATASETS_CACHE") or own / "datasets"
        offline = environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        yield replace(
            choice,
            token=token or None,
            cache=Path(files).expanduser(),
            data_cache=Path(data).expanduser(),
            offline=offline,
        )


def _in_own_folder(hub: Hub, folder: Path) -> Hub:
    return replace(hub, cache=folder / "hub", data_cache=folder / "datasets")


def _settle(hub: Hub) -> None:
    """The environment of what reads it: transformers, datasets, child processes."""
    if hub.kind == "local" or (os.environ.get("HF_ENDPOINT") or REAL).rstrip("/") != hub.endpoint:
        assert hub.cache is not None
        _own_client(hub.cache.parent, hub.token or None)
    if hub.kind == "local":
        os.environ.update(HF_HUB_OFFLINE="0", HF_DATASETS_OFFLINE="0")
        os.environ[EMBEDDED] = str(hub.endpoint)
    if hub.kind != "huggingface" and urlsplit(str(hub.endpoint)).hostname in LOOPBACK:
        # Plain LFS, which is what `hub serve` speaks, and no proxy: for a Hub on this machine.
        unproxied = ",".join(filter(None, [os.environ.get("NO_PROXY"), *LOOPBACK]))
        os.environ.update(QUIET, HF_HUB_DISABLE_XET="1", NO_PROXY=unproxied, no_proxy=unproxied)
    os.environ["HF_ENDPOINT"] = str(hub.endpoint)
    point_clients()


def point_clients() -> None:
    """Clients that are imported already, which read HF_ENDPOINT, HF_HOME and the like only then, read them anew."""
    for name in ("huggingface_hub.constants", "datasets.config", "evaluate.config"):
        if name in sys.modules:
            importlib.reload(sys.modules[name])
    if "huggingface_hub.hf_api" in sys.modules:
        from huggingface_hub import constants, hf_api

        hf_api.api.endpoint = constants.ENDPOINT


def _own_client(directory: Path, token: str | bool | None) -> None:
    """A cache and a token of this Hub's own: the client's cache is keyed by repository, not by Hub."""
    _make_private(directory)
    os.environ.setdefault("TRACKIO_DIR", str(_client_home() / "trackio"))  # logs are of no Hub
    for name in CLIENT_STATE:
        os.environ.pop(name, None)
    os.environ["HF_HOME"] = str(directory)
    if token:
        os.environ["HF_TOKEN"] = str(token)


def _make_private(folder: Path) -> None:
    from ..server.durable import make_private

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
    from ..server.tokens import TokenFile, create_token

    _make_private(root)
    token_file = root / "client-token"
    with _writing(root):
        if (
            not token_file.is_file() or TokenFile(root).role(token_file.read_text(errors="replace")) != "write"
        ):  # it may have been revoked
            replace_file(token_file, create_token(root, "write", name="--hub local").encode())
    with tempfile.TemporaryDirectory(prefix="rlhf-zoo-hub-") as scratch:
        ready = Path(scratch) / "ready.json"
        log = Path(scratch) / "log"
        options = ["--root", str(root), "--ready-file", str(ready), "--parent", str(os.getpid())]
        with log.open("wb") as sink:
            process = subprocess.Popen(
                # -P: the working directory may be a folder that was downloaded, and no module is taken from it.
                [sys.executable, "-P", "-m", "rlhf_zoo.hub.server", *options],
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
                    lines = log.read_text(errors="replace").strip().splitlines()
                    raise ZooError(f"The embedded Hub did not start: {lines[-1] if lines else 'it said nothing'}")
                time.sleep(0.02)
            yield json.loads(ready.read_text())["url"], token_file.read_text()
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
