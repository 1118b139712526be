"""Sampling parameters of the page: the initial values and their controls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradio as gr

from ...errors import ZooError
from .subject import Subject

#: Name of the queue for every call that runs the models: page and API share its limit.
MODELS = "models"


@dataclass(frozen=True)
class Proposal:
    """Initial values of the controls: the sampling parameters of the training.

    Attributes:
        temperature: Sampling temperature.
        length: Number of new tokens.
        limit: Largest number of new tokens in one request.
    """

    temperature: float
    length: int
    limit: int

    @classmethod
    def of(cls, subject: Subject) -> Proposal:
        """Returns the sampling parameters of the training, within the limits of the page.

        Args:
            subject: The models and their runs.
        """
        context_length = subject.comparison.context_length
        limit = subject.comparison.limits.max_new_tokens
        if context_length is not None:  # leave room for each example prompt
            limit = max(min(limit, context_length - _longest(subject)), 1)
        temperature = min(max(subject.lineage.setting("temperature", 1.0), 0.05), 2.0)
        length = min(max(int(subject.lineage.setting("response_length", 32)), 1), limit)
        return cls(temperature, length, limit)


def _longest(subject: Subject) -> int:
    """Returns the number of tokens of the longest example prompt that the models can process."""
    lengths = [1]
    for prompt in subject.lineage.prompts:
        try:
            subject.comparison.check(prompt, max_new_tokens=1)
        except ZooError:
            continue
        lengths.append(subject.comparison.count_tokens(prompt))
    return max(lengths)


def keywords(seed: object, temperature: object, top_p: object, tokens: object, n: object = 1) -> dict[str, Any]:
    """Returns the values of the controls as keyword arguments of `Comparison.stream`.

    Args:
        seed: Seed of the random stream.
        temperature: Divides the logits.
        top_p: Share of the probability to sample from.
        tokens: Number of new tokens.
        n: Number of completions of each policy.
    """
    return {"seed": seed, "temperature": temperature, "top_p": top_p, "max_new_tokens": tokens, "n": n}


def prompt_box(elem_id: str, placeholder: str, *, min_width: int = 320, **options: Any) -> gr.Textbox:
    """Creates the text box for the prompt.

    Args:
        elem_id: Id of the element.
        placeholder: Text shown while it is empty.
        min_width: Width in pixels.
        **options: Keyword arguments of `gr.Textbox`.
    """
    return gr.Textbox(
        label="Prompt", placeholder=placeholder, lines=1, max_lines=6, scale=5, min_width=min_width, elem_id=elem_id,
        **options,
    )  # fmt: skip


def controls(proposal: Proposal, *, prefix: str = "", most: int | None = None) -> list[Any]:
    """Creates the row of controls.

    Args:
        proposal: Initial values.
        prefix: Prefix of their element ids.
        most: Largest number of completions; None for a single one without a control.

    Returns:
        The controls, seed first, in the order of the arguments of `keywords`.
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
