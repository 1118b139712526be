"""The plots of the docs: training by update, with and without the KL penalty."""

import itertools
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any

from rlhf_zoo.fileio import write_bytes
from rlhf_zoo.publishing.plot_parts import LEGIBLE_BLUE, LEGIBLE_GREEN, LEGIBLE_ORANGE, make_transparent

from . import keep
from .experiments import Experiment

MANY = 5  # from this number of runs on, a mean and a band are drawn instead of lines
#: Recipes whose training plot also has a narrow form, for phones.
WITH_NARROW_PLOT = ("tiny-world",)
_SEED_COLORS = (LEGIBLE_BLUE, LEGIBLE_GREEN, LEGIBLE_ORANGE)
FONT_SIZE = 12  # typographic points


def draw(experiment: Experiment) -> None:
    """Draws the plots of a recipe. A plot without kept figures is not changed."""
    runs = keep.load(experiment.recipe).get("runs", [])
    ablation = keep.load(f"{experiment.recipe}-ablation").get("runs", [])
    without_kl = [run for run in ablation if run["beta"] == 0]
    if runs:
        _draw_training(experiment, runs, without_kl, keep.FOLDER / f"{experiment.recipe}.png", narrow=False)
        if experiment.recipe in WITH_NARROW_PLOT:
            _draw_training(experiment, runs, without_kl, keep.FOLDER / f"{experiment.recipe}-narrow.png", narrow=True)


def draw_reviews(runs: Sequence[Any], path: Path) -> None:
    """Draws each run's reward gain over its first update, which SFT sampled, and its KL; a column for each β."""
    if not runs:
        return
    figure, axes = _figure(2, 2, height=4.2)
    colors = dict(zip(sorted({run["seed"] for run in runs}), _SEED_COLORS, strict=True))
    machines = {seed: list(dict.fromkeys(run["machine"] for run in runs if run["seed"] == seed)) for seed in colors}
    for column, beta in enumerate(sorted({run["beta"] for run in runs}, reverse=True)):
        gain, kl = axes[:, column]
        for run in (run for run in runs if run["beta"] == beta):
            seed, machine, curve = run["seed"], run["machine"], run["curve"]
            linestyle = ("-", "--", ":")[machines[seed].index(machine)]
            label = f"seed {seed}, {machine}" if len(machines[seed]) > 1 else f"seed {seed}"
            style = {"color": colors[seed], "linewidth": 1.3, "linestyle": linestyle}
            steps = [row["step"] for row in curve]
            gain.plot(steps, [row["reward"] - curve[0]["reward"] for row in curve], **style)
            kl.plot(steps, [row["kl"] for row in curve], label=label, **style)
        gain.set_title(f"With a KL penalty, β = {beta:g}" if beta else "Without a KL penalty", loc="left")
        gain.tick_params(labelbottom=False)
        kl.set_xlabel("PPO update")
        gain.sharey(axes[0, 0])
        kl.sharey(axes[1, 0])
    axes[0, 0].set_ylabel("reward, gain over SFT")
    axes[1, 0].set_ylabel("KL to SFT, nats")
    lines_and_labels = axes[1, 0].get_legend_handles_labels()
    axes[0, -1].legend(*lines_and_labels, loc="upper left", frameon=False, labelcolor="linecolor", handlelength=1.8)
    _save(figure, path)


def draw_instructions(runs: Sequence[Any], path: Path) -> None:
    """Draws, for each run with a curve, how many training answers follow all instructions, and KL below."""
    runs = [run for run in runs if run.get("curve")]
    if not runs:
        return
    figure, axes = _figure(1, 2, height=4.4)
    styles = itertools.cycle(itertools.product(("-", "--", ":"), _SEED_COLORS))
    for run, (linestyle, color) in zip(runs, styles, strict=False):
        steps = [row["step"] for row in run["curve"]]
        for row_axes, name, scale in ((axes[0, 0], "followed", 100), (axes[1, 0], "kl", 1)):
            values = [scale * row[name] for row in run["curve"]]
            label = f"{run['policy']}, seed {run['seed']}"
            row_axes.plot(steps, values, color=color, linestyle=linestyle, linewidth=1.3, label=label)
    axes[0, 0].set_ylabel("follow all instructions, %")
    lines_and_labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(*lines_and_labels, loc="outside upper left", frameon=False, labelcolor="linecolor", handlelength=1.8)
    axes[0, 0].tick_params(labelbottom=False)
    axes[1, 0].set_ylabel("KL, nats")
    axes[1, 0].set_xlabel("PPO update")
    _save(figure, path)


