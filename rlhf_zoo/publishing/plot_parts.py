"""Draws parts of the plots of cards: empty figures, lines with intervals, marks and arrows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..fileio import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GRAY, PURPLE, BROWN = "#1f5fa8", "#c8501e", "#2d7d46", "#777777", "#7b4fa3", "#8a6d3b"
#: Colors that are legible on white and on black.
LEGIBLE_BLUE, LEGIBLE_ORANGE, LEGIBLE_GREEN, LEGIBLE_GRAY = "#4184e4", "#d4772c", "#2da44e", "#7d8590"
WIDTH = 7.2  # inches, at 120 dpi
MAX_MARKERS = 60  # curves with more points show no markers
#: If less than this share of the judge's highest gain is left at the end, the title names the step with the highest.
MIN_SHARE_KEPT = 0.75
ARROW_COUNT = 5  # approximate number of arrows along a path


def over_training_title(trajectory: Mapping[str, Any], initial_policy: str = "SFT") -> str:
    """Returns the title of `plot_over_training`, which says how the reward and the judge changed during training.

    Args:
        trajectory: `over_training` of evaluation.json, with checkpoints.
        initial_policy: What PPO started from: "SFT" or "the base".
    """
    rows = [trajectory["sft"], *trajectory["checkpoints"]]
    rewards, judge_scores = ([row[name]["value"] for row in rows] for name in ("reward", "judge"))
    judge_intervals = [row["judge"]["ci95"] for row in rows]
    fall = trajectory.get("fall") or {}
    reward_clause = "Reward rises" if rewards[-1] > rewards[0] else "Reward does not rise"
    if judge_scores[-1] < judge_scores[0]:
        return f"{reward_clause}, the judge ends below {initial_policy}"
    if fall.get("detected"):
        return f"{reward_clause}, the judge falls after its peak"
    if judge_intervals[-1][0] <= judge_scores[0]:
        return f"{reward_clause}, the judge hardly changes"
    if fall.get("share_kept", 1.0) < MIN_SHARE_KEPT:
        return f"{reward_clause}, the judge is highest at step {fall['step']}"
    if rewards[-1] <= rewards[0]:
        return f"{reward_clause}, the judge does"
    verdict = trajectory.get("kind") or trajectory.get("verdict")  # `kind` is the verdict without numbers
    if verdict in ("suspicious", "hacked"):
        return f"Reward and judge rise, the verdict is {verdict}"
    # The last score lies within the interval of the first checkpoint, or below.
    levels_off = len(rows) > 2 and judge_scores[-1] <= judge_intervals[1][1]
    return "Reward and judge rise together" + (", then level off" if levels_off else "")


def sqrt_kl(kl: float) -> float:
    """Returns √KL; a negative estimate counts as 0.

    Args:
        kl: KL to the reference, nats per completion.
    """
    return math.sqrt(max(kl, 0.0))


def error_bars(points: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Returns the lengths of error bars below and above the points, as matplotlib's `yerr`.

    Args:
        points: Estimates, each with `value` and `ci95`.
    """
    lower = [max(point["value"] - point["ci95"][0], 0.0) for point in points]
    return [lower, [max(point["ci95"][1] - point["value"], 0.0) for point in points]]


def draw_estimates(axes: Axes, points: Sequence[Mapping[str, Any]], x_key: str, color: str, label: str) -> None:
    """Draws estimates with their intervals, joined by a line.

    Args:
        axes: matplotlib's axes.
        points: Estimates, each with `value`, `ci95` and the x coordinate.
        x_key: The key of the x coordinate.
        color: The line's color.
        label: Its entry in the legend.
    """
    x, y = [point[x_key] for point in points], [point["value"] for point in points]
    axes.errorbar(x, y, yerr=error_bars(points), color=color, marker="o", capsize=3, linewidth=1.3, label=label)


def draw_against_kl(axes: Axes, points: Sequence[Mapping[str, Any]], name: str, **style: Any) -> None:
    """Draws an estimate of each checkpoint against its √KL, with the estimate's interval.

    Args:
        axes: matplotlib's axes.
        points: Checkpoints, each with two estimates: `kl`, and the one to draw.
        name: The key of the estimate to draw.
        style: Keywords of `Axes.errorbar`.
    """
    distances = [sqrt_kl(point["kl"]["value"]) for point in points]
    estimates = [point[name] for point in points]
    values = [estimate["value"] for estimate in estimates]
    style = {"linewidth": 1.4, "markersize": 5} | style
    axes.errorbar(distances, values, yerr=error_bars(estimates), capsize=2.5, **style)


def draw_band(axes: Axes, x: Sequence[float], points: Sequence[Mapping[str, Any]], color: str) -> None:
    """Draws estimates as a line, and their intervals as a band around it.

    Args:
        axes: matplotlib's axes.
        x: The x coordinates of the points.
        points: Estimates, each with `value` and `ci95`.
        color: The color of line and band.
    """
    axes.fill_between(
        x, [point["ci95"][0] for point in points], [point["ci95"][1] for point in points], color=color, alpha=0.18, lw=0
    )
    axes.plot(x, [point["value"] for point in points], color=color, linewidth=2.5, marker="o", markersize=6)


def label_lines(axes: Axes, labels: Sequence[tuple[str, str]]) -> None:
    """Writes the names of a panel's lines above it, in their colors. A legend would take space in the panel.

    Args:
        axes: matplotlib's axes.
        labels: (label, color) of each line, from the left.
    """
    shift = 0
    for label, color in labels:
        style = {"xycoords": "axes fraction", "va": "bottom", "color": color, "fontweight": "bold"}
        annotate(axes, label, (0, 1), (shift, 4), **style)
        shift += 11 * len(label) + 12  # in points (1/72 inch); enough for the label in a 15-point font


