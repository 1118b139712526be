"""Serves the page on this machine or as a Space, without requests to other hosts."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import gradio as gr
from starlette.middleware import Middleware

from ...evaluation.votes.data import HubVotes
from ...evaluation.votes.limits import VOTES_PER_HOUR
from ...publishing.catalog.card import Card
from .head import link_preview
from .layout import build
from .models import PageModels
from .routes import LinkPreview, ServedRoutes
from .vote_counts import Tally

STYLES = [Path(__file__).with_name(name) for name in ("style.css", "blind.css")]
MAX_SESSIONS = 500  # sessions whose state Gradio keeps; the default of 10,000 takes too much memory
MAX_THREADS = 64  # streams could take all 40 threads of Gradio's default, and block its own routes


def start(
    page: gr.Blocks,
    *,
    preview: tuple[str, str] = (Card().comparison_title, ""),
    host: str | None = None,
    port: int | None = None,
    block: bool = False,
) -> str:
    """Serves the page. Neither server nor page sends requests to other hosts, such as for fonts, analytics or a tunnel.

    Args:
        page: The page, as `build` returns it.
        preview: (title, description), which programs show beside a link to the page.
        host: The address to listen on; None to read it from Gradio's environment variables, as in a Space.
        port: The port; None to read it from Gradio's environment variables.
        block: Whether to wait until the server stops.

    Returns:
        The page's address.

    Raises:
        OSError: The port is taken.
    """
    title, description = preview
    link_preview_middleware = Middleware(LinkPreview, title=title, description=description)
    _, url, _ = page.launch(
        server_name=host,
        server_port=port,
        prevent_thread_lock=not block,
        share=False,
        ssr_mode=False,
        pwa=False,
        quiet=True,
        show_error=False,
        run_history=False,
        enable_monitoring=False,
        app_kwargs={"middleware": [Middleware(ServedRoutes), link_preview_middleware]},
        max_threads=MAX_THREADS,
        state_session_capacity=MAX_SESSIONS,
        footer_links=["api"],
        theme=gr.themes.Default(
            primary_hue="orange",
            neutral_hue="slate",
            font=["system-ui", "-apple-system", "Segoe UI", "DejaVu Sans", "sans-serif"],
            font_mono=["ui-monospace", "DejaVu Sans Mono", "monospace"],
        ).set(  # Gradio's own colors have a contrast below 4.5
            button_primary_background_fill="*primary_700",
            button_primary_background_fill_dark="*primary_700",
            button_primary_background_fill_hover="*primary_800",
            button_primary_background_fill_hover_dark="*primary_800",
            body_text_color_subdued="*neutral_600",
        ),
        css_paths=STYLES,
    )
    return url


@contextlib.contextmanager
def serve_page(
    page_models: PageModels,
    *,
    votes: str | None = None,
    votes_per_hour: int = VOTES_PER_HOUR,
    private: bool = False,
    gpu: Callable[[object], object] | None = None,
    host: str | None = None,
    port: int | None = None,
    block: bool = False,
) -> Iterator[str]:
    """Serves the page until the context exits.

    SIGTERM, which stops a Space, also exits the context, so that every vote is sent or stays on disk.

    Args:
        page_models: The models and their runs.
        votes: The data set on the Hub that receives the votes of the blind test; None if votes are not stored.
        votes_per_hour: Largest number of votes per hour from one address.
        private: Whether a new data set for the votes is private.
        gpu: ZeroGPU's decorator; None if the page does not run on ZeroGPU.
        host: See `start`.
        port: See `start`.
        block: See `start`.

    Yields:
        The page's address.
    """
    with _exit_on_sigterm(), contextlib.ExitStack() as stack:
        tally = stack.enter_context(Tally(HubVotes(votes, private=private), per_hour=votes_per_hour)) if votes else None
        page = build(page_models, tally=tally, gpu=gpu)
        _import_matplotlib()
        try:
            yield start(page, preview=link_preview(page_models.lineage), host=host, port=port, block=block)
        finally:
            page.close(verbose=False)


def _import_matplotlib() -> None:
    """Imports matplotlib. Gradio would otherwise import it for the first visitor, who would have to wait."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Turns SIGTERM into SystemExit, so that open contexts exit in order."""

    def raise_exit(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    previous_handler = signal.signal(signal.SIGTERM, raise_exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