def _draw_training(
    experiment: Experiment, runs: Sequence[Any], without_kl: Sequence[Any], path: Path, *, narrow: bool
) -> None:
    """Draws reward and known truth by update, KL below them, and β = 0 beside both; below both if narrow."""
    groups = [(experiment.beta, runs), *([(0.0, without_kl)] if without_kl else [])]
    columns, rows = (1, 2 * len(groups)) if narrow else (len(groups), 2)
    figure, axes = _figure(columns, rows, height=2.1 * rows)
    pairs = list(axes.reshape(-1, 2) if narrow else axes.T)
    reward_label = "reward (a reward model)" if runs[0]["reward_model"] else "reward (a rule)"
    for (scores, kl), (beta, group) in zip(pairs, groups, strict=True):
        _plot_runs(scores, group, "reward", color=LEGIBLE_BLUE, label=reward_label)
        if "gold" in group[0]["curve"][0]:
            _plot_runs(scores, group, "gold", color=LEGIBLE_GREEN, label="truth (never trained on)")
        _plot_runs(kl, group, "kl", color=LEGIBLE_ORANGE, label="KL to SFT, nats")
        runs_shown = f"{'mean and range of ' if len(group) >= MANY else ''}{len(group)} run{'s' * (len(group) > 1)}"
        penalty = f"With a KL penalty, β = {beta:g}" if beta else "Without a KL penalty"
        scores.set_title(f"{penalty}\n{runs_shown}", loc="left")
        scores.tick_params(labelbottom=False)
        kl.set_xlabel("PPO update")
        for panel, first in ((scores, pairs[0][0]), (kl, pairs[0][1])):
            panel.legend(frameon=False, labelcolor="linecolor", handlelength=1.2, borderaxespad=0)
            if panel is not first:
                panel.sharey(first)  # with one scale, a collapse is visible as such
    _save(figure, path)


def _plot_runs(axes: Any, runs: Sequence[Any], key: str, *, label: str, color: str) -> None:
    """Plots a line for each run, or of many runs the mean, and a band from the lowest to the highest."""
    curves = [[(row["step"], row[key]) for row in run["curve"]] for run in runs]
    if len(runs) < MANY:
        for index, curve in enumerate(curves):
            axes.plot(*zip(*curve, strict=True), color=color, linewidth=1.1, label=None if index else label)
        return
    by_step: dict[int, list[float]] = {}
    for step, value in (point for curve in curves for point in curve):
        by_step.setdefault(step, []).append(value)
    steps, groups = zip(*sorted(by_step.items()), strict=True)
    axes.plot(steps, [fmean(group) for group in groups], color=color, linewidth=1.8, label=label)
    low, high = ([end(group) for group in groups] for end in (min, max))
    axes.fill_between(steps, low, high, alpha=0.18, color=color, linewidth=0)


def _figure(columns: int, rows: int, *, height: float) -> tuple[Any, Any]:
    """Makes a figure and its axes by row and column. Every second row is half as high."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4 * columns, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=False, height_ratios=[2, 1] * (rows // 2))
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    """Writes a PNG of 128 colors, a third of the size; it has no background, for light and dark pages."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    drawn, small = BytesIO(), BytesIO()
    FigureCanvasAgg(figure)
    make_transparent(figure, min_font_size=FONT_SIZE)
    figure.savefig(drawn, dpi=110, format="png")
    Image.open(drawn).quantize(128, method=Image.Quantize.FASTOCTREE).save(small, format="png", optimize=True)
    write_bytes(path, small.getvalue())
