"""Builds the page: its head and its tabs."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

from .api import add_endpoints
from .blind import build_blind_tab
from .browser import FOLLOW_LINK_SCRIPT, PAGE_EVENT, QUERY_SCRIPT
from .card import build_card_tab
from .compare import ComparisonControls, build_compare_tab, sample_example
from .head import header_html, link_preview
from .html import notice_html
from .kl_switch import OFF, ON
from .link import Link
from .models import PageModels
from .sampling import SamplingDefaults
from .streams import CompletionStreams
from .training import TrainingControls, build_training_tab, curves_html, nearest_step, slider_range
from .vote_counts import Tally
from .vote_figures import ModelRevision

MAX_QUEUED = 40  # requests that may wait; further requests are refused
MAX_CONCURRENT = 24  # requests that run the models at the same time; they take turns token by token


def build(
    page_models: PageModels, *, tally: Tally | None = None, gpu: Callable[[object], object] | None = None
) -> gr.Blocks:
    """Builds the page; `start` serves it.

    Args:
        page_models: The models and their runs.
        tally: Receives the votes of the blind test; None if votes are not stored.
        gpu: ZeroGPU's decorator; None if the page does not run on ZeroGPU.
    """
    lineage, comparison = page_models.lineage, page_models.comparison
    defaults = SamplingDefaults.of(page_models)
    streams = CompletionStreams(comparison, page_models.timeline, gpu=gpu)
    # ZeroGPU runs each call in a process of its own, where requests cannot take turns.
    max_concurrent = MAX_CONCURRENT if gpu is None else 1
    title, _ = link_preview(lineage)
    with gr.Blocks(title=title, analytics_enabled=False) as page:
        gr.HTML(header_html(lineage), elem_id="head")
        # Without a timeline, the training tab shows the problem.
        if page_models.problem is not None and page_models.timeline is not None:
            gr.HTML(notice_html(page_models.problem, kind="status"))
        with gr.Tabs(elem_id="tabs") as tabs:
            with gr.Tab("Side by side", id="compare", elem_id="tab-compare"):
                compare_controls = build_compare_tab(
                    page_models,
                    streams,
                    defaults=defaults,
                    max_concurrent=max_concurrent,
                    example=sample_example(page_models, defaults),
                )
            with gr.Tab("Over training", id="training", elem_id="tab-training"):
                training_controls = build_training_tab(
                    page_models, streams, defaults=defaults, max_concurrent=max_concurrent
                )
            with gr.Tab("Blind test", id="blind", elem_id="tab-blind"):
                build_blind_tab(
                    streams,
                    {"ppo": ModelRevision(*lineage.ppo.hub_location), "sft": ModelRevision(*lineage.sft.hub_location)},
                    tally,
                    prompts=page_models.prompts,
                    defaults=defaults,
                    max_concurrent=max_concurrent,
                    initial_policy=page_models.comparison.initial_policy,
                )
            with gr.Tab("Card", id="card", elem_id="tab-card"):
                build_card_tab(page_models)
        _fill_from_link(page_models, tabs, compare_controls, training_controls)
        add_endpoints(page_models, streams, defaults=defaults, max_concurrent=max_concurrent)
    # After each event, Gradio recomputes statistics over all events that it keeps: 10,000 by default.
    os.environ.setdefault("GRADIO_ANALYTICS_MAX_EVENTS", "100")
    return page.queue(max_size=MAX_QUEUED, default_concurrency_limit=max_concurrent, api_open=False)


def _fill_from_link(
    page_models: PageModels,
    tabs: gr.Tabs,
    compare_controls: ComparisonControls,
    training_controls: TrainingControls | None,
) -> None:
    """Opens the `Link` in the page's address, if it has one: fills in the controls and samples the completions."""
    query = gr.Textbox("", visible=False, elem_id="link")
    outputs: list[Any] = [tabs, compare_controls.prompt_box, compare_controls.kl_slider, *compare_controls.sampling]
    if training_controls is not None:
        outputs += [
            training_controls.prompt_box,
            training_controls.run_dropdown,
            training_controls.step_slider,
            training_controls.curves_view,
            *training_controls.sampling,
        ]

    def fill(address: object) -> dict[Any, object]:
        link = Link.parse(address)
        if link is None:
            return {tabs: gr.skip()}
        if link.step is None or training_controls is None:
            return {
                compare_controls.prompt_box: link.prompt,
                compare_controls.kl_slider: gr.skip() if link.kl is None else (OFF if link.kl == "off" else ON),
                **_linked_values(compare_controls.sampling, link),
            }
        timeline = page_models.timeline
        assert timeline is not None  # there is a training tab
        run = timeline.runs.get(link.run or "", timeline.default_run)
        step = nearest_step(run, link.step)
        return {
            tabs: gr.Tabs(selected="training"),
            training_controls.prompt_box: link.prompt,
            training_controls.run_dropdown: run.name,
            training_controls.step_slider: gr.update(**slider_range(run), value=step),
            training_controls.curves_view: curves_html(run, step, page_models.comparison.initial_policy),
            **_linked_values(training_controls.sampling, link),
        }

    # Without triggers, `fill` runs when the page loads. It gets the result of QUERY_SCRIPT unchecked, so `Link.parse`
    # accepts any text.
    gr.on(None, fill, inputs=[query], outputs=outputs, js=QUERY_SCRIPT, queue=False, **PAGE_EVENT).then(
        None, js=FOLLOW_LINK_SCRIPT, **PAGE_EVENT
    )


def _linked_values(controls: Sequence[gr.Slider | gr.Number], link: Link) -> dict[Any, object]:
    """Returns {control: its value in the link}. `controls` are in the order of `names`, possibly without the last."""
    names = ("seed", "temperature", "top_p", "tokens", "n")
    return {
        control: link.sampling[name] for name, control in zip(names, controls, strict=False) if name in link.sampling
    }
