"""`rlhf-zoo compare`: the comparison Space's own app.py, served from this machine."""

from __future__ import annotations

import errno
import importlib.util
import socket
import threading
from pathlib import Path
from types import ModuleType

import click

from ..errors import ZooError

__all__ = ["launch"]


def launch(ppo: str, *, sft: str | None, reward: str | None, host: str, port: int) -> None:
    """Serves the page for a PPO checkpoint until Ctrl-C, and prints its address once it listens.

    sft and reward: None takes what the checkpoint's lineage names. port 0 takes a free one. Raises ZooError when gradio
    is missing, the port is taken, or a model cannot be had.
    """
    if importlib.util.find_spec("gradio") is None:
        raise ZooError("The comparison page needs gradio: `pip install 'rlhf-zoo[space]'` installs it.")
    port = _free_port(host, port)
    from ..hub.lineage import find_lineage

    lineage = find_lineage(ppo, sft=sft, reward=reward)
    from ..comparison import Comparison
    from .train import quiet

    quiet()
    app = _app()
    comparison = Comparison.load(
        ppo=lineage.ppo.path, sft=lineage.sft.path, reward=lineage.reward.path if lineage.reward else None
    )
    page = app.build(comparison, lineage)
    try:
        url = app.start(page, host=f"[{host}]" if ":" in host else host, port=port)
    except OSError as error:
        raise ZooError(f"Port {port} of {host} was taken meanwhile: choose another with --port.") from error
    click.echo(f"Comparison page: {url} (Ctrl-C ends it)")
    try:
        threading.Event().wait()
    finally:
        page.close(verbose=False)


def _app() -> ModuleType:
    """spaces/compare/app.py as a module: from the wheel, else from the repository beside the package."""
    package = Path(__file__).parent.parent
    folders = (package / "_spaces", package.parent / "spaces")
    path = next((found for folder in folders if (found := folder / "compare" / "app.py").is_file()), None)
    if path is None:
        raise ZooError("This installation lacks the comparison page (compare/app.py): install rlhf-zoo again.")
    spec = importlib.util.spec_from_file_location("rlhf_zoo_compare_app", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _free_port(host: str, port: int) -> int:
    """`port` if it is free on `host`, or a free one for 0; found out before any model is loaded."""
    if not 0 <= port <= 65535:
        raise ZooError(f"There is no port {port}: --port takes 0 to 65535, and 0 takes a free one.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family) as server:
            return int(server.getsockname()[1])
    except PermissionError as error:
        raise ZooError(f"Port {port} needs rights that this user lacks: choose one above 1023 with --port.") from error
    except socket.gaierror as error:
        raise ZooError(f"There is no host {host!r}: --host takes an address of this machine.") from error
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ZooError(f"{host} is no address of this machine: choose another with --host.") from error
        raise ZooError(
            f"Port {port} of {host} is taken: choose another with --port, or --port 0 for a free one."
        ) from error
