"""The page over loaded models: its head and its tabs."""

import os
from collections.abc import Callable
from html import escape
from typing import Any

import gradio as gr

from .api import endpoints
from .blind import blind_tab
from .card import card_tab
from .compare import compare_tab
from .drawing import Drawing
from .html import notice, short_name
from .sampling import Proposal
from .subject import Subject
from .training import training_tab
from .vote_counts import Tally
from .vote_figures import Model

WAITING = 40  # requests in the queue; the next one is told that it is full
AT_ONCE = 24  # requests that run the models at the same time: they take turns, token by token


def build(subject: Subject, *, tally: Tally | None = None, gpu: Callable[[Any], Any] | None = None) -> gr.Blocks:
    """Builds the page; `start` serves it.

    Args:
        subject: The models, and their runs.
        tally: Where the votes of the blind test go; None keeps none.
        gpu: ZeroGPU's decorator; None where there is none.
    """
    lineage, comparison = subject.lineage, subject.comparison
    proposal = Proposal.of(subject)
    drawing = Drawing(comparison, subject.timeline, gpu=gpu)
    at_once = AT_ONCE if gpu is None else 1  # each call of ZeroGPU is a process of its own, which has no turns to take
    with gr.Blocks(title="SFT and PPO, side by side", analytics_enabled=False) as page:
        gr.HTML(_header(subject))
        if subject.problem is not None and subject.timeline is not None:
            gr.HTML(notice(subject.problem, kind="status"))
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Compare", id="compare", elem_id="tab-compare"):
                compare_tab(subject, drawing, proposal=proposal, at_once=at_once)
            with gr.Tab("Over training", id="training", elem_id="tab-training"):
                training_tab(subject, drawing, proposal=proposal, at_once=at_once)
            with gr.Tab("Blind test", id="blind", elem_id="tab-blind"):
                blind_tab(
                    drawing,
                    {"ppo": Model(*lineage.ppo.published_at), "sft": Model(*lineage.sft.published_at)},
                    tally,
                    prompts=subject.prompts,
                    proposal=proposal,
                    at_once=at_once,
                )
            with gr.Tab("Card", id="card", elem_id="tab-card"):
                card_tab(subject)
        endpoints(subject, drawing, proposal=proposal, at_once=at_once)
    # After each event Gradio's statistics go over all that it remembers, ten thousand unless told otherwise.
    os.environ.setdefault("GRADIO_ANALYTICS_MAX_EVENTS", "100")
    return page.queue(max_size=WAITING, default_concurrency_limit=at_once, api_open=False)


def _header(subject: Subject) -> str:
    lineage = subject.lineage
    models = [("PPO", lineage.ppo.name), ("SFT", lineage.sft.name)]
    models += [("reward model", model.name) for model in lineage.rewards]
    named = '<span class="sep">·</span>'.join(
        f'<span class="model">{role} <b>{escape(short_name(name))}</b></span>' for role, name in models
    )
    world = ""
    if lineage.simulated:
        world = (
            "<p>A simulated world: a program wrote the texts that these models learned from, and no person rated "
            "anything.</p>"
        )
    return f'<div class="zoo"><h1>SFT and PPO, side by side</h1><p>{named}</p>{world}</div>'
