"""How completions are drawn: what the page proposes, and the controls for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradio as gr

from ...errors import ZooError
from .subject import Subject

#: The queue of everything that runs the models, whoever asks: page and API share its limit.
MODELS = "models"


@dataclass(frozen=True)
class Proposal:
    """The first values of the controls: the sampling of the training.

    Attributes:
        temperature: Of the sampling.
        length: New tokens.
        limit: New tokens that one request may have.
    """

    temperature: float
    length: int
    limit: int

    @classmethod
    def of(cls, subject: Subject) -> Proposal:
        context = subject.comparison.context
        limit = subject.comparison.limits.max_new_tokens
        if context is not None:  # with room for each of the examples
            limit = max(min(limit, context - _longest(subject)), 1)
        temperature = min(max(subject.lineage.setting("temperature", 1.0), 0.05), 2.0)
        length = min(max(int(subject.lineage.setting("response_length", 32)), 1), limit)
        return cls(temperature, length, limit)


def _longest(subject: Subject) -> int:
    """Tokens of the longest example that the models can take; others on a card are refused when they are asked for."""
    lengths = [1]
    for prompt in subject.lineage.prompts:
        try:
            subject.comparison.check(prompt, max_new_tokens=1)
        except ZooError:
            continue
        lengths.append(subject.comparison.tokens_of(prompt))
    return max(lengths)


def keywords(seed: Any, temperature: Any, top_p: Any, tokens: Any, n: Any = 1) -> dict[str, Any]:
    """Names the values of the controls as `Comparison.stream` does.

    Args:
        seed: Of the sampling, as for the arguments below.
        temperature: Divides the logits.
        top_p: Share of the probability to draw from.
        tokens: New tokens.
        n: Completions of each policy.
    """
    return {"seed": seed, "temperature": temperature, "top_p": top_p, "max_new_tokens": tokens, "n": n}


def prompt_box(elem_id: str, placeholder: str, *, min_width: int = 320, **options: Any) -> gr.Textbox:
    """Makes the box where a visitor writes the prompt.

    Args:
        elem_id: Its id in the page.
        placeholder: Shown while it is empty.
        min_width: In pixels.
        **options: Of `gr.Textbox`.
    """
    return gr.Textbox(
        label="Prompt", placeholder=placeholder, lines=1, max_lines=6, scale=5, min_width=min_width, elem_id=elem_id,
        **options,
    )  # fmt: skip


def controls(proposal: Proposal, *, prefix: str = "", most: int | None = None) -> list[Any]:
    """Makes a row of controls.

    Args:
        proposal: Their first values.
        prefix: Of their elem_ids.
        most: Completions that one may ask for; None for one alone.

    Returns:
        The controls, the seed's first, in the order in which `keywords` takes their values.
    """
    with gr.Row(elem_classes="zoo-controls"):
        temperature = gr.Slider(
            0.05, 2.0, value=proposal.temperature, step=0.05, label="Temperature", min_width=170,
            elem_id=f"{prefix}temperature",
        )  # fmt: skip
        top_p = gr.Slider(0.05, 1.0, value=1.0, step=0.05, label="Top\u2011p", min_width=170, elem_id=f"{prefix}top-p")
        tokens = gr.Slider(
            1, proposal.limit, value=proposal.length, step=1, label="New tokens", min_width=170,
            elem_id=f"{prefix}tokens",
        )  # fmt: skip
        many = []
        if most is not None:
            many = [gr.Slider(1, most, value=1, step=1, label="Completions", min_width=170, elem_id=f"{prefix}n")]
        seed = gr.Number(1, label="Seed", precision=0, min_width=120, elem_id=f"{prefix}seed")
    return [seed, temperature, top_p, tokens, *many]
