"""The plots of the docs: training, over-optimisation with and without the KL penalty, PPO beside its baselines."""

import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any

from rlhf_zoo.fileio import write_bytes
from rlhf_zoo.publishing.plot_parts import BLUE_ON_ANY, GREEN_ON_ANY, ORANGE_ON_ANY, make_transparent
from rlhf_zoo.publishing.plots import plot_frontier

from . import keep
from .experiments import Experiment

MANY = 5  # runs whose lines could not be told apart
#: Recipes whose training is shown on first pages, also on phones.
ON_FIRST_PAGES = ("tiny-world",)
_SEED_COLORS = (BLUE_ON_ANY, GREEN_ON_ANY, ORANGE_ON_ANY)
FONT_SIZE = 12  # typographic points


def draw(experiment: Experiment) -> None:
    """The plots of a recipe, from what is kept; one of which nothing is kept is left as it is."""
    runs = keep.load(experiment.name("runs")).get("runs", [])
    ablation = keep.load(experiment.name("ablation")).get("runs", [])
    cut = [run for run in ablation if run["beta"] == 0]
    if runs:
        _training(experiment, runs, cut, keep.FOLDER / f"{experiment.recipe}.png", narrow=False)
        if experiment.recipe in ON_FIRST_PAGES:
            _training(experiment, runs, cut, keep.FOLDER / f"{experiment.recipe}-narrow.png", narrow=True)
    if ablation:
        _over_optimisation(experiment, ablation, keep.FOLDER / f"{experiment.recipe}-over-optimisation.png")
    if frontier := keep.load(experiment.name("baselines")):
        plot_frontier(frontier, keep.FOLDER / f"{experiment.recipe}-frontier.png")


_RIVALS = (
    ("SFT for twice as long", "sampled", "right: SFT for twice as long"),
    ("rejection fine-tuning", "sampled", "right: rejection fine-tuning"),
    ("SFT", "majority", "right: majority of 16 of SFT's"),
    ("SFT", "pass", "right: pass@16 of SFT's"),
)


def draw_sums(runs: Sequence[Any], path: Path) -> None:
    """What sums are paid, and how many show their work, against the update: the mean over seeds, and their range.

    Beside them the right answers of what could be had for less, to the test problems.
    """
    if not runs:
        return
    figure, axes = _figure(1, 2, height=6.4)
    panel, moved = axes[:, 0]
    _over_runs(panel, runs, "shows_work", color=GREEN_ON_ANY, label="shows its work (watched, unpaid)")
    _over_runs(panel, runs, "reward", color=BLUE_ON_ANY, label="right answer (the reward)")
    _over_runs(moved, runs, "kl", color=ORANGE_ON_ANY, label="KL to SFT, nats")
    last = runs[0]["curve"][-1]["step"]
    for place, (policy, figure_of, label) in enumerate(_RIVALS):
        result = [run["policies"][policy][figure_of]["value"] for run in runs]
        panel.errorbar(
            last + 2 + 2 * place, fmean(result), yerr=[[fmean(result) - min(result)], [max(result) - fmean(result)]],
            color=BLUE_ON_ANY, marker="osD^v"[place], markersize=5, linewidth=1, label=label,
        )  # fmt: skip
    panel.set_title(f"tiny-sums: rollouts at T = 1\nmean and range of {len(runs)} runs", loc="left")
    panel.set(ylabel="share of completions", ylim=(0, 1.02))
    panel.tick_params(labelbottom=False)
    moved.set_xlabel("PPO update")
    moved.sharex(panel)
    moved.legend(frameon=False, labelcolor="linecolor", handlelength=1.2)
    figure.legend(handles=panel.get_legend_handles_labels()[0], frameon=False, loc="outside lower left")
    _save(figure, path)


def draw_reviews(runs: Sequence[Any], path: Path) -> None:
    """Each seed's gain of the reward over its first update, which SFT sampled, and its KL; a column for each β."""
    if not runs:
        return
    figure, axes = _figure(2, 2, height=4.2)
    colors = dict(zip(sorted({run["seed"] for run in runs}), _SEED_COLORS, strict=True))
    for column, beta in enumerate(sorted({run["beta"] for run in runs}, reverse=True)):
        gained, moved = axes[:, column]
        for run in (run for run in runs if run["beta"] == beta):
            curve, style = run["curve"], {"color": colors[run["seed"]], "linewidth": 1.3}
            steps = [row["step"] for row in curve]
            gained.plot(steps, [row["reward"] - curve[0]["reward"] for row in curve], **style)
            moved.plot(steps, [row["kl"] for row in curve], label=f"seed {run['seed']}", **style)
        gained.set_title(f"With a KL penalty, β = {beta:g}" if beta else "Without a KL penalty", loc="left")
        gained.tick_params(labelbottom=False)
        moved.set_xlabel("PPO update")
        gained.sharey(axes[0, 0])
        moved.sharey(axes[1, 0])
    axes[0, 0].set_ylabel("reward, gain over SFT")
    axes[1, 0].set_ylabel("KL to SFT, nats")
    axes[1, 0].legend(frameon=False, labelcolor="linecolor", handlelength=1.2)
    _save(figure, path)


