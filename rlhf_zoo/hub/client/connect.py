"""Chooses the Hub that a command publishes to, and the Hub that models and data come from.

Both are `Hub` objects, created once per command and passed on. After `connect`, the environment points libraries that
read it (transformers, datasets) at the first of the two.
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
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ...errors import ZooError
from ...fileio import home, replace_file
from . import bounds

if TYPE_CHECKING:
    from huggingface_hub import HfApi

REAL = "https://huggingface.co"
# Turns off telemetry and update checks, for commands that talk to a Hub on this machine.
QUIET = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    "GRADIO_ANALYTICS_ENABLED": "0",
}
#: Set to the address of the embedded Hub while a command runs one: messages call it by its name.
EMBEDDED = "RLHF_ZOO_EMBEDDED_HUB"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
# Variables that hold a token or a cache of the user's own Hub. They are unset for any other Hub.
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
OUT_OF_ORDER = (500, 502, 503, 504)  # statuses of a Hub, or of a proxy in front of it, that is down
SOURCE = "--source_hub"


@dataclass(frozen=True)
class Hub:
    """A Hub, and what a client needs to talk to it.

    Args:
        kind: 'local' (the embedded Hub), 'huggingface' or 'other'.
        endpoint: The address. None for huggingface_hub's own, and for an embedded Hub that is not started yet.
        why: Why this Hub was chosen, for messages.
        token: The access token. None for huggingface_hub's own, False to send none.
        token_from: The environment variable that holds the token.
        cache: Folder of cached files; None for huggingface_hub's own. Caches are keyed by repository, not by Hub, so
            no two Hubs may share one.
        data_cache: Folder of prepared data sets, under the same rule.
        offline: Whether to use only what is cached.
        source: The Hub to ask for models and data that this one does not have.
        flag: The command-line flag that names another Hub instead.
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
        """The Hub's address, from huggingface_hub if it has none of its own."""
        if self.endpoint is None:
            from huggingface_hub import constants

            return constants.ENDPOINT
        return self.endpoint

    @property
    def label(self) -> str:
        """The Hub's name in run.json, cards and printed commands."""
        return "local" if self.kind == "local" else self.address

    @property
    def name(self) -> str:
        """The Hub's name in messages."""
        # The address of an embedded Hub is of no use once the command has ended.
        embedded = self.kind == "local" or os.environ.get(EMBEDDED) == self.address
        return "the embedded Hub" if embedded else f"{'the source ' if self.flag == SOURCE else ''}{self.address}"

    @property
    def described(self) -> str:
        """The Hub's name and why it was chosen, for the first line of a command."""
        return f"{'the embedded Hub' if self.kind == 'local' else self.endpoint} ({self.why})"

    def api(self) -> HfApi:
        """Returns huggingface_hub's `HfApi` for this Hub. Raises OfflineModeIsEnabled if the Hub is offline."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import OfflineModeIsEnabled

        if self.offline:
            raise OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
        return HfApi(endpoint=self.endpoint, token=self.token)

    def file(self, repo: str, name: str, *, revision: str | None = None, repo_type: str | None = None) -> Path:
        """Downloads a file of a repository into the cache.

        Args:
            repo: NAMESPACE/NAME.
            name: Path of the file in the repository.
            revision: Branch, tag or commit; None for main.
            repo_type: "dataset" or "space"; None for a model.

        Returns:
            The file in the cache.
        """
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(repo, name, revision=revision, repo_type=repo_type, **self._client))

    def snapshot(
        self,
        repo: str,
        *,
        revision: str | None = None,
        repo_type: str | None = None,
        allow_patterns: list[str] | None = None,
        ignore_patterns: list[str] | None = None,
    ) -> Path:
        """Downloads a revision of a repository into the cache.

        Args:
            repo: NAMESPACE/NAME.
            revision: Branch, tag or commit; None for main.
            repo_type: "dataset" or "space"; None for a model.
            allow_patterns: Patterns of the files to download; None for all.
            ignore_patterns: Patterns of the files to leave out.

        Returns:
            The folder in the cache.
        """
        from huggingface_hub import snapshot_download

        path = snapshot_download(
            repo,
            revision=revision,
            repo_type=repo_type,
            allow_patterns=allow_patterns,
            ignore_patterns=ignore_patterns,
            **self._client,
        )
        return Path(path)

    def outage(self) -> Exception | None:
        """Probes the Hub with one short request.

        The client itself tries six times before it gives up on a commit, and waits forever on a connection that stays
        open without an answer.

        Returns:
            Why the Hub does not answer; None if it does, or if it is offline by choice.
        """
        from huggingface_hub.errors import HfHubHTTPError, HTTPError
        from huggingface_hub.utils import get_session

        if self.offline:
            return None
        try:
            answer = get_session().head(self.address, timeout=ANSWER_SECONDS)
        except (HTTPError, OSError) as error:
            return error
        message = f"{answer.status_code} {answer.reason_phrase}"
        return HfHubHTTPError(message, response=answer) if answer.status_code in OUT_OF_ORDER else None

    @property
    def _client(self) -> dict[str, Any]:
        offline = {"local_files_only": True} if self.offline else {}
        return {"endpoint": self.endpoint, "token": self.token, "cache_dir": self.cache, **offline}


#: The Hub that huggingface_hub is configured for.
CLIENT = Hub("other", None, "as huggingface_hub is set up")
#: The Hub of the open `connect`.
_connected: Hub | None = None


def connected() -> Hub:
    """Returns the Hub that this command is connected to; CLIENT if it is connected to none.

    Only for objects that a recipe names and that load models: everything else has its Hub passed to it.
    """
    return _connected or CLIENT


def choose(flag: str | None, *, push_to_hub: bool, option: str = "--hub") -> Hub:
    """Chooses the Hub of a command.

    The flag decides; without it HF_ENDPOINT; without that the real Hub, if there are both a token and --push_to_hub;
    otherwise the embedded Hub.

    Args:
        flag: Value of the flag: 'local' or an address. None if it was not given.
        push_to_hub: Whether --push_to_hub was given.
        option: Name of the flag, for messages.

    Returns:
        The Hub, not yet connected.

    Raises:
        ZooError: The flag or HF_ENDPOINT is not an address.
    """
    if flag is not None:
        if flag == "local":
            return Hub("local", None, f"{option} local", flag=option)
        return replace(_at(flag, option), flag=option)
    if endpoint := os.environ.get("HF_ENDPOINT"):
        return _at(endpoint, "HF_ENDPOINT")
    # A token by itself is not consent to publish: it may be there only for downloads.
    if push_to_hub and (os.environ.get("HF_TOKEN") or _token_file().is_file()):
        return Hub("huggingface", REAL, "a token and --push_to_hub")
    return Hub("local", None, "no --hub, no HF_ENDPOINT, and not both a token and --push_to_hub")


def choose_source(flag: str | None, target: Hub) -> Hub | None:
    """Chooses the Hub that models and data come from if `target` does not have them.

    The flag decides; without it HF_ENDPOINT; without that the real Hub.

    Args:
        flag: Value of --source_hub: 'none', 'local' or an address. None if it was not given.
        target: The Hub to publish to.

    Returns:
        The source, or None if it is the target itself or the flag is 'none'.

    Raises:
        ZooError: The flag is not an address.
    """
    if flag == "none":
        return None
    named = os.environ.get("HF_ENDPOINT")
    if flag is not None:
        source = choose(flag, push_to_hub=False, option=SOURCE)
    else:
        try:
            source = _at(named or REAL, "HF_ENDPOINT" if named else "as huggingface_hub has it")
        except (
            ZooError
        ):  # a bad HF_ENDPOINT does not matter if --hub names the target: the user did not ask for that source
            return None
    return None if (source.kind, source.endpoint) == (target.kind, target.endpoint) else replace(source, flag=SOURCE)


def _at(address: str, why: str) -> Hub:
    try:
        parts = urlsplit(address)
        parts.port  # noqa: B018  (the property checks it)
    except ValueError as error:
        raise ZooError(f"{why} is {address!r} ({error}): use 'local' or an address such as {REAL}.") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ZooError(f"{why} is {address!r}: use 'local' or an address such as {REAL}.")
    if parts.scheme == "http" and parts.hostname not in LOOPBACK:
        raise ZooError(f"{why} is {address!r}, which would send a token unencrypted: use https.")
    endpoint = address.rstrip("/")
    if _is_served_here(endpoint):
        # By its address it would be another Hub each time that it is served on another port.
        return Hub("local", None, f"{why} is where `rlhf-zoo hub serve` serves it")
    return Hub("huggingface" if endpoint == REAL else "other", endpoint, why)


def _is_served_here(endpoint: str) -> bool:
    """Whether `hub serve` serves the embedded Hub at an address. The record of a killed server does not count."""
    from ..server.durable import read_json
    from ..server.process import RECORD, running_server

    folder = home() / "hub"
    try:
        # Most commands name another Hub, so the server is asked only about its own address.
        return read_json(folder / RECORD)["url"] == endpoint and running_server(folder) is not None
    except (OSError, ValueError, KeyError, TypeError, ZooError):  # `hub status` says what is wrong with a damaged one
        return False


def _token_file() -> Path:
    return Path(os.environ.get("HF_TOKEN_PATH") or _client_home() / "token").expanduser()


def _client_home() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HF_HOME") or Path(caches) / "huggingface").expanduser()


@contextlib.contextmanager
def connect(choice: Hub, source: Hub | None = None) -> Iterator[Hub]:
    """Connects to a Hub and to its source, and points the environment at the Hub.

    An embedded Hub runs for as long as the context is open.

    Args:
        choice: The Hub that `choose` returned.
        source: The Hub that `choose_source` returned.

    Yields:
        The Hub with its address, token, caches and source.

    Raises:
        ZooError: An embedded Hub does not start, or its folder cannot be written.
    """
    global _connected
    with contextlib.ExitStack() as stack:
        # The source comes first: it may use the user's own token and caches, which `_settle` below hides.
        source_hub = None if source is None else stack.enter_context(_open(source, "RLHF_ZOO_SOURCE_TOKEN"))
        source_hub = source_hub and replace(source_hub, token=source_hub.token or False)
        hub = stack.enter_context(_open(choice, "RLHF_ZOO_HUB_TOKEN"))
        _settle(hub)
        bounds.install()
        before, _connected = _connected, replace(hub, source=source_hub)
        try:
            yield _connected
        finally:
            _connected = before


@contextlib.contextmanager
def _open(choice: Hub, token_from: str) -> Iterator[Hub]:
    """Yields the Hub with its address, token and caches. Leaves the environment unchanged."""
    # The user's own token belongs to the Hub that HF_ENDPOINT (or its absence) names, and is sent nowhere else.
    environment = os.environ
    if choice.kind == "local":
        with _embedded(home() / "hub") as (endpoint, token):
            yield _in_own_folder(replace(choice, endpoint=endpoint, token=token), home() / "hub-cache")
    elif choice.endpoint != (environment.get("HF_ENDPOINT") or REAL).rstrip("/"):
        host = urlsplit(str(choice.endpoint)).netloc.replace(":", "_")
        # A Hub that a flag names gets only the token meant for it: `token_from`, not HF_TOKEN.
        token = environment.get(token_from, "")
        yield _in_own_folder(replace(choice, token=token or False, token_from=token_from), home() / "hubs" / host)
    else:
        # Read the variables as huggingface_hub does. Its own constants are as old as its import.
        client_home = _client_home()
        token = environment.get("HF_TOKEN") or environment.get("HUGGING_FACE_HUB_TOKEN") or ""
        if not token and (file := _token_file()).is_file():
            token = file.read_text(encoding="utf-8", errors="replace").strip()
        files = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE") or client_home / "hub"
        data = environment.get("HF_DATASETS_CACHE") or client_home / "datasets"
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
    """Points everything that reads the environment at the Hub: transformers, datasets, child processes."""
    if hub.kind == "local" or (os.environ.get("HF_ENDPOINT") or REAL).rstrip("/") != hub.endpoint:
        assert hub.cache is not None
        _own_client(hub.cache.parent, hub.token or None)
    if hub.kind == "local":
        # The embedded Hub is reached without a network, so offline mode must not block it.
        os.environ.update(HF_HUB_OFFLINE="0", HF_DATASETS_OFFLINE="0")
        os.environ[EMBEDDED] = str(hub.endpoint)
    if hub.kind != "huggingface" and urlsplit(str(hub.endpoint)).hostname in LOOPBACK:
        # On this machine: no proxy, and plain LFS instead of Xet, whose chunks save no traffic here.
        unproxied = ",".join(filter(None, [os.environ.get("NO_PROXY"), *LOOPBACK]))
        os.environ.update(QUIET, HF_HUB_DISABLE_XET="1", NO_PROXY=unproxied, no_proxy=unproxied)
    os.environ["HF_ENDPOINT"] = str(hub.endpoint)
    point_clients()


def point_clients() -> None:
    """Makes clients that are already imported read HF_ENDPOINT, HF_HOME and the like again."""
    # They read the environment once, at import. A reload runs that code again, in the same module object.
    for name in ("huggingface_hub.constants", "datasets.config", "evaluate.config"):
        if name in sys.modules:
            importlib.reload(sys.modules[name])
    if "huggingface_hub.hf_api" in sys.modules:
        from huggingface_hub import constants, hf_api

        hf_api.api.endpoint = constants.ENDPOINT


def _own_client(directory: Path, token: str | bool | None) -> None:
    """Gives the clients a cache and a token for this Hub only, because their cache is keyed by repository only."""
    _make_private(directory)
    # Experiment logs belong to no Hub: keep them where they were before HF_HOME moves.
    os.environ.setdefault("TRACKIO_DIR", str(_client_home() / "trackio"))
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
            f"{folder} cannot be written ({error.strerror}): set RLHF_ZOO_HOME to a writable folder."
        ) from error


@contextlib.contextmanager
def _embedded(root: Path) -> Iterator[tuple[str, str]]:
    from ..server.tokens import TokenFile, create_token

    _make_private(root)
    token_file = root / "client-token"
    with _writing(root):
        # The token of the last command is used again, unless the user revoked it.
        if not token_file.is_file() or TokenFile(root).role(token_file.read_text(errors="replace")) != "write":
            replace_file(token_file, create_token(root, "write", name="--hub local").encode())
    with tempfile.TemporaryDirectory(prefix="rlhf-zoo-hub-") as scratch:
        ready = Path(scratch) / "ready.json"
        log = Path(scratch) / "log"
        options = ["--root", str(root), "--ready-file", str(ready), "--parent", str(os.getpid())]
        with log.open("wb") as sink:
            process = subprocess.Popen(
                # -P keeps the working directory out of sys.path: it may be a downloaded folder with modules in it.
                [sys.executable, "-P", "-m", "rlhf_zoo.hub.server", *options],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                # Ctrl-C signals the whole process group. The Hub must survive it until the last checkpoint is sent.
                start_new_session=True,
            )
        # The server picks a free port and writes its address into `ready` once it listens.
        try:
            deadline = time.monotonic() + START_SECONDS
            while not ready.is_file():
                if process.poll() is not None or time.monotonic() > deadline:
                    lines = log.read_text(errors="replace").strip().splitlines()
                    raise ZooError(f"The embedded Hub did not start: {lines[-1] if lines else 'it printed nothing'}")
                time.sleep(0.02)
            yield json.loads(ready.read_text())["url"], token_file.read_text()
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
