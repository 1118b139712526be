"""The comparison tab: one prompt sampled from both policies, side by side."""

import contextlib
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gradio as gr
from gradio.helpers import Examples

from ...errors import ZooError
from ..engine import Snapshot
from .browser import PAGE_EVENT, create_live_region, scroll_script
from .html import escape_text, notice_html
from .kl_switch import OFF, ON, KLSwitch
from .link import link_address
from .models import PageModels
from .sampling import MODEL_QUEUE, SEED_LIMIT, SamplingDefaults, create_controls, create_prompt_box, sampling_arguments
from .streams import CompletionStreams
from .views import ROLE_DESCRIPTIONS, empty_pairs_html, legend_html, pairs_html, role_names, summary_html

#: Quantity that colors the tokens, as labeled on the page -> its value in the style sheet.
COLOR_CHOICES = {"log-ratio": "ratio", "exact KL": "kl", "nothing": "none"}
#: Largest number of prompts to try for the example with which the page opens.
MAX_EXAMPLE_PROMPTS = 3


@dataclass(frozen=True)
class ComparisonControls:
    """The components that a link fills in. `sampling` is in the order of the arguments of `sampling_arguments`."""

    prompt_box: gr.Textbox
    kl_slider: gr.Slider
    sampling: tuple[gr.Slider | gr.Number, ...]


def build_compare_tab(
    page_models: PageModels,
    streams: CompletionStreams,
    *,
    defaults: SamplingDefaults,
    max_concurrent: int,
    example: Snapshot | None = None,
) -> ComparisonControls:
    """Builds the contents of the tab.

    Args:
        page_models: The models and their runs.
        streams: Samples the completions.
        defaults: Initial sampling parameters.
        max_concurrent: Largest number of requests that run the models at the same time.
        example: Finished completions with which the page opens; None to open without completions.

    Returns:
        The components that a link fills in.
    """
    switch = KLSwitch.of(page_models.timeline, page_models.lineage.card.get("step"))
    sample = _stream_handler(streams, switch, defaults)
    tab = _create_components(page_models, switch, defaults, example)
    controls = tab.controls

    def draw_prompt_and_seed() -> tuple[str, int]:
        return random.choice(page_models.prompts), random.randrange(SEED_LIMIT)

    options: dict[str, Any] = {
        **PAGE_EVENT,
        "inputs": [controls.prompt_box, controls.kl_slider, *controls.sampling],
        "outputs": [tab.message_view, tab.pairs_view],
        "concurrency_id": MODEL_QUEUE,
        "concurrency_limit": max_concurrent,
        "preprocess": False,  # Gradio would reject bad values without a message; `Comparison.stream` checks them all
    }
    triggers = [tab.compare_button.click, controls.prompt_box.submit]
    sampling_events = [gr.on(triggers, sample, **options)]
    if switch is not None:
        sampling_events.append(controls.kl_slider.input(sample, trigger_mode="always_last", **options))
        controls.kl_slider.release(None, js=scroll_script("pairs", control_id="kl-switch"), **PAGE_EVENT)
    if tab.examples is not None:
        sampling_events.append(tab.examples.load_input_event.then(sample, **options))
        triggers.append(tab.examples.dataset.click)
    if page_models.prompts:
        seed, *_ = controls.sampling
        draw_event = tab.surprise_button.click(draw_prompt_and_seed, outputs=[controls.prompt_box, seed], **PAGE_EVENT)
        sampling_events.append(draw_event.then(sample, **options))
        triggers.append(tab.surprise_button.click)
    gr.on(triggers, None, js=scroll_script("pairs"), **PAGE_EVENT)
    tab.stop_button.click(
        lambda: notice_html("Stopped. Only finished completions have rewards and values.", kind="status"),
        outputs=[tab.message_view],
        cancels=sampling_events,
        **PAGE_EVENT,
    )
    return controls


