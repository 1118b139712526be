"""The page: its header and its tabs."""

import os
from collections.abc import Callable
from html import escape

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

MAX_QUEUED = 40  # waiting requests; further ones are refused
MAX_CONCURRENT = 24  # requests that run the models at the same time; they take turns token by token


def build(subject: Subject, *, tally: Tally | None = None, gpu: Callable[[object], object] | None = None) -> gr.Blocks:
    """Builds the page; `start` serves it.

    Args:
        subject: The models and their runs.
        tally: Receives the votes of the blind test; None stores none.
        gpu: ZeroGPU's decorator; None without it.
    """
    lineage, comparison = subject.lineage, subject.comparison
    proposal = Proposal.of(subject)
    drawing = Drawing(comparison, subject.timeline, gpu=gpu)
    # ZeroGPU runs each call in a process of its own, where requests cannot take turns.
    max_concurrent = MAX_CONCURRENT if gpu is None else 1
    with gr.Blocks(title="SFT and PPO, side by side", analytics_enabled=False) as page:
        gr.HTML(_header(subject))
        if subject.problem is not None and subject.timeline is not None:
            gr.HTML(notice(subject.problem, kind="status"))
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Compare", id="compare", elem_id="tab-compare"):
                compare_tab(subject, drawing, proposal=proposal, max_concurrent=max_concurrent)
            with gr.Tab("Over training", id="training", elem_id="tab-training"):
                training_tab(subject, drawing, proposal=proposal, max_concurrent=max_concurrent)
            with gr.Tab("Blind test", id="blind", elem_id="tab-blind"):
                blind_tab(
                    drawing,
                    {"ppo": Model(*lineage.ppo.published_at), "sft": Model(*lineage.sft.published_at)},
                    tally,
                    prompts=subject.prompts,
                    proposal=proposal,
                    max_concurrent=max_concurrent,
                )
            with gr.Tab("Card", id="card", elem_id="tab-card"):
                card_tab(subject)
        endpoints(subject, drawing, proposal=proposal, max_concurrent=max_concurrent)
    # After each event Gradio recomputes statistics over all events it keeps, 10,000 by default.
    os.environ.setdefault("GRADIO_ANALYTICS_MAX_EVENTS", "100")
    return page.queue(max_size=MAX_QUEUED, default_concurrency_limit=max_concurrent, api_open=False)


def _header(subject: Subject) -> str:
    lineage = subject.lineage
    models = [("PPO", lineage.ppo.name), ("SFT", lineage.sft.name)]
    models += [("reward model", model.name) for model in lineage.rewards]
    model_names = '<span class="sep">·</span>'.join(
        f'<span class="model">{role} <b>{escape(short_name(name))}</b></span>' for role, name in models
    )
    data_note = ""
    if lineage.simulated:
        data_note = (
            "<p>Simulated data: a program wrote the texts that these models were trained on, and no person rated "
            "anything.</p>"
        )
    return f'<div class="zoo"><h1>SFT and PPO, side by side</h1><p>{model_names}</p>{data_note}</div>'
