"""The page's sampling parameters: their initial values and their controls."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import gradio as gr

from ...errors import ZooError
from .models import PageModels

#: Name of the queue of all calls that run the models. The page and the API use it, so they share one limit.
MODEL_QUEUE = "models"
#: Random seeds that the page draws are below this number.
SEED_LIMIT = 2**31
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 2.0  # bounds of the sliders; the API has wider bounds

#: Number of new tokens if the card does not name one. A chat model's answer needs more to end by itself.
CHAT_LENGTH, TEXT_LENGTH = 128, 32


@dataclass(frozen=True)
class SamplingDefaults:
    """Initial values of the controls, which are the sampling parameters of training, and a bound.

    Attributes:
        temperature: Sampling temperature.
        length: Initial limit on the number of new tokens in a completion.
        max_length: The highest limit that the page's control offers.
    """

    temperature: float
    length: int
    max_length: int

    @classmethod
    def of(cls, page_models: PageModels) -> SamplingDefaults:
        """Returns the sampling parameters of training, limited to what the page allows.

        Args:
            page_models: The models and their runs.
        """
        context_length = page_models.comparison.context_length
        max_length = page_models.comparison.limits.max_new_tokens
        if context_length is not None:  # leave room for the longest example prompt
            max_length = max(min(max_length, context_length - _longest_prompt_length(page_models)), 1)
        temperature = min(max(page_models.lineage.setting("temperature", 1.0), MIN_TEMPERATURE), MAX_TEMPERATURE)
        default = CHAT_LENGTH if page_models.comparison.is_chat else TEXT_LENGTH
        length = min(max(int(page_models.lineage.setting("response_length", default)), 1), max_length)
        return cls(temperature, length, max_length)


def _longest_prompt_length(page_models: PageModels) -> int:
    """Returns the token count of the longest example prompt that fits the context; 1 if no prompt fits."""
    lengths = [1]
    for prompt in page_models.lineage.prompts:
        with contextlib.suppress(ZooError):
            page_models.comparison.check(prompt, max_new_tokens=1)
            lengths.append(page_models.comparison.count_tokens(prompt))
    return max(lengths)


def sampling_arguments(seed: Any, temperature: Any, top_p: Any, max_new_tokens: Any, n: Any = 1) -> dict[str, Any]:
    """Returns the values of the controls as keyword arguments of `Comparison.stream`.

    Args:
        seed: Seed of the random stream.
        temperature: Divides the logits.
        top_p: Total probability of the tokens to sample from.
        max_new_tokens: Largest number of tokens in a completion.
        n: Number of completions of each policy.
    """
    return {"seed": seed, "temperature": temperature, "top_p": top_p, "max_new_tokens": max_new_tokens, "n": n}


def create_prompt_box(elem_id: str, placeholder: str, *, min_width: int = 320, **options: Any) -> gr.Textbox:
    """Creates the text box for the prompt.

    Args:
        elem_id: Id of the element.
        placeholder: Text shown while it is empty.
        min_width: Smallest width in pixels.
        **options: Other keyword arguments of `gr.Textbox`.
    """
    return gr.Textbox(
        label="Prompt", placeholder=placeholder, lines=1, max_lines=6, scale=5, min_width=min_width, elem_id=elem_id,
        **options,
    )  # fmt: skip


def create_controls(
    defaults: SamplingDefaults, *, prefix: str = "", max_completions: int | None = None
) -> list[gr.Slider | gr.Number]:
    """Creates the row of controls for the sampling parameters.

    Args:
        defaults: Initial values.
        prefix: Prefix of their element ids.
        max_completions: Largest number of completions; None for no control of their number.

    Returns:
        The controls, in the order of the arguments of `sampling_arguments`.
    """
    with gr.Row(elem_classes="zoo-controls"):
        temperature = gr.Slider(
            MIN_TEMPERATURE, MAX_TEMPERATURE, value=defaults.temperature, step=0.05, label="Temperature",
            min_width=170, elem_id=f"{prefix}temperature",
        )  # fmt: skip
        top_p = gr.Slider(0.05, 1.0, value=1.0, step=0.05, label="Top\u2011p", min_width=170, elem_id=f"{prefix}top-p")
        max_new_tokens = gr.Slider(
            1, defaults.max_length, value=defaults.length, step=1, label="New tokens", min_width=170,
            elem_id=f"{prefix}tokens",
        )  # fmt: skip
        count_sliders = []
        if max_completions is not None:
            count_sliders.append(
                gr.Slider(1, max_completions, value=1, step=1, label="Completions", min_width=170, elem_id=f"{prefix}n")
            )
        seed = gr.Number(1, label="Seed", precision=0, min_width=120, elem_id=f"{prefix}seed")
    return [seed, temperature, top_p, max_new_tokens, *count_sliders]