def _stream_handler(
    streams: CompletionStreams, switch: KLSwitch | None, defaults: SamplingDefaults
) -> Callable[..., Iterator[tuple[object, object]]]:
    """Returns the handler that samples a prompt. It yields the message and the completions, as HTML."""

    def sample(prompt: object, slider_value: object, *sampling: Any) -> Iterator[tuple[object, object]]:
        arguments = sampling_arguments(*sampling)
        message: object = ""  # only the first snapshot clears the message, because "Stop" may set it afterwards
        try:
            label = ROLE_DESCRIPTIONS["ppo"] if switch is None else switch.label(slider_value)
            if switch is None or switch.position_of(slider_value) == switch.compared_position:
                stream, link_kl = streams.stream(prompt, **arguments), None
            else:
                run, point = switch.checkpoint_at(slider_value)
                stream = streams.stream_step(point.step, prompt, run=run.name, **arguments)
                link_kl = "off" if switch.position_of(slider_value) == OFF else "on"
            for snapshot in stream:
                html = pairs_html(snapshot, ppo_label=label, link=link_address(snapshot, defaults, kl=link_kl))
                yield (summary_html(snapshot) if snapshot.done else message), html
                message = gr.skip()
        except ZooError as error:
            yield notice_html(error), gr.skip()  # the previous comparison stays visible

    return sample


@dataclass(frozen=True)
class _Tab:
    """The components of the tab. `examples` is None if the card has no held-out prompts."""

    controls: ComparisonControls
    compare_button: gr.Button
    surprise_button: gr.Button
    stop_button: gr.Button
    examples: Examples | None
    message_view: gr.HTML
    pairs_view: gr.HTML


def _create_components(
    page_models: PageModels, switch: KLSwitch | None, defaults: SamplingDefaults, example: Snapshot | None
) -> _Tab:
    """Creates the components, in the order of the page."""
    gr.HTML("<h2>The same prompt through both policies</h2>", elem_classes="zoo-visually-hidden")
    with gr.Row(equal_height=True):
        prompt_box = create_prompt_box(
            "prompt",
            f"{page_models.prompt_hint}; press Enter to compare, Shift+Enter for a new line",
            value=example.prompt if example else "",
            min_width=240,
        )
        compare_button = gr.Button("Compare", variant="primary", scale=1, min_width=100, elem_id="compare")
        surprise_button = gr.Button(
            "Surprise me", scale=1, min_width=100, elem_id="surprise", visible=bool(page_models.prompts)
        )
        stop_button = gr.Button("Stop", scale=1, min_width=80, elem_id="stop")
    examples = None
    if page_models.lineage.prompts:
        examples = gr.Examples(
            [[text] for text in page_models.lineage.prompts],
            inputs=[prompt_box],
            label="Held-out prompts",
            api_visibility="private",
            elem_id="examples",
        )
    kl_slider = _create_kl_slider(switch)
    message_view = create_live_region("message")
    label = ROLE_DESCRIPTIONS["ppo"] if switch is None else switch.label(switch.compared_position)
    initial_html = empty_pairs_html(page_models.comparison.initial_policy)
    if example is not None:
        initial_html = pairs_html(example, ppo_label=label, link=link_address(example, defaults))
    pairs_view = gr.HTML(initial_html, elem_id="pairs")
    with gr.Accordion("Sampling", open=False, elem_id="sampling"):
        sampling = create_controls(defaults, max_completions=page_models.comparison.limits.n)
    with gr.Row(elem_classes="zoo-colors"):
        gr.Radio(
            list(COLOR_CHOICES.items()), value="ratio", label="Color each token by", elem_id="colors", interactive=True
        )
        gr.HTML(legend_html(page_models.comparison.initial_policy))
    gr.HTML(_notes_html(page_models))
    controls = ComparisonControls(prompt_box, kl_slider, tuple(sampling))
    return _Tab(controls, compare_button, surprise_button, stop_button, examples, message_view, pairs_view)


