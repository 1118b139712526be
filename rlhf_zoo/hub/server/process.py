"""The server as a process: it says where it listens, ends with its parent, and leaves no trace of itself."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ZooError
from .durable import make_private, read_json, write_json

if TYPE_CHECKING:
    from .application import Application

log = logging.getLogger(__name__)

#: In the root, while `hub serve` runs there: {"url", "pid"}.
RECORD = "server.json"
_PARENT_SECONDS = 0.5
_GRACE_SECONDS = 20.0
_SWEEP_SECONDS = 6 * 3600.0


def default_root() -> Path:
    return Path(os.environ.get("RLHF_ZOO_HOME") or "~/.cache/rlhf-zoo").expanduser() / "hub"


def serve(
    root: str | os.PathLike[str],
    host: str = "127.0.0.1",
    port: int = 0,
    ready_file: str | os.PathLike[str] | None = None,
    *,
    parent: int | None = None,
    beside: bool = False,
    on_ready: Callable[[str], None] | None = None,
) -> str:
    """Serve until SIGTERM or SIGINT; returns the address it had.

    ready_file receives {"url", "pid"} once the server listens. With `parent`, a process id, the server ends when that
    process does, ignores SIGINT (Ctrl-C reaches the whole terminal group, and the parent still has to save), and does
    not record itself in the root, as it does not `beside` another server over the same root. on_ready: called with
    the address. ZooError where the root cannot be written or the address is not free. Call it from the main thread.
    """
    from .application import Application
    from .handler import HubServer

    if not 0 <= port <= 65535:
        raise ZooError(f"Port {port} does not exist: choose one from 1 to 65535, or 0 for any free one.")
    is_alive = _watch(parent)
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
    signal.signal(signal.SIGINT, signal.SIG_IGN if parent else lambda *_: stop.set())
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
    threading.Thread(target=_sweep_regularly, args=(application, stop), daemon=True).start()
    note = {"url": server.url, "pid": os.getpid()}
    try:
        _announce(folder / RECORD if parent is None and not beside else None, ready_file, note)
        if on_ready is not None:
            on_ready(server.url)
        while not stop.wait(_PARENT_SECONDS if parent else None) and is_alive():
            pass
    finally:
        server.shutdown()
        server.server_close()
        # Requests under way may finish: a commit is worth a moment.
        server.wait_idle(_GRACE_SECONDS)
        for path in ([folder / RECORD] if parent is None else []) + ([Path(ready_file)] if ready_file else []):
            with suppress(ValueError, OSError):  # somebody else's: no JSON, no file, or not ours
                if read_json(path) == note:
                    path.unlink(missing_ok=True)
    return server.url


def _sweep_regularly(application: Application, stop: threading.Event) -> None:
    while not stop.wait(_SWEEP_SECONDS):
        try:
            application.sweep()
        except OSError:
            log.exception("The regular sweep failed.")


def _announce(record: Path | None, ready_file: str | os.PathLike[str] | None, note: dict[str, object]) -> None:
    try:
        if record is not None:
            write_json(record, note)
        if ready_file is not None:
            write_json(Path(ready_file).absolute(), note, mode=0o644)
    except OSError as error:
        raise ZooError(f"Cannot write {error.filename} ({error.strerror}): choose another --ready-file.") from error


def _watch(pid: int | None) -> Callable[[], bool]:
    """Tells whether the process still lives; always true without one."""
    if pid is None or pid == os.getppid():
        return lambda: pid in (None, os.getppid())

    def exists() -> bool:
        with suppress(PermissionError):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return False
        return True

    return exists


logging.getLogger("rlhf_zoo.hub.server").addHandler(logging.NullHandler())
