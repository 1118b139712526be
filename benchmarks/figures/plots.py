"""The plots of the docs: training, over-optimisation with and without the KL penalty, PPO beside its baselines."""

import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any

from rlhf_zoo.fileio import write_bytes
from rlhf_zoo.publishing.plots import plot_frontier

from . import keep
from .experiments import Experiment

MANY = 5  # runs whose lines could not be told apart
BLUE, GREEN, ORANGE = "#1f5fa8", "#2d7d46", "#c8501e"


def draw(experiment: Experiment) -> None:
    """The plots of a recipe, from what is kept; one of which nothing is kept is left as it is."""
    runs = keep.load(experiment.name("runs")).get("runs", [])
    ablation = keep.load(experiment.name("ablation")).get("runs", [])
    cut = [run for run in ablation if run["beta"] == 0]
    if runs:
        _training(experiment, runs, cut, keep.FOLDER / f"{experiment.recipe}.png")
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
    figure, (panel,) = _figure(1)
    right = panel.twinx()
    _over_runs(panel, runs, "shows_work", color=GREEN, linestyle="-", label="shows its work (watched, unpaid)")
    _over_runs(panel, runs, "reward", color=BLUE, linestyle="-", label="right answer (the reward)")
    _over_runs(right, runs, "kl", color=ORANGE, linestyle="--", label="KL (right)")
    last = runs[0]["curve"][-1]["step"]
    for place, (policy, figure_of, label) in enumerate(_RIVALS):
        found = [run["policies"][policy][figure_of]["value"] for run in runs]
        panel.errorbar(
            last + 2 + 2 * place, fmean(found), yerr=[[fmean(found) - min(found)], [max(found) - fmean(found)]],
            color=BLUE, marker="osD^v"[place], markersize=4, linewidth=1, label=label,
        )  # fmt: skip
    panel.set_title(f"tiny-sums: rollouts at T = 1 (mean and range of {len(runs)} runs)", fontsize=10.5)
    panel.set(xlabel="PPO update", ylabel="share of completions", ylim=(0, 1.02))
    right.set_ylabel("KL to SFT, nats per completion")
    handles = [*panel.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    panel.legend(handles=handles, frameon=False, fontsize=8, ncol=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    _save(figure, path)


def path_points(run: Mapping[str, Any], name: str) -> list[tuple[int, float, float]]:
    """(step, √KL, score) of SFT, which is step 0 at KL 0, and of each checkpoint, on validation prompts."""
    start = (0, 0.0, run["validation"][name])
    return [start, *((one["step"], math.sqrt(max(one["kl"], 0.0)), one[name]) for one in run["checkpoints"])]


def _training(experiment: Experiment, runs: Sequence[Any], cut: Sequence[Any], path: Path) -> None:
    """Proxy, gold where it is known, and KL against the update; β = 0 beside it."""
    recipe = experiment.recipe
    pairs = [(f"{recipe}: β = {experiment.beta:g}, the recipe's", runs), (f"{recipe}: β = 0", cut)]
    pairs = [(title, group) for title, group in pairs if group]
    paid = "reward model (proxy)" if runs[0]["reward_model"] else "reward (a rule)"
    figure, axes = _figure(len(pairs))
    for panel, (title, group) in zip(axes, pairs, strict=True):
        right = panel.twinx()
        lines = (
            (panel, "reward", BLUE, "-", paid),
            (panel, "gold", GREEN, "-", "gold utility (truth)"),
            (right, "kl", ORANGE, "--", "KL (right)"),
        )
        for side, name, color, style, label in lines:
            if name in group[0]["curve"][0]:
                _over_runs(side, group, name, color=color, linestyle=style, label=label)
        counted = f"{len(group)} run{'s' if len(group) > 1 else ''}"
        panel.set_title(f"{title} ({'mean and range of ' if len(group) >= MANY else ''}{counted})", fontsize=10.5)
        panel.set(xlabel="PPO update", ylabel="reward, gold utility" if "gold" in group[0]["curve"][0] else "reward")
        right.set_ylabel("KL to SFT, nats per completion")
        handles = [*panel.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
        panel.legend(handles=handles, framealpha=0.7, edgecolor="none", fontsize=8)
    _save(figure, path)


def _over_runs(axes: Any, runs: Sequence[Any], name: str, *, label: str, **style: Any) -> None:
    """A line for each run; of many the mean, and a band from the lowest to the highest."""
    curves = [[(row["step"], row[name]) for row in run["curve"]] for run in runs]
    if len(runs) < MANY:
        for place, curve in enumerate(curves):
            axes.plot(*zip(*curve, strict=True), alpha=0.75, linewidth=1.1, label=None if place else label, **style)
        return
    by_step: dict[int, list[float]] = {}
    for step, value in (point for curve in curves for point in curve):
        by_step.setdefault(step, []).append(value)
    steps, values = zip(*sorted(by_step.items()), strict=True)
    axes.plot(steps, [fmean(found) for found in values], linewidth=1.3, label=label, **style)
    low, high = ([end(found) for found in values] for end in (min, max))
    axes.fill_between(steps, low, high, alpha=0.15, color=style["color"], linewidth=0)


def _over_optimisation(experiment: Experiment, runs: Sequence[Any], path: Path) -> None:
    """Reward and judge of each checkpoint against √KL, by β and seed; a ring marks the recommended checkpoint."""
    figure, axes = _figure(2)
    for panel, (name, title) in zip(axes, (("reward", "reward model (proxy)"), ("judge", "judge")), strict=True):
        labeled = set()
        for run in runs:
            color = ORANGE if run["beta"] == 0 else BLUE
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


def _figure(panels: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4 * panels, 3.8), layout="constrained")
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def _save(figure: Any, path: Path) -> None:
    """As a PNG of 128 colors, which takes a third of the bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    drawn, small = BytesIO(), BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(drawn, dpi=110, format="png")
    Image.open(drawn).convert("RGB").quantize(128).save(small, format="png", optimize=True)
    write_bytes(path, small.getvalue())
