"""Chooses the Hub that a command publishes to, and its source: a second Hub for models and data that the first lacks.

Both are `Hub` objects, created once per command and passed on. `connect` also sets environment variables, so that
libraries that read them (transformers, datasets) use the Hub that the command publishes to.
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
from .. import LOOPBACK_HOSTS
from . import bounds

if TYPE_CHECKING:
    from huggingface_hub import HfApi

HF_URL = "https://huggingface.co"
#: Environment variable with the address of the embedded Hub that a command has started. Messages call that address
#: "the embedded Hub".
EMBEDDED_HUB_VARIABLE = "RLHF_ZOO_EMBEDDED_HUB"
# Variables with a token or a cache for the Hub that the user configured. They are unset for any other Hub.
CLIENT_VARIABLES = (
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
START_TIMEOUT = 30  # seconds for the embedded Hub to start listening
PROBE_TIMEOUT = 5  # seconds
OUTAGE_STATUSES = (500, 502, 503, 504)  # HTTP statuses of a Hub that is down, or of a proxy in front of it
SOURCE_FLAG = "--source_hub"


@dataclass(frozen=True)
class Hub:
    """A Hub, and what a client needs to talk to it.

    Args:
        kind: 'local' (the embedded Hub), 'huggingface' or 'other'.
        endpoint: The address. None for the one in huggingface_hub's settings, and for an embedded Hub that has not
            started yet.
        reason: Why this Hub was chosen, such as the flag or variable that names it, for messages.
        token: The access token. None for the one that huggingface_hub has stored, False to send none.
        token_variable: The environment variable that sets the token, for messages.
        cache: Folder of cached files; None for huggingface_hub's default. Caches are keyed by repository, not by Hub,
            so no two Hubs may share a cache.
        data_cache: Folder of prepared data sets; None for the default of `datasets`. No two Hubs may share it either.
        offline: Whether to use only cached files.
        source_hub: The Hub to ask for models and data that this one does not have; None to ask no other.
        flag: The command-line flag that chooses another Hub, for messages.
    """

    kind: str
    endpoint: str | None
    reason: str
    token: str | bool | None = field(default=None, repr=False)
    token_variable: str = "HF_TOKEN"
    cache: Path | None = None
    data_cache: Path | None = None
    offline: bool = False
    source_hub: Hub | None = None
    flag: str = "--hub"

    @property
    def address(self) -> str:
        """The Hub's address: `endpoint`, or the address in huggingface_hub's settings if `endpoint` is None."""
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
        is_embedded = self.kind == "local" or os.environ.get(EMBEDDED_HUB_VARIABLE) == self.address
        prefix = "the source " if self.flag == SOURCE_FLAG else ""
        return "the embedded Hub" if is_embedded else f"{prefix}{self.address}"

    @property
    def description(self) -> str:
        """The Hub's name and the reason for its choice, for messages."""
        return f"{'the embedded Hub' if self.kind == 'local' else self.address} ({self.reason})"

    def api(self) -> HfApi:
        """Returns huggingface_hub's `HfApi` for this Hub. Raises OfflineModeIsEnabled if `offline` is set."""
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
        """
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(repo, name, revision=revision, repo_type=repo_type, **self._client_options))

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
        """
        from huggingface_hub import snapshot_download

        path = snapshot_download(
            repo,
            revision=revision,
            repo_type=repo_type,
            allow_patterns=allow_patterns,
            ignore_patterns=ignore_patterns,
            **self._client_options,
        )
        return Path(path)

    def outage(self) -> Exception | None:
        """Probes the Hub with one short request.

        Without a probe, a command notices late that a Hub is down, because huggingface_hub retries many requests.

        Returns:
            Why the Hub does not answer; None if it does, or if `offline` is set.
        """
        from huggingface_hub.errors import HfHubHTTPError, HTTPError
        from huggingface_hub.utils import get_session

        if self.offline:
            return None
        try:
            response = get_session().head(self.address, timeout=PROBE_TIMEOUT)
        except (HTTPError, OSError) as error:
            return error
        message = f"{response.status_code} {response.reason_phrase}"
        return HfHubHTTPError(message, response=response) if response.status_code in OUTAGE_STATUSES else None

    @property
    def _client_options(self) -> dict[str, Any]:
        offline_option = {"local_files_only": True} if self.offline else {}
        return {"endpoint": self.endpoint, "token": self.token, "cache_dir": self.cache, **offline_option}


