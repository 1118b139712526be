"""Builds the page: its head and its tabs."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

from .api import endpoints
from .blind import blind_tab
from .browser import FOLLOW_LINK, QUERY
from .card import card_tab
from .compare import ComparisonControls, answered_example, compare_tab
from .head import description, header
from .html import notice
from .kl_switch import OFF, ON
from .link import Link
from .models import PageModels
from .sampling import SamplingDefaults
from .streams import CompletionStreams
from .training import TrainingControls, curves, nearest_step, slider_range, training_tab
from .vote_counts import Tally
from .vote_figures import Model

MAX_QUEUED = 40  # waiting requests; further ones are refused
MAX_CONCURRENT = 24  # requests that run the models at the same time; they take turns token by token


def build(
    page_models: PageModels, *, tally: Tally | None = None, gpu: Callable[[object], object] | None = None
) -> gr.Blocks:
    """Builds the page; `start` serves it.

    Args:
        page_models: The models and their runs.
        tally: Receives the votes of the blind test; None if votes are not kept.
        gpu: ZeroGPU's decorator; None if the page does not run on ZeroGPU.
    """
    lineage, comparison = page_models.lineage, page_models.comparison
    defaults = SamplingDefaults.of(page_models)
    streams = CompletionStreams(comparison, page_models.timeline, gpu=gpu)
    # ZeroGPU runs each call in a process of its own, where requests cannot take turns.
    max_concurrent = MAX_CONCURRENT if gpu is None else 1
    title, _ = description(lineage)
    with gr.Blocks(title=title, analytics_enabled=False) as page:
        gr.HTML(header(lineage), elem_id="head")
        if page_models.problem is not None and page_models.timeline is not None:
            gr.HTML(notice(page_models.problem, kind="status"))
        with gr.Tabs(elem_id="tabs") as tabs:
            with gr.Tab("Side by side", id="compare", elem_id="tab-compare"):
                compared = compare_tab(
                    page_models,
                    streams,
                    defaults=defaults,
                    max_concurrent=max_concurrent,
                    example=answered_example(page_models, defaults),
                )
            with gr.Tab("Over training", id="training", elem_id="tab-training"):
                trained = training_tab(page_models, streams, defaults=defaults, max_concurrent=max_concurrent)
            with gr.Tab("Blind test", id="blind", elem_id="tab-blind"):
                blind_tab(
                    streams,
                    {"ppo": Model(*lineage.ppo.published_at), "sft": Model(*lineage.sft.published_at)},
                    tally,
                    prompts=page_models.prompts,
                    defaults=defaults,
                    max_concurrent=max_concurrent,
                )
            with gr.Tab("Card", id="card", elem_id="tab-card"):
                card_tab(page_models)
        _follow_links(page_models, tabs, compared, trained)
        endpoints(page_models, streams, defaults=defaults, max_concurrent=max_concurrent)
    # After each event, Gradio recomputes statistics over all events that it keeps: 10,000 by default.
    os.environ.setdefault("GRADIO_ANALYTICS_MAX_EVENTS", "100")
    return page.queue(max_size=MAX_QUEUED, default_concurrency_limit=max_concurrent, api_open=False)


def _follow_links(
    page_models: PageModels, tabs: gr.Tabs, compared: ComparisonControls, trained: TrainingControls | None
) -> None:
    """Fills the page's controls from the query of its address, if that is a link, and shows its completions."""
    query = gr.Textbox("", visible=False, elem_id="link")
    outputs: list[Any] = [tabs, compared.prompt, compared.kl, *compared.sampling]
    if trained is not None:
        outputs += [trained.prompt, trained.run, trained.step, trained.curves, *trained.sampling]

    def fill(address: object) -> dict[Any, object]:
        link = Link.parse(address)
        if link is None:
            return {tabs: gr.skip()}
        if link.step is None or trained is None:
            return {
                compared.prompt: link.prompt,
                compared.kl: gr.skip() if link.kl is None else (OFF if link.kl == "off" else ON),
                **_linked_values(compared.sampling, link),
            }
        timeline = page_models.timeline
        assert timeline is not None  # there is a training tab
        run = timeline.runs.get(link.run or "", timeline.run())
        step = nearest_step(run, link.step)
        return {
            tabs: gr.Tabs(selected="training"),
            trained.prompt: link.prompt,
            trained.run: run.name,
            trained.step: gr.update(**slider_range(run), value=step),
            trained.curves: curves(run, step),
            **_linked_values(trained.sampling, link),
        }

    # Gradio passes `fill` what the script QUERY returns, without a check; `Link.parse` accepts any text.
    gr.on(
        None,
        fill,
        inputs=[query],
        outputs=outputs,
        js=QUERY,
        api_visibility="private",
        queue=False,
        show_progress="hidden",
    ).then(None, js=FOLLOW_LINK, api_visibility="private", show_progress="hidden")


def _linked_values(controls: Sequence[gr.Slider | gr.Number], link: Link) -> dict[Any, object]:
    """Returns the values of a link for the controls of the sampling parameters, in the order of `controls`."""
    names = ("seed", "temperature", "top_p", "tokens", "n")
    return {
        control: link.sampling[name] for name, control in zip(names, controls, strict=False) if name in link.sampling
    }
