"""Figures of a card, from rows of metrics. matplotlib is imported when one is drawn, and never opens a window."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from rlhf_zoo.record import write_bytes

__all__ = ["plot_curves", "plot_reward_and_kl", "series"]

Rows = Sequence[Mapping[str, Any]]
_BLUE, _ORANGE, _GREEN, _GREY = "#1f5fa8", "#c8501e", "#2d7d46", "#777777"


def series(rows: Iterable[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it was logged as a finite number."""
    pairs = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float)]
    finite = [(step, float(value)) for step, value in pairs if math.isfinite(value)]
    return [step for step, _ in finite], [value for _, value in finite]


def plot_reward_and_kl(rows: Rows, path: Path) -> bool:
    """Reward (left scale) and KL (right scale) of the training rollouts against the step, as one PNG.

    Returns False, and draws nothing, where either has fewer than two points.
    """
    reward, kl = series(rows, "objective/score"), series(rows, "objective/kl")
    if min(len(reward[0]), len(kl[0])) < 2:
        return False
    figure, left = _figure()
    right = left.twinx()
    right.spines["top"].set_visible(False)
    left.plot(*reward, color=_BLUE)
    right.plot(*kl, color=_ORANGE, linestyle="--")
    left.set_xlabel("PPO update")
    left.set_ylabel("reward (solid)", color=_BLUE)
    right.set_ylabel("KL, nats per completion (dashed)", color=_ORANGE)
    left.set_title("Reward, and KL to the reference, of the training rollouts")
    _save(figure, path)
    return True


def plot_curves(rows: Rows, labels: Mapping[str, str], path: Path, *, title: str, unit: str) -> bool:
    """The metrics named by `labels` {key: legend} against the step, on one scale, as one PNG.

    Returns False, and draws nothing, where none has two points.
    """
    curves = [(label, series(rows, key)) for key, label in labels.items()]
    drawn = [(label, curve) for label, curve in curves if len(curve[0]) >= 2]
    if not drawn:
        return False
    figure, axes = _figure()
    for (label, curve), color in zip(drawn, (_BLUE, _ORANGE, _GREEN, _GREY), strict=False):
        axes.plot(*curve, color=color, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.set_title(title)
    axes.legend(frameon=False)
    _save(figure, path)
    return True


def _figure() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.8), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.25)
    axes.spines["top"].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = BytesIO()
    # Without the version in it, the same numbers give the same bytes.
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    write_bytes(path, buffer.getvalue())
