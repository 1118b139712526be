"""The training tab: the same prompt at the checkpoints of a run, and at every β of an ablation."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import pairwise
from typing import Any

import gradio as gr

from ...errors import ZooError
from ...fileio import is_finite
from ...publishing.catalog.card import CardEstimate
from ..engine import CheckpointResult, Timeline, TimelinePoint, TimelineRun
from .browser import PAGE_EVENT, create_live_region, scroll_script
from .chart_parts import PHONE_WIDTH
from .charts import DESKTOP_WIDTH, KLCurve, Series, draw_frontier, draw_step_curves, step_range
from .html import escape_text, format_number, format_signed, notice_html, shorten_name
from .link import link_address
from .models import PageModels
from .sampling import MODEL_QUEUE, SamplingDefaults, create_controls, create_prompt_box, sampling_arguments
from .streams import CompletionStreams
from .views import completion_html, figures_html, pairs_html, role_names, summary_html

#: Largest number of curves of rewards that are logged but not optimized. A card is untrusted and may list any number.
MAX_WATCHED_CURVES = 4


@dataclass(frozen=True)
class TrainingControls:
    """The components that a link fills in. `sampling` is in the order of the arguments of `sampling_arguments`."""

    prompt_box: gr.Textbox
    run_dropdown: gr.Dropdown
    step_slider: gr.Slider
    curves_view: gr.HTML
    sampling: tuple[gr.Slider | gr.Number, ...]


def build_training_tab(
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
            notice_html(page_models.problem or "This checkpoint has no run to show.", kind="status"),
            elem_id="no-training",
        )
        return None

    handlers = _Handlers(page_models, timeline, streams, defaults)
    tab = _create_components(page_models, timeline.default_run, defaults)
    controls, message_view = tab.controls, tab.message_view
    prompt_box, run_dropdown, step_slider = controls.prompt_box, controls.run_dropdown, controls.step_slider

    # preprocess=False: Gradio would reject bad values without a message; `Timeline` checks them all.
    options: dict[str, Any] = {**PAGE_EVENT, "preprocess": False}
    model_options: dict[str, Any] = {**options, "concurrency_id": MODEL_QUEUE, "concurrency_limit": max_concurrent}
    # `input` rather than `release`, because the keyboard moves a slider without a release.
    step_slider.input(
        handlers.mark_step, [run_dropdown, step_slider], [controls.curves_view],
        trigger_mode="always_last", queue=False, **options,
    )  # fmt: skip
    gr.on(
        [step_slider.input, prompt_box.submit, tab.step_button.click], handlers.sample_step,
        [prompt_box, run_dropdown, step_slider, *controls.sampling], [message_view, tab.step_view],
        trigger_mode="always_last", **model_options,
    )  # fmt: skip
    tab.all_steps_button.click(
        handlers.sample_all_steps, [prompt_box, run_dropdown, *controls.sampling], [message_view, tab.all_steps_view],
        **model_options,
    )  # fmt: skip
    gr.on([tab.step_button.click, prompt_box.submit], None, js=scroll_script("at-step"), **PAGE_EVENT)
    # Not at each `input`, which would move the chart away while the slider is dragged.
    step_slider.release(None, js=scroll_script("at-step", control_id="step"), **PAGE_EVENT)
    tab.all_steps_button.click(None, js=scroll_script("steps"), **PAGE_EVENT)
    run_dropdown.input(handlers.show_run, [run_dropdown], [step_slider, controls.curves_view], **options)
    if len(timeline.runs_with_beta) > 1:
        _build_beta_section(page_models, streams, controls=controls, model_options=model_options, options=options)
    return controls


@dataclass(frozen=True)
class _Handlers:
    """What the tab does when a visitor moves or clicks a component; bad input becomes a message.

    Attributes:
        page_models: The models and their runs.
        timeline: The runs.
        streams: Samples the completions.
        defaults: Initial sampling parameters.
    """

    page_models: PageModels
    timeline: Timeline
    streams: CompletionStreams
    defaults: SamplingDefaults

    def mark_step(self, run_name: Any, slider_step: object) -> str:
        """Returns the curves of a run with a step marked."""
        try:
            run = self.timeline.get_run(run_name)
        except ZooError as error:
            return notice_html(error)
        return curves_html(run, nearest_step(run, slider_step), self.page_models.comparison.initial_policy)

    def sample_step(
        self, prompt: object, run_name: Any, slider_step: object, *sampling: Any
    ) -> Iterator[tuple[object, object]]:
        """Yields the message and the growing completions of a step."""
        try:
            run = self.timeline.get_run(run_name)
            point = run.point_at(nearest_step(run, slider_step))
            link_run = None if run is self.timeline.default_run else run.name
            for snapshot in self.streams.stream_step(point.step, prompt, run=run_name, **sampling_arguments(*sampling)):
                link = link_address(snapshot, self.defaults, step=point.step, run=link_run)
                yield summary_html(snapshot), pairs_html(snapshot, ppo_label=_point_label(point), link=link)
        except ZooError as error:
            yield notice_html(error), gr.skip()

    def sample_all_steps(self, prompt: object, run_name: Any, *sampling: Any) -> Iterator[tuple[object, object]]:
        """Yields the message and the completions of more and more steps."""
        try:
            run = self.timeline.get_run(run_name)
            steps = run.spread_steps(self.page_models.comparison.limits.checkpoints)
            results: list[CheckpointResult] = []
            for result in self.streams.stream_steps(prompt, steps, run=run_name, **sampling_arguments(*sampling)):
                results.append(result)
                yield "", checkpoints_html(results, requested_count=len(steps), total_count=len(run.points))
        except ZooError as error:
            yield notice_html(error), gr.skip()

    def show_run(self, run_name: Any) -> tuple[object, str]:
        """Returns the slider and the curves of a run."""
        try:
            run = self.timeline.get_run(run_name)
        except ZooError as error:
            return gr.skip(), notice_html(error)
        step = run.default_point.step
        curves = curves_html(run, step, self.page_models.comparison.initial_policy)
        return gr.update(**slider_range(run), value=step), curves


@dataclass(frozen=True)
class _Tab:
    """The components of the tab, except those of the section on β."""

    controls: TrainingControls
    step_button: gr.Button
    all_steps_button: gr.Button
    message_view: gr.HTML
    step_view: gr.HTML
    all_steps_view: gr.HTML


def _create_components(page_models: PageModels, default_run: TimelineRun, defaults: SamplingDefaults) -> _Tab:
    """Creates the components, in the order of the page."""
    assert page_models.timeline is not None
    gr.HTML("<h2>The same prompt at each checkpoint</h2>", elem_classes="zoo-visually-hidden")
    with gr.Row(equal_height=True):
        example = next(iter(page_models.lineage.prompts), "")
        prompt_box = create_prompt_box("training-prompt", page_models.prompt_hint, value=example, min_width=240)
        step_button = gr.Button("At the step below", scale=1, min_width=120, elem_id="at-the-step")
        all_steps_button = gr.Button(
            "Every checkpoint", variant="primary", scale=1, min_width=120, elem_id="every-step"
        )
    run_dropdown = gr.Dropdown(
        [(_run_label(run), run.name) for run in page_models.timeline.runs.values()],
        value=default_run.name,
        label="Run",
        visible=len(page_models.timeline.runs) > 1,
        elem_id="run",
    )
    default_step, initial_policy = default_run.default_point.step, page_models.comparison.initial_policy
    curves_view = gr.HTML(curves_html(default_run, default_step, initial_policy), elem_id="curves")
    step_slider = gr.Slider(**slider_range(default_run), value=default_step, label="Step", elem_id="step")
    message_view = create_live_region("training-message")
    hint = f"compare one checkpoint with {initial_policy}; “Every checkpoint” shows all of them."
    step_view = gr.HTML(f'<p class="zoo-note">Move the slider to {hint}</p>', elem_id="at-step")
    with gr.Accordion("Sampling", open=False, elem_id="training-sampling"):
        sampling_controls = create_controls(defaults, prefix="training-")
    all_steps_view = gr.HTML("", elem_id="steps")
    controls = TrainingControls(prompt_box, run_dropdown, step_slider, curves_view, tuple(sampling_controls))
    return _Tab(controls, step_button, all_steps_button, message_view, step_view, all_steps_view)


def _build_beta_section(
    page_models: PageModels,
    streams: CompletionStreams,
    *,
    controls: TrainingControls,
    model_options: Mapping[str, Any],
    options: Mapping[str, Any],
) -> None:
    """Builds the section that compares the runs of an ablation by β. It emphasizes the run in the dropdown "Run"."""
    assert page_models.timeline is not None
    runs, initial_policy = page_models.timeline.runs_with_beta, page_models.comparison.initial_policy

    def render_frontier(run_name: object) -> str:
        selected = next((index for index, run in enumerate(runs) if run.name == run_name), 0)
        return frontier_html(runs, selected, initial_policy)

    def sample_all_betas(prompt: object, *sampling: Any) -> Iterator[tuple[object, object]]:
        results: list[CheckpointResult] = []
        try:
            for result in streams.stream_betas(prompt, **sampling_arguments(*sampling)):
                results.append(result)
                yield "", checkpoints_html(results, requested_count=len(runs), total_count=len(runs), by_beta=True)
        except ZooError as error:
            yield notice_html(error), gr.skip()

    gr.HTML(
        '<div class="zoo"><h2>Strength of the KL penalty</h2><p>Runs with different β, the coefficient of the KL '
        f"penalty. A large β keeps PPO close to {initial_policy}. A small β lets PPO exploit the reward model.</p>"
        "</div>"
    )
    frontier_view = gr.HTML(render_frontier(page_models.timeline.default_run.name), elem_id="frontier")
    button = gr.Button("The prompt with every β", elem_id="every-beta")
    message_view = create_live_region("beta-message")
    all_betas_view = gr.HTML("", elem_id="betas")
    controls.run_dropdown.input(render_frontier, [controls.run_dropdown], [frontier_view], **options)
    button.click(
        sample_all_betas, [controls.prompt_box, *controls.sampling], [message_view, all_betas_view], **model_options
    )
    gr.on(button.click, None, js=scroll_script("betas"), **PAGE_EVENT)


# Rendering


def nearest_step(run: TimelineRun, step: object) -> int:
    """Returns the step of the checkpoint closest to a requested step, because checkpoints may be unevenly spaced.

    Args:
        run: A run with checkpoints.
        step: The requested step, from a slider or a link; the default checkpoint's step if it is not a number.
    """
    target = step if is_finite(step) else run.default_point.step
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


def curves_html(run: TimelineRun, step: int, initial_policy: str = "SFT") -> str:
    """Draws a run's metrics by step: those of the evaluation if the run's card has them, else those logged in training.

    Args:
        run: A run with checkpoints.
        step: The step to mark.
        initial_policy: As for `role_names`.
    """
    points = run.points
    # The evaluation's figures come first, because metrics logged in training come from the few prompts of a rollout and
    # can contradict the recommended step.
    is_evaluated = _is_evaluated(run)
    make_series = _evaluated_series if is_evaluated else _logged_series
    series = make_series(points, f"KL to {initial_policy}")
    labels = {point.step: ", ".join(point.marks) for point in points if point.marks}
    charts = _draw_for_each_screen(partial(draw_step_curves, run.steps, series, selected=step, labels=labels))
    bars = " · bars: 95% intervals" if is_evaluated else ""
    return f'{charts}<p class="zoo-note" aria-live="polite">{_point_label(run.point_at(step))}{bars}</p>'


def _validation_figures(point: TimelinePoint) -> Mapping[str, CardEstimate]:
    """Returns the checkpoint's figures on validation prompts, by which a step is recommended."""
    return point.evaluated.get("validation", {})