def make_transparent(figure: Figure, *, min_font_size: float) -> None:
    """Makes a figure's background transparent, and its texts large and legible on white and on black.

    Black text turns gray.

    Args:
        figure: matplotlib's figure.
        min_font_size: Smaller texts are enlarged to this size, in points (1/72 inch).
    """
    from matplotlib.text import Text

    figure.patch.set_alpha(0)
    for axes in figure.axes:
        axes.patch.set_alpha(0)
        axes.spines[["top", "right"]].set_visible(False)
        for spine in axes.spines.values():
            spine.set_color(LEGIBLE_GRAY)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_tick_params("both", labelsize=min_font_size, color=LEGIBLE_GRAY, labelcolor=LEGIBLE_GRAY)
    for text in figure.findobj(Text):
        text.set_fontsize(max(min_font_size, text.get_fontsize()))
        if text.get_color() == "black":
            text.set_color(LEGIBLE_GRAY)


def arrows(points: Sequence[tuple[float, float]]) -> Iterable[tuple[tuple[float, float], tuple[float, float]]]:
    """Yields (start, end) of about `ARROW_COUNT` arrows along a path. Very short arrows are left out.

    Args:
        points: The path, from its beginning.
    """
    spans = [max(column) - min(column) or 1.0 for column in zip(*points, strict=True)]

    def length(start: tuple[float, float], end: tuple[float, float]) -> float:
        return math.hypot(*((after - before) / span for before, after, span in zip(start, end, spans, strict=True)))

    stride = max(1, (len(points) - 1) // ARROW_COUNT)
    for start, end in pairwise([*points[::stride], points[-1]]):
        if length(start, end) > 0.06:  # in units of the path's extent
            yield start, end


def set_log_y(axes: Axes) -> None:
    """Makes the y axis logarithmic, with plain numbers at its ticks.

    Args:
        axes: matplotlib's axes.
    """
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())


def line_style(steps: Sequence[int], marker: str = "o", size: float = 3.5) -> dict[str, Any]:
    """Returns keywords of `Axes.plot` for a line over steps, with markers unless it has too many points.

    Args:
        steps: The x coordinates.
        marker: The marker of a point.
        size: The marker's size.
    """
    return {"marker": marker if len(steps) <= MAX_MARKERS else None, "markersize": size, "linewidth": 1.4}


def annotate(axes: Axes, text: str, point: tuple[float, float], shift: tuple[int, int], **style: Any) -> None:
    """Writes text beside a point.

    Args:
        axes: matplotlib's axes.
        text: The text, such as a step.
        point: Coordinates of the point.
        shift: The distance from the point, right and up, in points (1/72 inch).
        style: Keywords of `Axes.annotate`.
    """
    axes.annotate(text, point, xytext=shift, textcoords="offset points", **style)


def draw_ring(axes: Axes, x: float, y: float) -> None:
    """Draws a ring around a point.

    Args:
        axes: matplotlib's axes.
        x: The point's x coordinate.
        y: Its y coordinate.
    """
    axes.scatter(x, y, s=125, facecolors="none", edgecolors=ORANGE, linewidths=2, zorder=4)


def mark_step(axes: Axes, step: int | None) -> None:
    """Draws a vertical line at a step, with a label.

    Args:
        axes: matplotlib's axes over steps.
        step: The step; None draws nothing.
    """
    if step is not None:
        axes.axvline(step, color=GRAY, linestyle=":", linewidth=1.5)
        annotate(
            axes, f"step {step}", (step, 1), (3, -10), xycoords=("data", "axes fraction"), fontsize=8.5, color=GRAY
        )


def new_figure(
    height: float = 3.8,
    rows: int = 1,
    *,
    columns: int = 1,
    left: float = 0.9,
    right: float = 0.15,
    top: float = 0.4,
    gap: float = 0.0,
    **options: Any,
) -> tuple[Figure, list[Axes]]:
    """Makes a figure with a grid of axes. All lengths are in inches.

    Margins are fixed, because matplotlib's own layouts take as long as the drawing itself.

    Args:
        height: The figure's height.
        rows: The number of rows.
        columns: The number of columns.
        left: The margin left of each column.
        right: The margin at the right.
        top: The margin at the top.
        gap: The gap between rows.
        options: Keywords of `Figure.subplots`.

    Returns:
        The figure, and its axes in one list: the first row from the left, then the second, and so on.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # The working directory may be a download, and a matplotlibrc in it could make matplotlib run LaTeX for each text.
    matplotlib.rc("text", usetex=False)
    bottom = 0.6
    axes_height = (height - top - bottom - gap * (rows - 1)) / rows
    axes_width = (WIDTH - right - columns * left) / columns
    figure = Figure(figsize=(WIDTH, height), dpi=120)
    figure.subplots_adjust(left / WIDTH, bottom / height, 1 - right / WIDTH, 1 - top / height)
    figure.subplots_adjust(hspace=gap / axes_height, wspace=left / axes_width)
    all_axes = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for axes in all_axes:
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, all_axes


def save(figure: Figure, path: Path) -> bool:
    """Writes a figure as PNG, and returns True.

    Args:
        figure: The figure.
        path: The file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for axes in figure.axes:  # with a fixed y, matplotlib does not have to place the title above the ticks
        axes.set_title(axes.get_title(), fontsize=axes.title.get_fontsize(), y=1.0)
    buffer = BytesIO()
    # Without matplotlib's version in the file, the same numbers give the same bytes.
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    write_bytes(path, buffer.getvalue())
    return True