def _create_kl_slider(switch: KLSwitch | None) -> gr.Slider:
    """Creates the slider of the KL penalty and the figures beside it. Both are hidden if there is no switch."""
    with gr.Row(elem_id="kl-switch", visible=switch is not None):
        position = ON if switch is None else switch.compared_position
        with gr.Column(scale=1, min_width=220):
            slider = gr.Slider(OFF, ON, value=position, step=1, label="KL penalty: off or on", elem_id="kl")
            gr.HTML("" if switch is None else switch.ends_html, elem_id="kl-ends")
        figures_view = gr.HTML("" if switch is None else switch.html(position), elem_id="kl-figures")
    if switch is not None:
        slider.input(
            switch.html,
            [slider],
            [figures_view],
            trigger_mode="always_last",
            queue=False,
            preprocess=False,
            **PAGE_EVENT,
        )
    return slider


def sample_example(page_models: PageModels, defaults: SamplingDefaults) -> Snapshot | None:
    """Samples the example with which the page opens: the first held-out prompt whose two completions differ.

    Args:
        page_models: The models and their runs.
        defaults: Initial sampling parameters.

    Returns:
        The finished completions; those of the first prompt if no prompt has different completions; None if the models
        can process none of the prompts.
    """
    examples: list[Snapshot] = []
    for prompt in page_models.lineage.prompts[:MAX_EXAMPLE_PROMPTS]:
        with contextlib.suppress(ZooError):
            stream = page_models.comparison.stream(
                prompt, temperature=defaults.temperature, max_new_tokens=defaults.length, every=math.inf
            )
            examples += deque(stream, maxlen=1)  # only the last snapshot, which has the finished completions
            if examples[-1].sft[0].completion != examples[-1].ppo[0].completion:
                return examples[-1]
    return next(iter(examples), None)


def _notes_html(page_models: PageModels) -> str:
    initial_policy = page_models.comparison.initial_policy
    sft_name = role_names(initial_policy)["sft"]
    log_ratio_note = (
        f"<b>Log-ratio</b>: log π<sub>PPO</sub> − log π<sub>{sft_name}</sub> of a token; for this one completion, the "
        "sum over its tokens: how much more likely PPO makes it. It is one sample, not a KL; its mean over many PPO "
        f"completions is the KL of PPO to {initial_policy}."
    )
    if (kl := page_models.lineage.kl) is not None:
        sample_count = f" over {kl['n']} completions" if isinstance(kl.get("n"), int) else ""
        log_ratio_note += f" On held-out prompts, the KL was {kl['value']:.2f} nats{sample_count}."
    kl_note = (
        f"<b>KL at a position</b>: KL(π<sub>PPO</sub>‖π<sub>{sft_name}</sub>) of the two distributions of the next "
        "token, exact over the full vocabulary. <b>Summed KL</b>: the sum over the positions of this completion."
    )
    reward_note = "<b>Reward</b>: none, because this checkpoint names no reward model."
    if page_models.lineage.rewards:
        reward_note = (
            "<b>Reward</b>: none, because the reward model needs custom code, and downloaded code never runs here: "
            "open the page for the run directory, or name another reward model with --reward."
        )
    if page_models.comparison.has_reward_model:
        reward_note = (
            "<b>Reward</b>: the reward model's score of the prompt with the completion, the proxy that PPO was trained "
            "to maximize. It does not measure quality."
        )
    if (rules := page_models.comparison.rules) is not None:
        reward_note = (
            f"<b>Reward</b>: {escape_text(', '.join(rules.names))}, computed by a program. PPO was trained to maximize "
            "it. A prompt of your own has the reward “none” if a rule needs more than the prompt, such as the right "
            "answer."
        )
    value_note = "<b>Value</b>: none, because this checkpoint has no critic."
    if page_models.comparison.has_critic:
        value_note = "<b>Value</b> (V): the future reward that the critic expects before a token, KL penalty included."
    random_note = "Both policies sample with the same random numbers. The same settings give the same completions."
    notes = [reward_note, log_ratio_note, kl_note, value_note, random_note]
    return '<div class="zoo-notes">' + "".join(f"<p>{note}</p>" for note in notes) + "</div>"
