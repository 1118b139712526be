"""Runs the server in this process: announces its address, stops it with its parent, and removes its records."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ZooError
from .durable import make_private, read_json, write_json

if TYPE_CHECKING:
    from .application import Application

log = logging.getLogger(__name__)

#: The file in the root that holds {"url", "pid"} while `hub serve` runs there.
RECORD_FILE = "server.json"
#: Environment variables that keep client libraries from sending telemetry and from checking for updates.
NO_TELEMETRY = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    "GRADIO_ANALYTICS_ENABLED": "0",
}
_PARENT_CHECK_SECONDS = 0.5
_GRACE_SECONDS = 20.0
_SWEEP_SECONDS = 6 * 3600.0


def serve(
    root: str | os.PathLike[str],
    host: str = "127.0.0.1",
    port: int = 0,
    ready_file: str | os.PathLike[str] | None = None,
    *,
    parent_pid: int | None = None,
    is_second: bool = False,
    on_ready: Callable[[str], None] | None = None,
) -> str:
    """Serves until SIGTERM or SIGINT. Call it from the main thread, which receives the signals.

    Args:
        root: The Hub's folder, created if it does not exist.
        host: Address to listen on.
        port: Port to listen on; 0 for any free one.
        ready_file: Receives {"url", "pid"} as JSON once the server listens.
        parent_pid: The process that the server belongs to. The server stops when that process ends, ignores SIGINT, and
            does not record itself in the root. None for a server that runs on its own.
        is_second: Whether another server of the same root is recorded. If so, this server does not record itself.
        on_ready: Called with the address once the server listens.

    Returns:
        The address at which the server was listening.

    Raises:
        ZooError: The root cannot be written, or the server cannot listen at the address.
    """
    from .application import Application
    from .handler import HubServer

    if not 0 <= port <= 65535:
        raise ZooError(f"Port {port} does not exist: choose one from 1 to 65535, or 0 for any free one.")
    is_alive = _make_parent_check(parent_pid)
    folder = Path(root).expanduser().absolute()
    try:
        make_private(folder)
        os.umask(0o077)
        application = Application(folder)
    except OSError as error:
        raise ZooError(f"The Hub cannot write under {folder} ({error.strerror}): choose another --root.") from error
    try:
        server = HubServer(host, port, application)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ZooError(f"Cannot listen on {host}:{port} ({reason}): choose another --port or --host.") from error

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    # Ctrl-C reaches the terminal's whole process group, but the parent still has to save a checkpoint here.
    signal.signal(signal.SIGINT, signal.SIG_IGN if parent_pid else lambda *_: stop.set())
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
    threading.Thread(target=_sweep_regularly, args=(application, stop), daemon=True).start()
    record = {"url": server.url, "pid": os.getpid()}
    record_files: list[tuple[Path, int, str]] = []  # each with its mode, and the option that chooses it
    if parent_pid is None and not is_second:
        record_files.append((folder / RECORD_FILE, 0o600, "--root"))
    if ready_file is not None:
        record_files.append((Path(ready_file).absolute(), 0o644, "--ready-file"))
    try:
        for path, mode, option in record_files:
            try:
                write_json(path, record, mode=mode)
            except OSError as error:
                raise ZooError(f"Cannot write {path} ({error.strerror}): choose another {option}.") from error
        if on_ready is not None:
            on_ready(server.url)
        while not stop.wait(_PARENT_CHECK_SECONDS if parent_pid else None) and is_alive():
            pass
    finally:
        server.shutdown()
        server.server_close()
        # Let requests in progress finish, so that no commit is lost.
        server.wait_idle(_GRACE_SECONDS)
        for path, *_ in record_files:
            # Remove only this process's records: another server may have written a record meanwhile.
            with suppress(ValueError, OSError):
                if read_json(path) == record:
                    path.unlink(missing_ok=True)
    return server.url


def running_server(folder: Path) -> dict[str, Any] | None:
    """Returns the record of a folder's server if that server answers. A killed server leaves its record behind.

    Args:
        folder: The Hub's folder.

    Returns:
        {"url", "pid"}; None if no server is recorded, or the recorded server does not answer.

    Raises:
        ZooError: The record is damaged.
    """
    from http.client import HTTPConnection, HTTPException
    from urllib.parse import urlsplit

    from .account_api import STATUS_PATH

    try:
        record = read_json(folder / RECORD_FILE)
        if record is None:
            return None
        pid, address = record["pid"], urlsplit(record["url"])
        connection = HTTPConnection(address.hostname or "", address.port, timeout=5)
    except (ValueError, TypeError, LookupError, AttributeError, OSError) as error:
        reason = error or type(error).__name__
        message = f"{folder / RECORD_FILE}, which records where the Hub runs, is damaged ({reason}): "
        raise ZooError(f"{message}stop that Hub if it runs, and remove the file.") from error
    try:
        connection.request("GET", STATUS_PATH)
        answer = json.loads(connection.getresponse().read())
    except (OSError, HTTPException, ValueError):
        return None
    finally:
        connection.close()
    # Another process may have taken the port of a server that was killed.
    return dict(record) if isinstance(answer, dict) and answer.get("pid") == pid else None


def _sweep_regularly(application: Application, stop: threading.Event) -> None:
    while not stop.wait(_SWEEP_SECONDS):
        try:
            application.sweep()
        except OSError:
            log.exception("The regular sweep failed.")


def _make_parent_check(pid: int | None) -> Callable[[], bool]:
    """Returns a function that tells whether a process is alive. For `pid` None, the function always returns True."""
    # If the parent ends, this process gets another parent. Test for that if possible, because ids are reused.
    if pid is None or pid == os.getppid():
        return lambda: pid in (None, os.getppid())

    def exists() -> bool:
        with suppress(PermissionError):  # the process belongs to another user, so it exists
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return False
        return True

    return exists


# Log nothing unless the program that uses this package configures logging.
logging.getLogger("rlhf_zoo.hub.server").addHandler(logging.NullHandler())
