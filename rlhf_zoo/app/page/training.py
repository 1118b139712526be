"""The training tab: the same prompt at every published checkpoint, and at every β of an ablation."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import Any

import gradio as gr

from ...errors import ZooError
from ...fileio import finite
from ..engine import AtCheckpoint, TimelinePoint, TimelineRun
from .browser import into_view, live_region
from .charts import DESKTOP_WIDTH, WIDTH, Series, frontier, step_curves, step_range
from .html import notice, number, short_name, signed, text
from .link import address
from .models import PageModels
from .sampling import MODEL_QUEUE, SamplingDefaults, controls, prompt_box, sampling_arguments
from .streams import CompletionStreams
from .views import completion, figures, pairs, summary

MAX_WATCHED = 4  # curves of watched rewards, because a card is not trusted and may name any number
SLIDER_HINT = (
    '<p class="zoo-note">Move the slider to compare one checkpoint with SFT; “Every checkpoint” shows all of them.</p>'
)


@dataclass(frozen=True)
class TrainingControls:
    """The components that a link fills in. `sampling` is in the order of `sampling_arguments`."""

    prompt: gr.Textbox
    run: gr.Dropdown
    step: gr.Slider
    curves: gr.HTML
    sampling: tuple[gr.Slider | gr.Number, ...]


def training_tab(
    page_models: PageModels, streams: CompletionStreams, *, defaults: SamplingDefaults, max_concurrent: int
) -> TrainingControls | None:
    """Builds the contents of the tab.

    Args:
        page_models: The models and their runs.
        streams: Samples the completions.
        defaults: Initial sampling parameters.
        max_concurrent: Largest number of requests that run the models at the same time.

    Returns:
        The components that a link fills in; None if the checkpoint has no run.
    """
    timeline = page_models.timeline
    if timeline is None:
        gr.HTML(
            notice(page_models.problem or "This checkpoint has no run to show.", kind="status"), elem_id="no-training"
        )
        return None
    first_run = timeline.run()

    def mark_step(run: Any, step: object) -> str:
        try:
            shown_run = timeline.run(run)
        except ZooError as error:
            return notice(error)
        return curves(shown_run, nearest_step(shown_run, step))

    def sample_step(prompt: object, run: Any, step: object, *sampling: Any) -> Iterator[tuple[object, object]]:
        try:
            shown_run = timeline.run(run)
            point = shown_run.at(nearest_step(shown_run, step))
            for snapshot in streams.at(point.step, prompt, run=run, **sampling_arguments(*sampling)):
                link = address(
                    snapshot, defaults, step=point.step, run=None if shown_run is first_run else shown_run.name
                )
                yield summary(snapshot), pairs(snapshot, ppo=_point_label(point), link=link)
        except ZooError as error:
            yield notice(error), gr.skip()

    def sample_all(prompt: object, run: Any, *sampling: Any) -> Iterator[tuple[object, object]]:
        try:
            shown_run, rows = timeline.run(run), list[AtCheckpoint]()
            steps = shown_run.spread(page_models.comparison.limits.steps)
            for row in streams.steps(prompt, steps, run=run, **sampling_arguments(*sampling)):
                rows.append(row)
                yield "", checkpoints(rows, requested=len(steps), total=len(shown_run.points))
        except ZooError as error:
            yield notice(error), gr.skip()

    tab = _layout(page_models, first_run, defaults)
    linked = tab.controls
    prompt, run, step, curves_html = linked.prompt, linked.run, linked.step, linked.curves
    sampling_controls, message = linked.sampling, tab.message

    # preprocess=False: Gradio would reject bad values without a message; `Timeline` checks them all.
    shared: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden", "preprocess": False}
    models: dict[str, Any] = {**shared, "concurrency_id": MODEL_QUEUE, "concurrency_limit": max_concurrent}
    # `input` and not `release`, because the keyboard moves a slider without a release.
    step.input(mark_step, [run, step], [curves_html], trigger_mode="always_last", queue=False, **shared)
    triggers, inputs = [step.input, prompt.submit, tab.run_step.click], [prompt, run, step, *sampling_controls]
    gr.on(triggers, sample_step, inputs, [message, tab.at_step], trigger_mode="always_last", **models)
    tab.run_all.click(sample_all, [prompt, run, *sampling_controls], [message, tab.all_steps], **models)
    for trigger, result in ((tab.run_step.click, "at-step"), (prompt.submit, "at-step"), (tab.run_all.click, "steps")):
        gr.on(trigger, None, js=into_view(result), api_visibility="private", show_progress="hidden")

    def show_run(name: Any) -> tuple[object, str]:
        try:
            shown_run = timeline.run(name)
        except ZooError as error:
            return gr.skip(), notice(error)
        return gr.update(**slider_range(shown_run), value=shown_run.best.step), curves(shown_run, shown_run.best.step)

    run.input(show_run, [run], [step, curves_html], **shared)
    if len(timeline.by_beta) > 1:
        _betas(page_models, streams, controls=linked, models=models, shared=shared)
    return linked


@dataclass(frozen=True)
class _Tab:
    """The components of the tab, except those of the part with the runs by β."""

    controls: TrainingControls
    run_step: gr.Button
    run_all: gr.Button
    message: gr.HTML
    at_step: gr.HTML
    all_steps: gr.HTML


def _layout(page_models: PageModels, first_run: TimelineRun, defaults: SamplingDefaults) -> _Tab:
    """Creates the components, in the order of the page."""
    assert page_models.timeline is not None
    gr.HTML("<h2>The same prompt at each checkpoint</h2>", elem_classes="zoo-heard")
    with gr.Row(equal_height=True):
        example = next(iter(page_models.lineage.prompts), "")
        prompt = prompt_box("training-prompt", "The beginning of a text", value=example, min_width=240)
        run_step = gr.Button("At the step below", scale=1, min_width=120, elem_id="at-the-step")
        run_all = gr.Button("Every checkpoint", variant="primary", scale=1, min_width=120, elem_id="every-step")
    run = gr.Dropdown(
        [(_run_label(timeline_run), timeline_run.name) for timeline_run in page_models.timeline.runs.values()],
        value=first_run.name,
        label="Run",
        visible=len(page_models.timeline.runs) > 1,
        elem_id="run",
    )
    curves_html = gr.HTML(curves(first_run, first_run.best.step), elem_id="curves")
    step = gr.Slider(**slider_range(first_run), value=first_run.best.step, label="Step", elem_id="step")
    message = live_region("training-message")
    at_step = gr.HTML(SLIDER_HINT, elem_id="at-step")
    with gr.Accordion("Sampling", open=False, elem_id="training-sampling"):
        sampling_controls = controls(defaults, prefix="training-")
    all_steps_html = gr.HTML("", elem_id="steps")
    training_controls = TrainingControls(prompt, run, step, curves_html, tuple(sampling_controls))
    return _Tab(training_controls, run_step, run_all, message, at_step, all_steps_html)


def _betas(
    page_models: PageModels,
    streams: CompletionStreams,
    *,
    controls: TrainingControls,
    models: Mapping[str, Any],
    shared: Mapping[str, Any],
) -> None:
    """Builds the part of the tab that compares the runs of an ablation by β. "Run" above selects one of them."""
    assert page_models.timeline is not None
    runs = page_models.timeline.by_beta

    def run_index(name: object) -> int:
        return next((index for index, run in enumerate(runs) if run.name == name), 0)

    def sample_all(prompt: object, *sampling: Any) -> Iterator[tuple[object, object]]:
        rows: list[AtCheckpoint] = []
        try:
            for row in streams.betas(prompt, **sampling_arguments(*sampling)):
                rows.append(row)
                yield "", checkpoints(rows, requested=len(runs), total=len(runs), by_beta=True)
        except ZooError as error:
            yield notice(error), gr.skip()

    gr.HTML(
        '<div class="zoo"><h2>Strength of the KL penalty</h2><p>Runs with different β, the coefficient of the KL '
        "penalty. A large β keeps PPO close to SFT; a small one lets it exploit the reward model.</p></div>"
    )
    frontier_html = gr.HTML(_frontier(runs, run_index(page_models.timeline.run().name)), elem_id="frontier")
    run_all = gr.Button("The prompt with every β", elem_id="every-beta")
    message = live_region("beta-message")
    all_betas_html = gr.HTML("", elem_id="betas")
    controls.run.input(lambda name: _frontier(runs, run_index(name)), [controls.run], [frontier_html], **shared)
    run_all.click(sample_all, [controls.prompt, *controls.sampling], [message, all_betas_html], **models)
    gr.on(run_all.click, None, js=into_view("betas"), api_visibility="private", show_progress="hidden")


# Rendering


def nearest_step(run: TimelineRun, step: object) -> int:
    """Returns the step of the checkpoint closest to the slider's value. Checkpoints need not be evenly spaced.

    Args:
        run: A run with checkpoints.
        step: The slider's value.
    """
    target = step if finite(step) else run.best.step
    return min(run.steps, key=lambda candidate: (abs(candidate - target), candidate))


def slider_range(run: TimelineRun) -> dict[str, Any]:
    """Returns minimum, maximum and step of a slider that can reach every checkpoint of a run.

    Args:
        run: A run with checkpoints.
    """
    steps = run.steps
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    low, high = step_range(steps)
    return {"minimum": low, "maximum": high, "step": reduce(math.gcd, gaps, 0) or 1}


def curves(run: TimelineRun, step: int) -> str:
    """Renders reward and KL over a run's checkpoints.

    Args:
        run: A run with checkpoints.
        step: The step to mark.
    """
    points = run.points
    watched_names = list(dict.fromkeys(name for point in points for name in point.watched))[:MAX_WATCHED]
    series = [
        Series("Reward in training", [point.reward for point in points]),
        Series("KL to SFT", [point.kl for point in points], unit="nats", from_zero=True),
        *(Series(f"{name} (watched)", [point.watched.get(name) for point in points]) for name in watched_names),
    ]
    labeled = {point.step: ", ".join(point.marks) for point in points if point.marks}
    charts = _for_each_screen(lambda width: step_curves(run.steps, series, selected=step, labeled=labeled, width=width))
    return f'{charts}<p class="zoo-note" aria-live="polite">{_point_label(run.at(step))}</p>'


def _frontier(runs: Sequence[TimelineRun], selected: int) -> str:
    return _for_each_screen(lambda width: frontier(runs, selected=selected, width=width))


def _for_each_screen(draw: Callable[[int], str]) -> str:
    """A chart for phones and one for wide screens, whose text would otherwise be tiny or huge. The style hides one."""
    return f'<div class="zoo-narrow">{draw(WIDTH)}</div><div class="zoo-wide">{draw(DESKTOP_WIDTH)}</div>'


def checkpoints(rows: Sequence[AtCheckpoint], *, requested: int, total: int, by_beta: bool = False) -> str:
    """Renders the same prompt at each finished checkpoint.

    Args:
        rows: The finished checkpoints.
        requested: Number of checkpoints in the request.
        total: Number of checkpoints in the run.
        by_beta: Whether each row is a checkpoint of a different run, named by the run's β.
    """
    items = _sft_row(rows) + "".join(_checkpoint_row(row, by_beta=by_beta) for row in rows)
    is_done = len(rows) == requested
    count = f"{requested}" if is_done else f"{len(rows)} of {requested}"
    noun = "runs" if by_beta else "checkpoints"
    note = f"{count} {noun}" + (f", spread over all {total}" if total > requested else "")
    state = "done" if is_done else "writing"
    head = f'<p class="zoo-note" role="status">{note}</p>'
    return f'<div class="zoo-steps" data-state="{state}">{head}<ol>{items}</ol></div>'


def _sft_row(rows: Sequence[AtCheckpoint]) -> str:
    """Renders the SFT completion, the starting point of training; "" until a checkpoint is done."""
    snapshot = next((row.snapshot for row in rows if row.snapshot is not None), None)
    if snapshot is None:
        return ""
    # Its log-ratio and KL would refer only to the first checkpoint, so they are NaN, which is shown as a dash.
    side = replace(snapshot.sft[0], log_ratio=math.nan, kl=math.nan)
    head = "<header><h3>SFT</h3><span>step 0, where PPO started</span></header>"
    body = completion(snapshot.prompt, side, is_chat=snapshot.is_chat) + figures(side)
    return f'<li><article class="zoo-card zoo-sft" data-step="0">{head}{body}</article></li>'


def _checkpoint_row(row: AtCheckpoint, *, by_beta: bool) -> str:
    name = f"β = {row.beta:g}" if by_beta and row.beta is not None else text(row.point.tag)
    marks = "".join(f'<span class="zoo-badge">{mark}</span>' for mark in row.point.marks)
    logged = _logged(row.point)
    head = (
        f"<header><h3>{name}</h3>{marks}<span>{text(row.point.tag) + ' · ' if by_beta else ''}{logged}</span></header>"
    )
    if row.snapshot is None:
        body = f'<p class="zoo-text"><span class="none">{text(row.problem)}</span></p>'
    else:
        side = row.snapshot.ppo[0]
        body = completion(row.snapshot.prompt, side, heat_map=True, is_chat=row.snapshot.is_chat) + figures(side)
    return f'<li><article class="zoo-card zoo-ppo" data-step="{row.point.step}">{head}{body}</article></li>'


def _logged(point: TimelinePoint) -> str:
    return f"in training: reward {signed(point.reward)}, KL {number(point.kl)} nats"


def _point_label(point: TimelinePoint) -> str:
    marks = f" ({', '.join(point.marks)})" if point.marks else ""
    return f"{text(point.tag)}{marks} · {_logged(point)}"


def _run_label(run: TimelineRun) -> str:
    beta = f"β = {run.beta:g} · " if run.beta is not None else ""
    return f"{beta}{short_name(run.name)}"