#: The Hub that huggingface_hub is configured for.
DEFAULT_HUB = Hub("other", None, "huggingface_hub's settings")
#: The Hub that `connect` yielded, while its context is open.
_current_hub: Hub | None = None


def current_hub() -> Hub:
    """Returns the Hub that this command is connected to; DEFAULT_HUB if there is no connection.

    Only reward functions and judges that load a model may call it: a recipe names them, and no Hub is passed to them.
    All other code gets its Hub as an argument.
    """
    return _current_hub or DEFAULT_HUB


def choose_hub(flag_value: str | None, *, push_to_hub: bool | None, flag: str = "--hub") -> Hub:
    """Chooses a command's Hub.

    Takes the flag, else HF_ENDPOINT, else huggingface.co (given a token and --push_to_hub), else the embedded Hub.

    Args:
        flag_value: Value of the flag: 'local' or an address. None if the flag was not given.
        push_to_hub: Whether --push_to_hub was given, or the command always publishes; None if it never publishes.
        flag: Name of the flag, for messages.

    Returns:
        The Hub, not yet connected.

    Raises:
        ZooError: The flag or HF_ENDPOINT is not an address, or it is http on another machine.
    """
    if flag_value is not None:
        if flag_value == "local":
            return Hub("local", None, f"{flag} local", flag=flag)
        return replace(_hub_at(flag_value, flag), flag=flag)
    if endpoint := os.environ.get("HF_ENDPOINT"):
        return _hub_at(endpoint, "HF_ENDPOINT")
    # A token by itself is not consent to publish: it may be there only for downloads.
    if push_to_hub and (os.environ.get("HF_TOKEN") or _token_file().is_file()):
        return Hub("huggingface", HF_URL, "a token was found")
    if push_to_hub is None:
        return Hub("local", None, "pass --hub to use another")
    missing_step = "log in: no token was found" if push_to_hub else "log in and add --push_to_hub"
    return Hub("local", None, f"to publish on huggingface.co, {missing_step}")


def choose_source(flag_value: str | None, target: Hub) -> Hub | None:
    """Chooses the Hub for models and data that `target` does not have.

    Takes the flag, else HF_ENDPOINT, else huggingface.co.

    Args:
        flag_value: Value of --source_hub: 'none', 'local' or an address. None if the flag was not given.
        target: The Hub to publish to.

    Returns:
        The source; None if the flag is 'none', the source is the target itself, or HF_ENDPOINT is malformed.

    Raises:
        ZooError: The flag is not an address, or it is http on another machine.
    """
    if flag_value == "none":
        return None
    endpoint = os.environ.get("HF_ENDPOINT")
    if flag_value is not None:
        source = choose_hub(flag_value, push_to_hub=False, flag=SOURCE_FLAG)
    else:
        try:
            source = _hub_at(endpoint or HF_URL, "HF_ENDPOINT" if endpoint else "huggingface_hub's default")
        except ZooError:
            # HF_ENDPOINT is malformed. `choose_hub` did not read it, because the user named the target by --hub. Do not
            # refuse it here, because the user did not ask for a source.
            return None
    is_target = (source.kind, source.endpoint) == (target.kind, target.endpoint)
    return None if is_target else replace(source, flag=SOURCE_FLAG)


