"""Draws the plots of cards, from logged metrics and evaluations.

matplotlib is imported only when a plot is drawn, and never opens a window. Each `plot_` function writes one PNG as wide
as a card and returns True, or returns False if there is too little data for a plot.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..fileio import is_finite
from .plot_parts import (
    BLUE,
    BROWN,
    GRAY,
    GREEN,
    LEGIBLE_BLUE,
    LEGIBLE_GRAY,
    LEGIBLE_GREEN,
    LEGIBLE_ORANGE,
    ORANGE,
    PURPLE,
    WIDTH,
    annotate,
    arrows,
    draw_against_kl,
    draw_band,
    draw_estimates,
    draw_ring,
    error_bars,
    label_lines,
    line_style,
    make_transparent,
    mark_step,
    new_figure,
    over_training_title,
    save,
    set_log_y,
    sqrt_kl,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, Any]]
#: (metric, title, unit).
Panel = tuple[str, str, str]
#: (steps, values) of a metric.
Curve = tuple[list[int], list[float]]
MAX_TICKS = 9  # with more checkpoints, matplotlib chooses the ticks
_MAX_LABEL = 36  # characters of a row's label; a longer label loses its beginning
_SQRT_KL_UNIT = "nats$^{1/2}$ per completion"


def series(rows: Iterable[Mapping[str, Any]], key: str) -> Curve:
    """Returns the steps and values of one metric, where it was logged as a finite number.

    Args:
        rows: Rows of metrics.jsonl.
        key: Name of the metric.
    """
    points = [(row["step"], float(row[key])) for row in rows if is_finite(row.get(key))]
    return [step for step, _ in points], [value for _, value in points]


def _has_two_points(*curves: Curve) -> bool:
    """Whether each curve has at least two points."""
    return all(len(steps) >= 2 for steps, _ in curves)


def plot_reward_and_kl(rows: Rows, path: Path, *, mark: int | None = None) -> bool:
    """Draws reward (left scale) and KL (right scale) of the training rollouts by step. Needs two points of each.

    Args:
        rows: Rows of metrics.jsonl.
        path: The PNG to write.
        mark: The step to mark, which the card describes; None if the rows end there.
    """
    reward, kl = series(rows, "objective/score"), series(rows, "objective/kl")
    if not _has_two_points(reward, kl):
        return False
    figure, (reward_axes,) = new_figure(right=0.9)
    kl_axes = reward_axes.twinx()
    kl_axes.spines["top"].set_visible(False)
    reward_axes.plot(*reward, color=BLUE, **line_style(reward[0]))
    kl_axes.plot(*kl, color=ORANGE, linestyle="--", **line_style(kl[0], "s"))
    kl_axes.set_ylim(bottom=min(0.0, *kl[1]))
    reward_axes.set(xlabel="PPO update", title="Reward, and KL to the reference, of the training rollouts")
    reward_axes.set_ylabel("reward (solid, dots)", color=BLUE)
    kl_axes.set_ylabel("KL, nats per completion (dashed, squares)", color=ORANGE)
    mark_step(reward_axes, mark)
    return save(figure, path)


def plot_reward_against_kl(rows: Rows, path: Path, *, mark: int | None = None) -> bool:
    """Draws reward against √KL of the training rollouts; arrows show the order of the steps. Needs two points.

    Over √KL, the gold reward of a hacked proxy rises and then falls: Gao et al. 2022 (arXiv:2210.10760), §3.

    Args:
        rows: Rows of metrics.jsonl.
        path: The PNG to write.
        mark: As in `plot_reward_and_kl`.
    """
    points = [
        (row["step"], sqrt_kl(row["objective/kl"]), row["objective/score"])
        for row in rows
        if all(is_finite(row.get(key)) for key in ("objective/kl", "objective/score"))
    ]
    if len(points) < 2:
        return False
    steps, distances, rewards = (list(column) for column in zip(*points, strict=True))
    figure, (axes,) = new_figure(4.2)
    axes.plot(distances, rewards, color=GRAY, linewidth=0.8, alpha=0.7, zorder=1)
    dots = axes.scatter(distances, rewards, c=steps, cmap="viridis", s=26, zorder=2)
    figure.colorbar(dots, ax=axes, pad=0.02, fraction=0.12, label="PPO update")
    for start, end in arrows(list(zip(distances, rewards, strict=True))):
        style = {"arrowstyle": "-|>", "color": "black", "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", xy=end, xytext=start, arrowprops=style, zorder=3)
    for index, shift in ((0, -17), (-1, 12)):
        annotate(
            axes, f"update {steps[index]}", (distances[index], rewards[index]), (0, shift), ha="center", fontsize=9
        )
    title = "Reward against √KL; arrows: order of training"
    if mark in steps:
        draw_ring(axes, distances[steps.index(mark)], rewards[steps.index(mark)])
        title += f"; ring: step {mark}"
    axes.margins(x=0.06, y=0.12)
    axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
    axes.set(xlabel=f"√KL to the reference, {_SQRT_KL_UNIT}", ylabel="reward of the rollouts", title=title)
    return save(figure, path)


def plot_ablation(runs: Mapping[str, Rows], path: Path) -> bool:
    """Draws reward and KL of several runs against the step, and reward against √KL, all on the training rollouts.

    Args:
        runs: Legend -> rows of metrics.jsonl, in the order of the legend. One run must have two points of each metric.
        path: The PNG to write.
    """
    from matplotlib import colormaps

    curves = {name: (series(rows, "objective/score"), series(rows, "objective/kl")) for name, rows in runs.items()}
    if not any(_has_two_points(reward, kl) for reward, kl in curves.values()):
        return False
    figure, (reward_axes, kl_axes, combined_axes) = new_figure(7.4, 3, top=0.15, gap=0.6, height_ratios=(3, 3, 4))
    for index, (name, (reward, kl)) in enumerate(curves.items()):
        if not _has_two_points(reward, kl):
            continue
        style = {"color": colormaps["viridis"](0.05 + 0.85 * index / max(len(runs) - 1, 1)), **line_style(reward[0])}
        reward_axes.plot(*reward, label=name, **style)
        kl_axes.plot(*kl, **style)
        kl_by_step = dict(zip(*kl, strict=True))
        points = [(sqrt_kl(kl_by_step[step]), value) for step, value in zip(*reward, strict=True) if step in kl_by_step]
        combined_axes.plot(*zip(*points, strict=True), **style)
    reward_axes.set(xlabel="PPO update", ylabel="reward")
    kl_axes.set(xlabel="PPO update", ylabel="KL to the reference, nats")
    combined_axes.set(xlabel=f"√KL to the reference, {_SQRT_KL_UNIT}", ylabel="reward")
    reward_axes.legend(frameon=False, fontsize=8.5)
    return save(figure, path)


def plot_over_training(trajectory: Mapping[str, Any] | None, path: Path, *, initial_policy: str = "SFT") -> bool:
    """Draws reward and judge of each checkpoint on validation prompts, and KL below, with 95% bands.

    The judge gets its own scale at the right if a shared one would flatten one of the two curves. A line marks the
    recommended checkpoint.

    Args:
        trajectory: `over_training` of evaluation.json; without checkpoints nothing is drawn.
        path: The PNG to write.
        initial_policy: What PPO started from: "SFT" or "the base".
    """
    if not trajectory or not trajectory.get("checkpoints"):
        return False
    rows = [trajectory["sft"], *trajectory["checkpoints"]]
    steps = [0, *(row["step"] for row in trajectory["checkpoints"])]
    values_by_key = {key: [row[key]["value"] for row in rows] for key in ("reward", "judge")}
    spans = [max(values) - min(values) or 1e-9 for values in values_by_key.values()]
    separate_scales = max(spans) >= 4 * min(spans)
    figure, (reward_axes, kl_axes) = new_figure(
        3.8, 2, left=0.75, right=0.75 if separate_scales else 0.1, top=0.85, gap=0.4, sharex=True, height_ratios=(3, 2)
    )
    judge_axes = reward_axes.twinx() if separate_scales else reward_axes
    draw_band(reward_axes, steps, [row["reward"] for row in rows], LEGIBLE_BLUE)
    draw_band(judge_axes, steps, [row["judge"] for row in rows], LEGIBLE_GREEN)
    draw_band(kl_axes, steps, [row["kl"] for row in rows], LEGIBLE_ORANGE)
    kl_axes.set_ylim(bottom=min(0.0, kl_axes.get_ylim()[0]))
    label_lines(reward_axes, [("reward", LEGIBLE_BLUE), ("judge" + " (right)" * separate_scales, LEGIBLE_GREEN)])
    start_title = initial_policy.removeprefix("the ")
    label_lines(kl_axes, [(f"KL to {start_title}, nats", LEGIBLE_ORANGE)])
    recommended_step = trajectory.get("recommended")
    if recommended_step is not None:
        for axes in (reward_axes, kl_axes):
            axes.axvline(recommended_step, color=LEGIBLE_GRAY, linestyle=(0, (4, 4)), linewidth=1.5)
        shift, alignment = (6, "left") if recommended_step < max(steps) / 2 else (-6, "right")
        annotate(
            kl_axes, f"step {recommended_step}: recommended", (recommended_step, 0), (shift, 6),
            xycoords=("data", "axes fraction"), ha=alignment,
        )  # fmt: skip
    if len(steps) <= MAX_TICKS:
        kl_axes.set_xticks(steps)
    kl_axes.set_xlabel(f"PPO update (0 = {start_title}); {trajectory['prompts']} validation prompts")
    title = over_training_title(trajectory, initial_policy)
    figure.suptitle(title, x=0.02, y=0.985, ha="left", fontsize=17, fontweight="bold")
    make_transparent(figure, min_font_size=15)
    figure.subplots_adjust(left=max(0.75, *(0.12 + _label_width(axes) for axes in (reward_axes, kl_axes))) / WIDTH)
    if separate_scales:
        reward_axes.tick_params(axis="y", labelcolor=LEGIBLE_BLUE)
        judge_axes.tick_params(axis="y", labelcolor=LEGIBLE_GREEN)
    return save(figure, path)


def _label_width(axes: Axes) -> float:
    """Estimates the width of the y axis's labels, in inches at 15 points, without drawing them."""
    labels = axes.yaxis.get_major_formatter().format_ticks(list(axes.get_yticks()))
    return max(sum({".": 0.07, "−": 0.18}.get(letter, 0.135) for letter in label) for label in labels)