def _validation_value(point: TimelinePoint, key: str) -> float | None:
    estimate = _validation_figures(point).get(key)
    return None if estimate is None else estimate.value


def _is_evaluated(run: TimelineRun) -> bool:
    """Whether an evaluation on validation prompts judged any checkpoint."""
    return any("judge" in _validation_figures(point) for point in run.points)


def _evaluated_series(points: Sequence[TimelinePoint], kl_name: str) -> list[Series]:
    series = []
    for key, name, unit in (("reward", "Reward", ""), ("judge", "Judge’s score", ""), ("kl", kl_name, "nats")):
        estimates = [_validation_figures(point).get(key) for point in points]
        if any(estimates):
            values = [_validation_value(point, key) for point in points]
            intervals = [None if estimate is None else estimate.ci95 for estimate in estimates]
            series.append(Series(name, values, unit, is_nonnegative=key == "kl", intervals=intervals))
    return series


def _logged_series(points: Sequence[TimelinePoint], kl_name: str) -> list[Series]:
    watched_names = list(dict.fromkeys(name for point in points for name in point.watched))[:MAX_WATCHED_CURVES]
    return [
        Series("Reward in training", [point.reward for point in points]),
        Series(kl_name, [point.kl for point in points], unit="nats", is_nonnegative=True),
        *(Series(f"{name} (watched)", [point.watched.get(name) for point in points]) for name in watched_names),
    ]


