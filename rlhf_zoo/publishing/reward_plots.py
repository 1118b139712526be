"""Draws the plots of a reward model's card from its report; see `plots` for how."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..fileio import get_nested
from .plot_parts import (
    BLUE,
    GRAY,
    LEGIBLE_BLUE,
    LEGIBLE_GRAY,
    LEGIBLE_ORANGE,
    draw_estimates,
    make_transparent,
    new_figure,
    save,
)


def plot_margins(report: Mapping[str, Any] | None, path: Path) -> bool:
    """Draws a histogram of a reward model's margins on held-out pairs.

    Args:
        report: A report of `evaluation.calibration`.
        path: The PNG to write.
    """
    histogram = get_nested(report, "margin", "histogram")
    if not histogram or not sum(histogram["counts"]):
        return False
    counts, spans = histogram["counts"], list(pairwise(histogram["edges"]))
    figure, (axes,) = new_figure()
    axes.bar(
        [low for low, _ in spans],
        counts,
        width=[0.95 * (high - low) for low, high in spans],
        align="edge",
        color=[LEGIBLE_ORANGE if high <= 0 else LEGIBLE_BLUE for _, high in spans],
    )
    axes.axvline(0, color=LEGIBLE_GRAY, linewidth=1)
    share = sum(count for (_, high), count in zip(spans, counts, strict=True) if high <= 0) / sum(counts)
    axes.set(
        xlabel="score of the chosen text − score of the rejected one",
        ylabel="held-out pairs",
        title=f"{share:.0%} of {sum(counts)} held-out pairs are in the wrong order (orange)",
    )
    make_transparent(figure, min_font_size=14)
    return save(figure, path)


def plot_reliability(report: Mapping[str, Any] | None, path: Path) -> bool:
    """Draws the share of pairs in the right order by confidence, with 95% intervals, and the pairs of each bin below.

    Args:
        report: As in `plot_margins`.
        path: The PNG to write.
    """
    calibration = get_nested(report, "calibration")
    if not calibration or not calibration["bins"]:
        return False
    bins = [{**bin_, "value": bin_["accuracy"]} for bin_ in calibration["bins"]]
    figure, (accuracy_axes, count_axes) = new_figure(4.6, 2, gap=0.15, sharex=True, height_ratios=(3, 1))
    accuracy_axes.plot([0.5, 1], [0.5, 1], color=GRAY, linestyle=":", label="calibrated")
    draw_estimates(accuracy_axes, bins, "confidence", BLUE, "this model")
    title = f"Calibration: accuracy by confidence, ECE {calibration['ece']:.3f}"
    accuracy_axes.set(ylabel="share in the right order", title=title)
    accuracy_axes.legend(frameon=False, loc="lower right")
    for bin_ in bins:
        width = (bin_["high"] - bin_["low"]) * 0.94
        count_axes.bar(bin_["low"], bin_["n"], width=width, align="edge", color=BLUE, alpha=0.6)
    label = "confidence: σ(|margin|), the probability that the higher-scored text is better"
    count_axes.set(ylabel="pairs", xlabel=label, xlim=(0.49, 1.01))
    return save(figure, path)


def plot_score_by_length(report: Mapping[str, Any] | None, path: Path) -> bool:
    """Draws score against length for the texts of held-out pairs: means and quartiles in bins of equal counts.

    Args:
        report: As in `plot_margins`.
        path: The PNG to write.
    """
    length = get_nested(report, "length")
    if not length or len(length["bins"]) < 2:
        return False
    bins = length["bins"]
    figure, (axes,) = new_figure()
    x = [(bin_["low"] + bin_["high"]) / 2 for bin_ in bins]
    half_widths = [(bin_["high"] - bin_["low"]) / 2 for bin_ in bins]
    lows, highs = [bin_["low_score"] for bin_ in bins], [bin_["high_score"] for bin_ in bins]
    axes.vlines(x, lows, highs, color=BLUE, alpha=0.35, linewidth=6, label="middle half of the texts")
    axes.errorbar(
        x, [bin_["mean"] for bin_ in bins], xerr=half_widths, color=BLUE, marker="o", linewidth=1, label="mean"
    )
    rho = length.get("spearman")
    title = f"Score against length, {sum(bin_['n'] for bin_ in bins)} held-out texts"
    title += f"; Spearman's ρ {rho['value']:+.2f}" if rho else ""
    axes.set(xlabel="length of the completion, tokens", ylabel="raw score", title=title)
    axes.margins(y=0.15)
    axes.legend(frameon=False, ncols=2)
    return save(figure, path)