def plot_against_kl(trajectory: Mapping[str, Any] | None, path: Path, *, initial_policy: str = "SFT") -> bool:
    """Draws training reward and judge of each checkpoint against √KL on validation prompts, with 95% intervals.

    Gray curves are the fits, from the lowest to the highest KL of the checkpoints. A ring marks the recommended
    checkpoint. Needs one checkpoint besides the start.

    Args:
        trajectory: `over_training` of evaluation.json.
        path: The PNG to write.
        initial_policy: As in `plot_over_training`.
    """
    if not trajectory or not trajectory.get("checkpoints"):
        return False
    rows = [trajectory["sft"], *trajectory["checkpoints"]]
    distances = [sqrt_kl(row["kl"]["value"]) for row in rows]
    labels = [initial_policy.removeprefix("the "), *(str(row["step"]) for row in trajectory["checkpoints"])]
    figure, (reward_axes, judge_axes) = new_figure(5.6, 2, gap=0.35, sharex=True)
    fits = trajectory.get("fits") or {}
    for axes, key, title, color, fit in (
        (reward_axes, "reward", "training reward (the proxy)", BLUE, fits.get("proxy")),
        (judge_axes, "judge", f"judge: {trajectory['judge']}", GREEN, fits.get("judge")),
    ):
        draw_against_kl(axes, rows, key, color=color, fmt="o", markersize=4.5, linewidth=1)
        values = [row[key]["value"] for row in rows]
        if fit:
            # R(d) = R(0) + d (α − β ln d), with d = √KL: Gao et al. 2022 (arXiv:2210.10760), §3.
            low, high = min(distances[1:]), max(distances[1:])
            x = [d for d in (low + (high - low) * percent / 100 for percent in range(101)) if d > 0]
            alpha, beta = (fit[name]["value"] for name in ("alpha", "beta"))
            axes.plot(x, [values[0] + d * (alpha - beta * math.log(d)) for d in x], color=GRAY, linewidth=1)
        for label, distance, value in zip(labels, distances, values, strict=True):
            annotate(axes, label, (distance, value), (5, -11), fontsize=8.5)
            if label == str(trajectory.get("recommended")):
                draw_ring(axes, distance, value)
        axes.set_title(title, fontsize=10)
    judge_axes.set_xlabel(f"√KL to {initial_policy}, {_SQRT_KL_UNIT}; numbers: steps; ring: recommended")
    return save(figure, path)