def frontier_html(runs: Sequence[TimelineRun], selected: int, initial_policy: str = "SFT") -> str:
    """Draws reward and judge's score against KL on validation prompts if every run has them, else training's reward.

    Args:
        runs: Runs with a known β.
        selected: Index of the run to emphasize.
        initial_policy: As for `role_names`.
    """
    source, names = "rollouts, as logged in training", {"reward": "Reward"}
    read_value: Callable[[TimelinePoint, str], float | None] = getattr
    if all(map(_is_evaluated, runs)):
        source, read_value = "validation prompts", _validation_value
        names["judge"] = "Judge’s score"
    charts = ""
    marks: list[str] = []
    for key, name in names.items():
        curves = [
            KLCurve(
                f"β = {run.beta:g}",
                [(point.step, read_value(point, "kl"), read_value(point, key)) for point in run.points],
                run.default_point.step,
                _default_mark(run),
            )
            for run in runs
        ]
        draw = partial(draw_frontier, curves, name=name, source=source, selected=selected)
        charts += _draw_for_each_screen(partial(draw, initial_policy=initial_policy))
        marks += [curve.mark for curve in curves if curve.is_marked]
    distinct_marks = " or ".join(dict.fromkeys(marks))
    return charts + (f'<p class="zoo-note">Circled: the {distinct_marks} step of each run.</p>' if marks else "")


