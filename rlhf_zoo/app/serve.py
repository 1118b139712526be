"""Serves the comparison Space's app.py on this machine, for `rlhf-zoo compare`, and renders the static page."""

from __future__ import annotations

import errno
import importlib.util
import os
import socket
import sys
import threading
import webbrowser
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import click

from ..errors import ZooError
from ..evaluation.votes.limits import VOTES_PER_HOUR
from ..hub.client.connect import DEFAULT_HUB, Hub
from ..runs.status_line import show_activity

if TYPE_CHECKING:
    from .engine import Snapshot
    from .space.files import SpaceModels

#: Largest number of prompts that a static page samples.
MAX_STATIC_PROMPTS = 8


def launch(
    ppo: str,
    *,
    sft: str | None,
    reward: str | None,
    host: str,
    port: int,
    votes: str | None = None,
    votes_per_hour: int = VOTES_PER_HOUR,
    runs: Sequence[str] | None = None,
    open_browser: bool = False,
    hub: Hub = DEFAULT_HUB,
) -> None:
    """Serves the page of a PPO checkpoint until Ctrl-C. Prints the page's address once the server listens.

    Args:
        ppo: The PPO checkpoint: NAMESPACE/NAME[@TAG] or a folder.
        sft: The SFT model, in the same form; None to use the one in the checkpoint's lineage.
        reward: The reward model, in the same form; None to use the one in the checkpoint's lineage.
        host: The address to listen on.
        port: The port; 0 for any free one.
        votes: The data set that receives the votes of the blind test; None if votes are not stored.
        votes_per_hour: Largest number of votes per hour from one address.
        runs: The other PPO runs of the ablation; None to look them up on the Hub.
        open_browser: Whether to open a browser, if this machine has a screen.
        hub: The Hub to fetch from.

    Raises:
        ZooError: gradio is missing, the port is taken, or a model cannot be fetched.
    """
    if importlib.util.find_spec("gradio") is None:
        raise ZooError("The comparison page needs gradio: run `pip install 'rlhf-zoo[space]'`.")
    port = _find_free_port(host, port)
    click.echo(f"Loading {ppo} and the models of its lineage. The first time takes a while.", err=True)
    with show_activity("loading the page"):
        from ..pipeline.stages.train import silence_libraries

        silence_libraries()
        from .page import PageModels
    with show_activity("loading the models"):
        page_models = PageModels.load(ppo, sft=sft, reward=reward, runs=runs, hub=hub)
    try:
        with _import_space_app().serve_page(
            page_models,
            votes=votes,
            votes_per_hour=votes_per_hour,
            private=votes is not None and _is_private(ppo, hub),
            host=f"[{host}]" if ":" in host else host,  # Gradio puts it into the page's address
            port=port,
        ) as url:
            click.echo(f"Comparison page: {url} (stop it with Ctrl-C)")
            if open_browser and _has_screen():
                webbrowser.open(url)
            threading.Event().wait()
    except OSError as error:
        if error.errno not in (None, errno.EADDRINUSE):  # Gradio's own error for a taken port has no errno
            raise
        raise ZooError(
            f"Another process took port {port} of {host} while the models loaded: choose another with --port."
        ) from error


def _has_screen() -> bool:
    """Whether a graphical browser can open. A text browser would take over the terminal."""
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def _is_private(name: str, hub: Hub) -> bool:
    """Whether a published model is private; False for a folder."""
    from ..hub.client.refusals import translate_hub_errors

    if Path(name).is_dir():
        return False
    with translate_hub_errors(f"Cannot look up {name} on {hub.name}", "check --hub and the token."):
        return bool(hub.api().model_info(name.partition("@")[0]).private)


def render_static_page(models: SpaceModels, hub: Hub = DEFAULT_HUB) -> str:
    """Renders a static page with a completion of each policy for the first held-out prompts of the PPO model's card.

    Samples at most `MAX_STATIC_PROMPTS` prompts with seed 1, at the temperature and length of training. Skips prompts
    that the models cannot process.

    Args:
        models: The published models.
        hub: The Hub to fetch from.

    Raises:
        ZooError: A model cannot be fetched.
    """
    from ..pipeline.stages.train import silence_libraries
    from ..publishing.catalog.lineage import find_lineage
    from .engine import Comparison
    from .page.static import static_page_html

    reward = models.reward.name if models.reward else None
    lineage = find_lineage(models.ppo.name, sft=models.sft.name, reward=reward, hub=hub)
    silence_libraries()
    comparison = Comparison.load(
        ppo=lineage.ppo.path,
        sft=lineage.sft.path,
        # A reward model with its own loader is left out, because downloaded code never runs.
        reward=[model.path for model in lineage.rewards] if lineage.reward_loader is None else (),
        reward_kwargs=lineage.reward_load_kwargs,
    )
    temperature, length = lineage.setting("temperature", 1.0), int(lineage.setting("response_length", 32))
    snapshots: list[Snapshot] = []
    for prompt in lineage.prompts[:MAX_STATIC_PROMPTS]:
        try:
            stream = comparison.stream(prompt, temperature=temperature, max_new_tokens=length)
            snapshots += deque(stream, maxlen=1)  # only the last snapshot, which has the finished completions
        except ZooError as error:
            click.echo(f"Skipped a held-out prompt: {error}", err=True)
    return static_page_html(models, snapshots)


def _import_space_app() -> ModuleType:
    """Imports the Space's app.py, so that this machine and a Space serve the page with the same code."""
    from .space.files import find_space_folder

    path = find_space_folder() / "app.py"
    spec = importlib.util.spec_from_file_location("rlhf_zoo_compare_app", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _find_free_port(host: str, port: int) -> int:
    """Returns `port` if it is free on `host`; for 0, any free port."""
    if not 0 <= port <= 65535:
        raise ZooError(f"There is no port {port}: set --port to a number from 1 to 65535, or to 0 for any free port.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family) as server:
            return int(server.getsockname()[1])
    except PermissionError as error:
        raise ZooError(f"This user may not use port {port}: choose one above 1023 with --port.") from error
    except socket.gaierror as error:
        raise ZooError(f"There is no host {host!r}: pass an address of this machine as --host.") from error
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ZooError(f"{host} is not an address of this machine: choose another with --host.") from error
        raise ZooError(
            f"Port {port} of {host} is taken: choose another with --port, or --port 0 for a free one."
        ) from error