def plot_frontier(frontier: Mapping[str, Any], path: Path, *, initial_policy: str = "SFT") -> bool:
    """Draws judge and reward against √KL: PPO as a star on the line of its runs with other β, and each baseline method.

    Bars are 95% intervals. A line is dashed if the KL of its method is an upper bound. Needs one baseline method.

    Args:
        frontier: frontier.json of baselines.
        path: The PNG to write.
        initial_policy: As in `plot_over_training`.
    """
    if not frontier.get("methods"):
        return False
    figure, (judge_axes, reward_axes) = new_figure(7.4, 2, top=0.45, gap=0.15, sharex=True)
    for axes, key in ((judge_axes, "judge"), (reward_axes, "reward")):
        for color, marker, (method, points) in zip(
            (BLUE, GREEN, GRAY, PURPLE, BROWN), "osD^v", frontier["methods"].items(), strict=False
        ):
            sorted_points = sorted(points, key=lambda point: point["kl"]["value"])
            is_bound = any(point["kl"]["is_bound"] for point in sorted_points)
            title = method if len(sorted_points) > 1 else f"{method}, {sorted_points[0]['label']}"
            label = f"{title}, at the upper bound of its KL" if is_bound else title
            draw_against_kl(
                axes, sorted_points, key, color=color, marker=marker, linestyle="--" if is_bound else "-", label=label
            )
        draw_against_kl(axes, [frontier["sft"]], key, color="black", marker="x", label=initial_policy)
        ppo_points = sorted([*frontier["ppo_ablation"], frontier["ppo"]], key=lambda point: point["kl"]["value"])
        draw_against_kl(axes, ppo_points, key, color=ORANGE, marker="o", markersize=3)
        draw_against_kl(axes, [frontier["ppo"]], key, color=ORANGE, marker="*", markersize=13, label="PPO")
        axes.set_xlim(left=-0.05)
    judge_axes.set_ylabel(f"judge: {frontier['judge']}")
    judge_axes.legend(frameon=False, fontsize=8.5)
    reward_axes.set(ylabel="reward: what PPO maximizes", xlabel=f"√KL to {initial_policy}, {_SQRT_KL_UNIT}")
    figure.suptitle(f"What each method reaches, and how far from {initial_policy}", fontsize=11)
    return save(figure, path)