def _default_mark(run: TimelineRun) -> str:
    """Returns why a checkpoint is the run's default: it is recommended, best or last."""
    return next(iter(run.default_point.marks), "last")


def _draw_for_each_screen(draw: Callable[..., str]) -> str:
    """Draws a chart for phones and another for wide screens, so that its text is readable on both. CSS hides one."""
    phone_chart, desktop_chart = draw(width=PHONE_WIDTH), draw(width=DESKTOP_WIDTH)
    return f'<div class="zoo-narrow">{phone_chart}</div><div class="zoo-wide">{desktop_chart}</div>'


def checkpoints_html(
    results: Sequence[CheckpointResult], *, requested_count: int, total_count: int, by_beta: bool = False
) -> str:
    """Renders the completions of a prompt at each finished checkpoint, after the completion of SFT.

    Args:
        results: The results of the finished checkpoints.
        requested_count: Number of checkpoints in the request.
        total_count: Number of checkpoints in the run; with `by_beta`, the number of runs.
        by_beta: Whether each result is from a different run, named by the run's β.
    """
    items = _sft_item_html(results) + "".join(_checkpoint_item_html(result, by_beta=by_beta) for result in results)
    count, state = f"{len(results)} of {requested_count}", "writing"
    if len(results) == requested_count:
        count, state = f"{requested_count}", "done"
    spread_note = f", spread over all {total_count}" if total_count > requested_count else ""
    note = f"{count} {'runs' if by_beta else 'checkpoints'}{spread_note}"
    head = f'<p class="zoo-note" role="status">{note}</p>'
    return f'<div class="zoo-steps" data-state="{state}">{head}<ol>{items}</ol></div>'


def _sft_item_html(results: Sequence[CheckpointResult]) -> str:
    """Renders the SFT completion, the starting point of training; "" until a checkpoint is done."""
    snapshot = next((result.snapshot for result in results if result.snapshot is not None), None)
    if snapshot is None:
        return ""
    # The log-ratio and KL of SFT's completion differ between checkpoints, so they are set to NaN, shown as a dash.
    completion = replace(snapshot.sft[0], log_ratio=math.nan, kl=math.nan)
    name = role_names(snapshot.initial_policy)["sft"]
    head = f"<header><h3>{name}</h3><span>step 0, where PPO started</span></header>"
    body = completion_html(snapshot.prompt, completion, is_chat=snapshot.is_chat) + figures_html(completion)
    return f'<li><article class="zoo-card zoo-sft" data-step="0">{head}{body}</article></li>'


def _checkpoint_item_html(result: CheckpointResult, *, by_beta: bool) -> str:
    name = f"β = {result.beta:g}" if by_beta and result.beta is not None else escape_text(result.point.tag)
    marks = "".join(f'<span class="zoo-badge">{mark}</span>' for mark in result.point.marks)
    figures = _figures_text(result.point)
    tag = escape_text(result.point.tag) + " · " if by_beta else ""
    head = f"<header><h3>{name}</h3>{marks}<span>{tag}{figures}</span></header>"
    if result.snapshot is None:
        body = f'<p class="zoo-text"><span class="none">{escape_text(result.problem)}</span></p>'
    else:
        snapshot, completion = result.snapshot, result.snapshot.ppo[0]
        text = completion_html(snapshot.prompt, completion, heat_map=True, is_chat=snapshot.is_chat)
        body = text + figures_html(completion)
    return f'<li><article class="zoo-card zoo-ppo" data-step="{result.point.step}">{head}{body}</article></li>'


def _figures_text(point: TimelinePoint) -> str:
    """Returns the figures of a checkpoint: on validation prompts if it was evaluated, else on training's rollouts."""
    if "judge" not in _validation_figures(point):
        return f"in training: reward {format_signed(point.reward)}, KL {format_number(point.kl)} nats"
    reward, judge, kl = (_validation_value(point, key) for key in ("reward", "judge", "kl"))
    figures = f"reward {format_signed(reward)}, judge {format_signed(judge)}, KL {format_number(kl)} nats"
    return f"on validation prompts: {figures}"


def _point_label(point: TimelinePoint) -> str:
    marks = f" ({', '.join(point.marks)})" if point.marks else ""
    return f"{escape_text(point.tag)}{marks} · {_figures_text(point)}"


def _run_label(run: TimelineRun) -> str:
    beta = f"β = {run.beta:g} · " if run.beta is not None else ""
    return f"{beta}{shorten_name(run.name)}"