def path_points(run: Mapping[str, Any], name: str) -> list[tuple[int, float, float]]:
    """(step, √KL, score) of SFT, which is step 0 at KL 0, and of each checkpoint, on validation prompts."""
    start = (0, 0.0, run["validation"][name])
    return [start, *((one["step"], math.sqrt(max(one["kl"], 0.0)), one[name]) for one in run["checkpoints"])]


def _training(experiment: Experiment, runs: Sequence[Any], cut: Sequence[Any], path: Path, *, narrow: bool) -> None:
    """Reward, truth where it is known, and below them KL against the update; β = 0 beside that, or below if narrow."""
    groups = [(experiment.beta, runs), *([(0.0, cut)] if cut else [])]
    columns, rows = (1, 2 * len(groups)) if narrow else (len(groups), 2)
    figure, axes = _figure(columns, rows, height=2.1 * rows)
    pairs = list(axes.reshape(-1, 2) if narrow else axes.T)
    paid = "reward (a reward model)" if runs[0]["reward_model"] else "reward (a rule)"
    for (scores, moved), (beta, group) in zip(pairs, groups, strict=True):
        _over_runs(scores, group, "reward", color=BLUE_ON_ANY, label=paid)
        if "gold" in group[0]["curve"][0]:
            _over_runs(scores, group, "gold", color=GREEN_ON_ANY, label="truth (never trained on)")
        _over_runs(moved, group, "kl", color=ORANGE_ON_ANY, label="KL to SFT, nats")
        runs_shown = f"{'mean and range of ' if len(group) >= MANY else ''}{len(group)} run{'s' * (len(group) > 1)}"
        penalty = f"With a KL penalty, β = {beta:g}" if beta else "Without a KL penalty"
        scores.set_title(f"{penalty}\n{runs_shown}", loc="left")
        scores.tick_params(labelbottom=False)
        moved.set_xlabel("PPO update")
        for panel, first in ((scores, pairs[0][0]), (moved, pairs[0][1])):
            panel.legend(frameon=False, labelcolor="linecolor", handlelength=1.2, borderaxespad=0)
            if panel is not first:
                panel.sharey(first)  # on one scale, a collapse looks like one
    _save(figure, path)


def _over_runs(axes: Any, runs: Sequence[Any], name: str, *, label: str, color: str, **style: Any) -> None:
    """A line for each run; of many the mean, and a band from the lowest to the highest."""
    curves = [[(row["step"], row[name]) for row in run["curve"]] for run in runs]
    if len(runs) < MANY:
        for place, curve in enumerate(curves):
            line_label = None if place else label
            axes.plot(*zip(*curve, strict=True), color=color, linewidth=1.1, label=line_label, **style)
        return
    by_step: dict[int, list[float]] = {}
    for step, value in (point for curve in curves for point in curve):
        by_step.setdefault(step, []).append(value)
    steps, values = zip(*sorted(by_step.items()), strict=True)
    axes.plot(steps, [fmean(result) for result in values], color=color, linewidth=1.8, label=label, **style)
    low, high = ([end(result) for result in values] for end in (min, max))
    axes.fill_between(steps, low, high, alpha=0.18, color=color, linewidth=0)


def _over_optimisation(experiment: Experiment, runs: Sequence[Any], path: Path) -> None:
    """Reward and judge of each checkpoint against √KL, by β and seed; a ring marks the recommended checkpoint."""
    figure, axes = _figure(2)
    for panel, (name, title) in zip(axes[0], (("reward", "reward model (proxy)"), ("judge", "judge")), strict=True):
        labeled = set()
        for run in runs:
            color = ORANGE_ON_ANY if run["beta"] == 0 else BLUE_ON_ANY
            points = path_points(run, name)
            label = f"β = {run['beta']:g}"
            panel.plot(*zip(*((x, y) for _, x, y in points), strict=True), "o-", color=color, alpha=0.75, markersize=3,
                       linewidth=1.1, label=None if label in labeled else label)  # fmt: skip
            labeled.add(label)
            for step, x, y in points[1:]:
                if step == run["recommended"]:
                    panel.scatter(x, y, s=110, facecolors="none", edgecolors=color, linewidths=1.6, zorder=4)
        panel.set(
            title=f"{experiment.recipe}: {title}", xlabel="√KL to SFT, nats$^{1/2}$ per completion; ring: recommended"
        )
        panel.set_ylabel("mean on validation prompts")
        panel.legend(frameon=False, fontsize=8)
    _save(figure, path)


def _figure(columns: int, rows: int = 1, *, height: float = 3.8) -> tuple[Any, Any]:
    """A figure, and its axes by row and column: of two rows, the second is half as high."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4 * columns, height), layout="constrained")
    ratios = [2, 1] * (rows // 2) or None
    axes = figure.subplots(rows, columns, squeeze=False, sharex=False, height_ratios=ratios)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    """As a PNG of 128 colors, which takes a third of the bytes; without a background, for light and dark pages."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    drawn, small = BytesIO(), BytesIO()
    FigureCanvasAgg(figure)
    make_transparent(figure, size=FONT_SIZE)
    figure.savefig(drawn, dpi=110, format="png")
    Image.open(drawn).quantize(128, method=Image.Quantize.FASTOCTREE).save(small, format="png", optimize=True)
    write_bytes(path, small.getvalue())