def plot_win_rates(comparison: Mapping[str, Any], path: Path) -> bool:
    """Draws a policy's win rate by each judge with its 95% interval, and the control.

    Args:
        comparison: Result of `evaluation.head_to_head`.
        path: The PNG to write.
    """
    rows = [(f"by {name}", judge["win_rate"], BLUE) for name, judge in comparison["judges"].items()]
    votes = comparison.get("votes") or {}
    rows += [(f"by votes, {name}", vote["win_rate"], GREEN) for name, vote in votes.items() if vote["win_rate"]]
    rows += [("at equal length", comparison["win_rate_at_equal_length"], ORANGE)]
    rows += [("control: the reference over itself", comparison["control"], GRAY)]
    figure, (axes,) = new_figure(1.2 + 0.42 * len(rows), left=3.15, top=0.15)
    for index, (_, estimate, color) in enumerate(rows):
        axes.plot(estimate["ci95"], [index, index], color=color, linewidth=2)
        axes.plot(estimate["value"], index, "o", color=color, markersize=6)
    axes.axvline(0.5, color="black", linewidth=1)
    labels = [label if len(label) <= _MAX_LABEL else f"…{label[1 - _MAX_LABEL :]}" for label, _, _ in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=9, parse_math=False)
    axes.invert_yaxis()
    axes.set(xlim=(-0.02, 1.02), xlabel=f"win rate, 95% interval (n = {comparison['n']})")
    return save(figure, path)


