"""The comparison tab: one prompt sampled from both policies, side by side."""

import random
from collections.abc import Iterator
from typing import Any

import gradio as gr

from ...errors import ZooError
from .drawing import Drawing
from .html import notice
from .sampling import MODEL_QUEUE, SEED_LIMIT, Proposal, controls, prompt_box, sampling_arguments
from .subject import Subject
from .views import empty_pairs, legend, pairs

#: What the tokens are colored by -> value in the style sheet.
COLORS = {"log-ratio": "ratio", "exact KL": "kl", "nothing": "none"}


def compare_tab(subject: Subject, drawing: Drawing, *, proposal: Proposal, max_concurrent: int) -> None:
    """Builds the contents of the tab.

    Args:
        subject: The models and their runs.
        drawing: Samples the completions.
        proposal: Initial sampling parameters.
        max_concurrent: Largest number of requests that run the models at the same time.
    """

    def show(prompt: object, *sampling: Any) -> Iterator[tuple[object, object]]:
        try:
            message = ""  # only the first snapshot clears the message, so that later ones keep what "Stop" wrote
            for snapshot in drawing.stream(prompt, **sampling_arguments(*sampling)):
                yield message, pairs(snapshot)
                message = gr.skip()
        except ZooError as error:
            yield notice(error), gr.skip()  # the previous comparison stays visible

    def random_prompt_and_seed() -> tuple[str, int]:
        return random.choice(subject.prompts), random.randrange(SEED_LIMIT)

    with gr.Row(equal_height=True):
        prompt = prompt_box("prompt", "The beginning of a text; Enter compares", autofocus=True)
        compare = gr.Button("Compare", variant="primary", scale=1, min_width=120, elem_id="compare")
        if subject.prompts:
            surprise = gr.Button("Surprise me", scale=1, min_width=120, elem_id="surprise")
        stop = gr.Button("Stop", scale=1, min_width=80, elem_id="stop")
    examples = None
    if subject.lineage.prompts:
        examples = gr.Examples(
            [[text] for text in subject.lineage.prompts],
            inputs=[prompt],
            label="Held-out prompts",
            api_visibility="private",
            elem_id="examples",
        )
    sampling_controls = controls(proposal, max_completions=subject.comparison.limits.n)
    message = gr.HTML("", elem_id="message")
    with gr.Row(elem_classes="zoo-colors"):
        gr.Radio(list(COLORS.items()), value="ratio", label="Color each token by", elem_id="colors", interactive=True)
        gr.HTML(legend())
    pairs_view = gr.HTML(empty_pairs(), elem_id="pairs")
    gr.HTML(_notes(subject))

    options: dict[str, Any] = {
        "inputs": [prompt, *sampling_controls],
        "outputs": [message, pairs_view],
        "concurrency_id": MODEL_QUEUE,
        "concurrency_limit": max_concurrent,
        "api_visibility": "private",
        "show_progress": "hidden",
        "scroll_to_output": True,  # on a phone the controls fill the screen
        "preprocess": False,  # Gradio would reject bad values without a message; `Comparison.stream` checks them all
    }
    comparisons = [gr.on([compare.click, prompt.submit], show, **options)]
    if examples is not None:
        comparisons.append(examples.load_input_event.then(show, **options))
    if subject.prompts:
        seed_control, *_ = sampling_controls
        picked = surprise.click(
            random_prompt_and_seed, outputs=[prompt, seed_control], api_visibility="private", show_progress="hidden"
        )
        comparisons.append(picked.then(show, **options))
    stop.click(
        lambda: notice("Stopped. Only finished completions have rewards and values.", kind="status"),
        outputs=[message],
        cancels=comparisons,
        api_visibility="private",
        show_progress="hidden",
    )


def _notes(subject: Subject) -> str:
    log_ratio = (
        "<b>Log-ratio</b>: log π<sub>PPO</sub> − log π<sub>SFT</sub> of a token, and summed over this one completion: "
        "how much more likely PPO makes it. It is one sample, not a KL; its mean over many PPO completions is the KL "
        "of PPO to SFT."
    )
    if (kl := subject.lineage.kl) is not None:
        sample_count = f" over {kl['n']} completions" if isinstance(kl.get("n"), int) else ""
        log_ratio += f" On held-out prompts, the KL was {kl['value']:.2f} nats{sample_count}."
    exact_kl = (
        "<b>KL at a position</b>: KL(π<sub>PPO</sub>‖π<sub>SFT</sub>) of the two distributions over the next token, "
        "exact, over the full vocabulary; <b>Summed KL</b> is their sum over this completion."
    )
    reward = "<b>Reward</b>: none, because this checkpoint names no reward model."
    if subject.lineage.rewards:
        reward = (
            "<b>Reward</b>: none, because the reward model needs custom code, and downloaded code never runs: open the "
            "page for the run directory, or name another reward model with --reward."
        )
    if subject.comparison.has_reward:
        reward = (
            "<b>Reward</b>: the reward model's score of prompt and completion, the proxy that PPO was trained to "
            "maximize. It does not measure quality."
        )
    value = "<b>Value</b>: none, because this checkpoint has no critic."
    if subject.comparison.has_critic:
        value = "<b>Value</b> (V): the critic's estimate of the remaining reward before a token, KL penalty included."
    randomness = "Both policies sample with the same random numbers, and equal settings give equal completions."
    notes = [reward, log_ratio, exact_kl, value, randomness]
    return '<div class="zoo-notes">' + "".join(f"<p>{note}</p>" for note in notes) + "</div>"
