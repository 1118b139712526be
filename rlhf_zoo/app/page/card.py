"""The tab with a checkpoint's published card."""

import reprlib
from functools import lru_cache
from pathlib import Path

import gradio as gr

from ...errors import ZooError
from ...hub.client.card_files import fetch_card_files
from .card_view import card_html
from .html import notice_html, shorten_name
from .models import PageModels

#: Largest number of cards that are fetched and rendered at the same time.
MAX_CONCURRENT = 4
#: Largest number of rendered cards in the cache.
MAX_CACHED_CARDS = 16


def build_card_tab(page_models: PageModels) -> None:
    """Builds the contents of the tab.

    Args:
        page_models: The models and their runs.
    """
    sources = _card_sources(page_models)
    render = lru_cache(MAX_CACHED_CARDS)(_render_card)  # a hostile card may take seconds to render

    def show_card(label: object) -> str:
        source = sources.get(str(label))
        if source is None:
            return notice_html(f"There is no checkpoint {reprlib.repr(label)}: choose one from the list.")
        try:
            return render(source)
        except ZooError as error:
            return notice_html(error)

    first_label = next(iter(sources))
    checkpoint_dropdown = gr.Dropdown(
        list(sources), value=first_label, label="Checkpoint", elem_id="card-of", visible=len(sources) > 1
    )
    card_view = gr.HTML(render(sources[first_label]), elem_id="card")
    checkpoint_dropdown.input(
        show_card,
        [checkpoint_dropdown],
        [card_view],
        api_visibility="private",
        concurrency_limit=MAX_CONCURRENT,
        trigger_mode="always_last",
        preprocess=False,  # Gradio would reject bad values without a message on the page
    )


def _render_card(source: str) -> str:
    return card_html(Path(source) if Path(source).is_dir() else fetch_card_files(source))


def _card_sources(page_models: PageModels) -> dict[str, str]:
    """Returns {label of a checkpoint: source of its card}. The compared checkpoint comes first."""
    sources = {f"{shorten_name(page_models.lineage.ppo.name)} (compared)": str(page_models.lineage.ppo.path)}
    for run in page_models.timeline.runs.values() if page_models.timeline else ():
        for point in run.points:
            marks = f" ({', '.join(point.marks)})" if point.marks else ""
            sources[f"{run.name}@{point.tag}{marks}"] = point.source
    return sources