def plot_ensemble(overview: Mapping[str, Any], path: Path) -> bool:
    """Draws the accuracy of each reward model and of the ensemble, and their disagreement by log-ratio.

    The second panel needs an evaluation of PPO's completions. Its dashed line and band show the disagreement on SFT's
    completions, its dotted line the disagreement of unrelated models. Bars are 95% intervals.

    Args:
        overview: overview.json of an ensemble.
        path: The PNG to write.
    """
    disagreement, fifths = overview["disagreement"], overview["disagreement"]["by_kl"]
    layout: dict[str, Any] = {"rows": 2, "height_ratios": (2, 3)} if fifths else {}
    figure, (accuracy_axes, *by_kl_axes) = new_figure(6.0 if fifths else 3.8, top=0.15, gap=0.65, left=1.1, **layout)
    names = [*(f"seed {model['seed']}" for model in overview["models"]), "mean of all"]
    accuracies = [*(model["accuracy"] for model in overview["models"]), overview["ensemble"]["accuracy"]]
    for index, accuracy in enumerate(accuracies):
        color = ORANGE if index == len(accuracies) - 1 else BLUE
        accuracy_axes.errorbar(accuracy["value"], index, xerr=error_bars([accuracy]), color=color, fmt="o", capsize=3)
    accuracy_axes.set_yticks(range(len(names)), names)
    accuracy_axes.invert_yaxis()
    accuracy_axes.margins(y=0.2)
    accuracy_axes.set_xlabel(f"accuracy on {accuracies[0]['n']} held-out pairs")
    for axes in by_kl_axes:
        draw_estimates(axes, fifths, "kl", ORANGE, "PPO's completions, in fifths")
        axes.axhline(disagreement["sft"]["value"], color=BLUE, linestyle="--", linewidth=1.3, label="SFT's completions")
        axes.axhspan(*disagreement["sft"]["ci95"], color=BLUE, alpha=0.15, linewidth=0)
        axes.axhline(disagreement["unrelated"], color=GRAY, linestyle=":", label="unrelated models")
        axes.set_ylim(bottom=0)
        axes.set(xlabel="log π − log π$_{SFT}$ of a completion, nats", ylabel="disagreement")
        axes.legend(frameon=False, fontsize=8.5)
    return save(figure, path)


def plot_panels(rows: Rows, panels: Sequence[Panel], path: Path, *, mark: int | None = None) -> bool:
    """Draws metrics against the step: one per panel, two panels per row. Leaves out metrics with fewer than two points.

    Args:
        rows: Rows of metrics.jsonl.
        panels: (metric, title, unit) of each panel.
        path: The PNG to write.
        mark: As in `plot_reward_and_kl`.
    """
    all_panels = [(title, unit, series(rows, key)) for key, title, unit in panels]
    filled_panels = [panel for panel in all_panels if _has_two_points(panel[-1])]
    if not filled_panels:
        return False
    row_count = math.ceil(len(filled_panels) / 2)
    figure, all_axes = new_figure(2.3 * row_count + 0.2, row_count, columns=2, left=0.8, gap=0.55, sharex=True)
    for axes, (title, unit, curve) in zip(all_axes, filled_panels, strict=False):
        axes.plot(*curve, color=BLUE, **line_style(curve[0], size=2.5))
        axes.set_title(title, fontsize=10)
        axes.set_ylabel(unit, fontsize=9)
        axes.tick_params(labelsize=8.5, labelbottom=True)
        mark_step(axes, mark)
    for axes in all_axes[len(filled_panels) :]:
        axes.set_visible(False)
    for axes in all_axes[: len(filled_panels)][-2:]:  # the lowest panel of each column
        axes.set_xlabel("PPO update", fontsize=9)
    return save(figure, path)


def plot_curves(
    rows: Rows, labels: Mapping[str, str], path: Path, *, title: str, unit: str, mark: int | None = None
) -> bool:
    """Draws metrics against the step on one scale. Leaves out metrics with fewer than two points.

    Args:
        rows: Rows of metrics.jsonl.
        labels: Metric -> legend.
        path: The PNG to write.
        title: Title of the figure.
        unit: Label of the y axis.
        mark: As in `plot_reward_and_kl`.
    """
    curves = {label: series(rows, key) for key, label in labels.items()}
    visible_curves = {label: curve for label, curve in curves.items() if _has_two_points(curve)}
    if not visible_curves:
        return False
    figure, (axes,) = new_figure(left=1.1)
    colors = (LEGIBLE_BLUE, LEGIBLE_ORANGE, LEGIBLE_GREEN, LEGIBLE_GRAY)
    for (label, curve), color in zip(visible_curves.items(), colors, strict=False):
        axes.plot(*curve, color=color, label=label, **line_style(curve[0]))
    axes.set(xlabel="optimizer step", ylabel=unit, title=title)
    axes.legend(frameon=False)
    values = [value for _, curve_values in visible_curves.values() for value in curve_values]
    if min(values) > 0 and max(values) > 3 * min(values):
        set_log_y(axes)  # on a linear scale, the high values of the first steps would flatten the curve
    mark_step(axes, mark)
    make_transparent(figure, min_font_size=14)
    return save(figure, path)