def _hub_at(address: str, setting: str) -> Hub:
    local_choice = "" if setting == "HF_ENDPOINT" else "'local' or "
    remedy = f"use {local_choice}an address such as {HF_URL}."
    try:
        parts = urlsplit(address)
        parts.port  # noqa: B018  (the property checks it)
    except ValueError as error:
        raise ZooError(f"{setting} is {address!r} ({error}): {remedy}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ZooError(f"{setting} is {address!r}: {remedy}")
    if parts.scheme == "http" and parts.hostname not in LOOPBACK_HOSTS:
        raise ZooError(f"{setting} is {address!r}, which would send a token unencrypted: use https.")
    endpoint = address.rstrip("/")
    if _is_served_here(endpoint):
        # The embedded Hub may get a different port each time, but run.json must name the same Hub.
        return Hub("local", None, f"{setting} is where `rlhf-zoo hub serve` serves it")
    return Hub("huggingface" if endpoint == HF_URL else "other", endpoint, setting)


def _is_served_here(endpoint: str) -> bool:
    """Whether `hub serve` currently serves the embedded Hub at an address. A killed server's record does not count."""
    from ..server.durable import read_json
    from ..server.process import RECORD_FILE, running_server

    folder = home() / "hub"
    try:
        # Compare the address first: most commands name another Hub, and the check for a running server is slower.
        return read_json(folder / RECORD_FILE)["url"] == endpoint and running_server(folder) is not None
    except (OSError, ValueError, KeyError, TypeError, ZooError):  # no record, or a damaged one: see `hub status`
        return False


def _token_file() -> Path:
    return Path(os.environ.get("HF_TOKEN_PATH") or _client_home() / "token").expanduser()


def _client_home() -> Path:
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HF_HOME") or Path(cache_home) / "huggingface").expanduser()


@contextlib.contextmanager
def connect(choice: Hub, source: Hub | None = None) -> Iterator[Hub]:
    """Connects to a Hub and its source, and sets the environment variables that name the Hub.

    An embedded Hub runs while the context is open. The variables stay set afterwards.

    Args:
        choice: The Hub to connect to, as returned by `choose_hub`.
        source: The Hub's source, as returned by `choose_source`; None for no source.

    Yields:
        The Hub with its address, token, caches and source.

    Raises:
        ZooError: An embedded Hub does not start, or its folder cannot be written.
    """
    global _current_hub
    with contextlib.ExitStack() as stack:
        # Open the source first: it may use the user's own token and caches, which `_set_environment` below hides.
        source_hub = None
        if source is not None:
            source_hub = stack.enter_context(_open(source, "RLHF_ZOO_SOURCE_TOKEN"))
            # Without a token for the source, send none. With None, huggingface_hub would send the token of the target.
            source_hub = replace(source_hub, token=source_hub.token or False)
        hub = stack.enter_context(_open(choice, "RLHF_ZOO_HUB_TOKEN"))
        _set_environment(hub)
        bounds.install()
        previous_hub, _current_hub = _current_hub, replace(hub, source_hub=source_hub)
        try:
            yield _current_hub
        finally:
            _current_hub = previous_hub


@contextlib.contextmanager
def _open(choice: Hub, token_variable: str) -> Iterator[Hub]:
    """Yields the Hub with its address, token and caches. Leaves the environment unchanged."""
    # The user's token is for the Hub in HF_ENDPOINT, by default huggingface.co. It must not be sent to another Hub.
    environment = os.environ
    if choice.kind == "local":
        with _run_embedded_hub(home() / "hub") as (endpoint, token):
            yield _with_caches(replace(choice, endpoint=endpoint, token=token), home() / "hub-cache")
    elif choice.endpoint != (environment.get("HF_ENDPOINT") or HF_URL).rstrip("/"):
        host = urlsplit(str(choice.endpoint)).netloc.replace(":", "_")
        token = environment.get(token_variable, "")
        yield _with_caches(replace(choice, token=token or False, token_variable=token_variable), home() / "hubs" / host)
    else:
        # Read the variables as huggingface_hub does. Its constants may be stale, because it reads them only at import.
        client_home = _client_home()
        token = environment.get("HF_TOKEN") or environment.get("HUGGING_FACE_HUB_TOKEN") or ""
        if not token and (file := _token_file()).is_file():
            token = file.read_text(encoding="utf-8", errors="replace").strip()
        cache = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE") or client_home / "hub"
        data_cache = environment.get("HF_DATASETS_CACHE") or client_home / "datasets"
        offline = environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        yield replace(
            choice,
            token=token or None,
            cache=Path(cache).expanduser(),
            data_cache=Path(data_cache).expanduser(),
            offline=offline,
        )


def _with_caches(hub: Hub, folder: Path) -> Hub:
    return replace(hub, cache=folder / "hub", data_cache=folder / "datasets")


def _set_environment(hub: Hub) -> None:
    """Sets the environment variables that name the Hub, for transformers, datasets and child processes."""
    if hub.kind == "local" or (os.environ.get("HF_ENDPOINT") or HF_URL).rstrip("/") != hub.endpoint:
        assert hub.cache is not None
        _isolate_client(hub.cache.parent, hub.token or None)
    if hub.kind == "local":
        # The embedded Hub needs no network, so offline mode must not block it.
        os.environ.update(HF_HUB_OFFLINE="0", HF_DATASETS_OFFLINE="0")
        os.environ[EMBEDDED_HUB_VARIABLE] = str(hub.endpoint)
    if hub.kind != "huggingface" and urlsplit(str(hub.endpoint)).hostname in LOOPBACK_HOSTS:
        from ..server.process import NO_TELEMETRY

        # The Hub is on this machine, so use no proxy, and use plain LFS: Xet would save no traffic.
        no_proxy_hosts = ",".join(filter(None, [os.environ.get("NO_PROXY"), *LOOPBACK_HOSTS]))
        os.environ.update(NO_TELEMETRY, HF_HUB_DISABLE_XET="1", NO_PROXY=no_proxy_hosts, no_proxy=no_proxy_hosts)
    os.environ["HF_ENDPOINT"] = str(hub.endpoint)
    reload_clients()


def reload_clients() -> None:
    """Makes libraries that are already imported read HF_ENDPOINT, HF_HOME and the like again."""
    # They read the environment once, at import. A reload runs that code again in the same module object.
    for name in ("huggingface_hub.constants", "datasets.config", "evaluate.config"):
        if name in sys.modules:
            importlib.reload(sys.modules[name])
    if "huggingface_hub.hf_api" in sys.modules:
        from huggingface_hub import constants, hf_api

        hf_api.api.endpoint = constants.ENDPOINT


def _isolate_client(directory: Path, token: str | bool | None) -> None:
    """Gives the client libraries a cache and a token for this Hub only, because one cache cannot tell Hubs apart."""
    _make_private(directory)
    # trackio logs below HF_HOME by default. Its logs belong to no Hub, so keep their folder when HF_HOME changes.
    os.environ.setdefault("TRACKIO_DIR", str(_client_home() / "trackio"))
    for name in CLIENT_VARIABLES:
        os.environ.pop(name, None)
    os.environ["HF_HOME"] = str(directory)
    if token:
        os.environ["HF_TOKEN"] = str(token)


def _make_private(folder: Path) -> None:
    from ..server.durable import make_private

    with _translate_write_errors(folder):
        make_private(folder)


@contextlib.contextmanager
def _translate_write_errors(folder: Path) -> Iterator[None]:
    """Turns an OSError into a ZooError with a remedy."""
    try:
        yield
    except OSError as error:
        raise ZooError(
            f"{folder} cannot be written ({error.strerror}): set RLHF_ZOO_HOME to a writable folder."
        ) from error


@contextlib.contextmanager
def _run_embedded_hub(root: Path) -> Iterator[tuple[str, str]]:
    """Runs the embedded Hub. Yields its address, and a token with the role write."""
    from ..server.tokens import TokenFile, create_token

    _make_private(root)
    token_path = root / "client-token"
    with _translate_write_errors(root):
        # Reuse the token of the last command, unless the user has revoked it.
        if not token_path.is_file() or TokenFile(root).role(token_path.read_text(errors="replace")) != "write":
            replace_file(token_path, create_token(root, "write", name="--hub local").encode())
    with tempfile.TemporaryDirectory(prefix="rlhf-zoo-hub-") as scratch:
        ready_file = Path(scratch) / "ready.json"
        log_file = Path(scratch) / "log"
        options = ["--root", str(root), "--ready-file", str(ready_file), "--parent", str(os.getpid())]
        with log_file.open("wb") as log_stream:
            process = subprocess.Popen(
                # -P keeps the working directory out of sys.path: it may be a downloaded folder with modules in it.
                [sys.executable, "-P", "-m", "rlhf_zoo.hub.server", *options],
                stdin=subprocess.DEVNULL,
                stdout=log_stream,
                stderr=log_stream,
                # Ctrl-C signals the whole process group. The Hub must keep running, to receive the last checkpoint.
                start_new_session=True,
            )
        try:
            # The server picks a free port and writes its address into `ready_file` once it listens.
            deadline = time.monotonic() + START_TIMEOUT
            while not ready_file.is_file():
                if process.poll() is not None or time.monotonic() > deadline:
                    lines = log_file.read_text(errors="replace").strip().splitlines()
                    raise ZooError(f"The embedded Hub did not start: {lines[-1] if lines else 'it printed nothing'}")
                time.sleep(0.02)
            yield json.loads(ready_file.read_text())["url"], token_path.read_text()
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
