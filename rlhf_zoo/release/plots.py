"""Figures of a card, from rows of metrics and from a reward model's report.

matplotlib is imported when one is drawn, and never opens a window. Each plot writes one PNG as wide as a card, or
nothing, and returns whether it drew.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..json_values import finite
from ..record import write_bytes

__all__ = [
    "Panel",
    "plot_ablation",
    "plot_curves",
    "plot_ensemble",
    "plot_frontier",
    "plot_margins",
    "plot_over_training",
    "plot_panels",
    "plot_reliability",
    "plot_reward_against_kl",
    "plot_reward_and_kl",
    "plot_score_by_length",
    "plot_win_rates",
    "series",
]

Rows = Sequence[Mapping[str, Any]]
# (metric, title, unit)
Panel = tuple[str, str, str]
_BLUE, _ORANGE, _GREEN, _GRAY = "#1f5fa8", "#c8501e", "#2d7d46", "#777777"
_WIDTH = 7.2  # inches, at 120 dots each
_LABEL = 36  # characters of a row's label; of a longer one the end says more
_POINTS = 60  # with more, a curve shows no markers


def series(rows: Iterable[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it was logged as a finite number."""
    pairs = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float)]
    finite = [(step, float(value)) for step, value in pairs if math.isfinite(value)]
    return [step for step, _ in finite], [value for _, value in finite]


def plot_reward_and_kl(rows: Rows, path: Path, *, mark: int | None = None) -> bool:
    """Reward (left scale) and KL (right scale) of the training rollouts against the step.

    mark: the step of the card, where the run went on after it. Needs two points of each.
    """
    reward, kl = series(rows, "objective/score"), series(rows, "objective/kl")
    if min(len(reward[0]), len(kl[0])) < 2:
        return False
    figure, left = _figure()
    right = left.twinx()
    right.spines["top"].set_visible(False)
    left.plot(*reward, color=_BLUE, **_style(reward[0], "o"))
    right.plot(*kl, color=_ORANGE, linestyle="--", **_style(kl[0], "s"))
    right.set_ylim(bottom=min(0.0, *kl[1]))
    left.set_xlabel("PPO update")
    left.set_ylabel("reward (solid, dots)", color=_BLUE)
    right.set_ylabel("KL, nats per completion (dashed, squares)", color=_ORANGE)
    left.set_title("Reward, and KL to the reference, of the training rollouts")
    _mark(left, mark)
    _save(figure, path)
    return True


def plot_reward_against_kl(rows: Rows, path: Path, *, mark: int | None = None) -> bool:
    """Reward against √KL of the training rollouts, in the order of the steps, which arrows show.

    Along √KL because the gold reward of a hacked proxy bends in it: Gao et al. 2022 (arXiv:2210.10760), §3. An estimate
    of KL below 0 counts as 0. Needs two points.
    """
    points = [
        (row["step"], math.sqrt(max(row["objective/kl"], 0.0)), row["objective/score"])
        for row in rows
        if all(finite(row.get(key)) for key in ("objective/kl", "objective/score"))
    ]
    if len(points) < 2:
        return False
    steps, roots, rewards = (list(column) for column in zip(*points, strict=True))
    figure, axes = _figure(height=4.2)
    axes.plot(roots, rewards, color=_GRAY, linewidth=0.8, alpha=0.7, zorder=1)
    dots = axes.scatter(roots, rewards, c=steps, cmap="viridis", s=26, zorder=2)
    bar = figure.colorbar(dots, ax=axes, pad=0.02)
    bar.set_label("PPO update")
    for start, end in _arrows(list(zip(roots, rewards, strict=True))):
        style = {"arrowstyle": "-|>", "color": "black", "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", xy=end, xytext=start, arrowprops=style, zorder=3)
    for place, above in ((0, False), (-1, True)):
        axes.annotate(
            f"update {steps[place]}",
            (roots[place], rewards[place]),
            xytext=(0, 12 if above else -17),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    if mark in steps:
        at = steps.index(mark)
        axes.scatter(roots[at], rewards[at], s=120, facecolors="none", edgecolors=_ORANGE, linewidths=2, zorder=4)
        axes.set_title(f"Reward against √KL; arrows: the order of training; ring: step {mark}")
    else:
        axes.set_title("Reward against √KL; arrows: the order of training")
    axes.margins(x=0.06, y=0.12)
    axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
    axes.set_xlabel("√KL to the reference, nats$^{1/2}$ per completion")
    axes.set_ylabel("reward of the rollouts")
    _save(figure, path)
    return True


def plot_ablation(runs: Mapping[str, Rows], path: Path) -> bool:
    """Reward and KL of the training rollouts of several runs against the step, and reward against √KL.

    runs: legend -> rows, in the order of the legend. Needs two points of each in one of them.
    """
    from matplotlib import colormaps

    figure, first = _figure(height=7.4)
    first.remove()
    reward_axes, kl_axes, both = figure.subplots(3, 1, height_ratios=(3, 3, 4))
    drawn = 0
    for place, (name, rows) in enumerate(runs.items()):
        reward, kl = series(rows, "objective/score"), series(rows, "objective/kl")
        if min(len(reward[0]), len(kl[0])) < 2:
            continue
        color = colormaps["viridis"](0.05 + 0.85 * place / max(len(runs) - 1, 1))
        reward_axes.plot(*reward, color=color, label=name, **_style(reward[0], "o"))
        kl_axes.plot(*kl, color=color, **_style(kl[0], "o"))
        known = dict(zip(*kl, strict=True))
        points = [
            (math.sqrt(max(known[step], 0.0)), value) for step, value in zip(*reward, strict=True) if step in known
        ]
        both.plot(*zip(*points, strict=True), color=color, **_style(reward[0], "o"))
        drawn += 1
    if not drawn:
        return False
    for one, label in ((reward_axes, "reward"), (kl_axes, "KL to SFT, nats"), (both, "reward")):
        _plain(one)
        one.set_ylabel(label)
    for one in (reward_axes, kl_axes):
        one.set_xlabel("PPO update")
    both.set_xlabel("√KL to SFT, nats$^{1/2}$ per completion")
    reward_axes.legend(frameon=False, fontsize=8.5)
    _save(figure, path)
    return True


def plot_over_training(found: Mapping[str, Any] | None, path: Path) -> bool:
    """Training reward and judge of each checkpoint against √KL on validation prompts, with their 95% intervals.

    found: `over_training` of evaluation.json. A fitted curve is drawn through the points that it was fitted to, over
    the range that was seen, and a ring marks the recommended checkpoint. Needs one checkpoint beside SFT.
    """
    rows = [found["sft"], *found["checkpoints"]] if found and found.get("checkpoints") else []
    if len(rows) < 2 or found is None:
        return False
    roots = [math.sqrt(max(row["kl"]["value"], 0.0)) for row in rows]
    steps = [0, *(row["step"] for row in found["checkpoints"])]
    figure, first = _figure(height=5.6)
    first.remove()
    titles = {"reward": "training reward (the proxy)", "judge": f"judge: {found['judge']}"}
    for axes, (key, title), color in zip(
        figure.subplots(2, 1, sharex=True), titles.items(), (_BLUE, _GREEN), strict=True
    ):
        _plain(axes)
        values = [row[key]["value"] for row in rows]
        errors = [[abs(row[key]["value"] - row[key]["ci95"][side]) for row in rows] for side in (0, 1)]
        axes.errorbar(roots, values, yerr=errors, color=color, fmt="o", markersize=4.5, linewidth=1, capsize=2.5)
        fit = (found.get("fits") or {}).get("proxy" if key == "reward" else "judge")
        if fit:
            curve = [max(roots) * k / 100 for k in range(1, 101)]
            alpha, beta = (fit[name]["value"] for name in ("alpha", "beta"))
            axes.plot(curve, [values[0] + d * (alpha - beta * math.log(d)) for d in curve], color=_GRAY, linewidth=1)
        for step, x, y in zip(steps, roots, values, strict=True):
            axes.annotate(
                "SFT" if step == 0 else str(step), (x, y), xytext=(5, -11), textcoords="offset points", fontsize=8.5
            )
            if step and step == found.get("recommended"):
                axes.scatter(x, y, s=130, facecolors="none", edgecolors=_ORANGE, linewidths=2, zorder=4)
        axes.set_title(title, fontsize=10)
    axes.set_xlabel("√KL to SFT, nats$^{1/2}$ per completion; numbers: steps; ring: recommended")
    _save(figure, path)
    return True


def plot_frontier(frontier: Mapping[str, Any], path: Path) -> bool:
    """Judge and reward against √KL: PPO (a star, its other β in line), and each method. frontier: of baselines.

    Bars are the 95% intervals of the scores. Where a method's KL is an upper bound its line is dashed. Draws nothing
    without a method.
    """
    if not frontier["methods"]:
        return False
    figure, first = _figure(height=7.4)
    first.remove()
    for axes, name in zip(figure.subplots(2, 1, sharex=True), ("judge", "reward"), strict=True):
        _plain(axes)
        for color, marker, (method, points) in zip(
            (_BLUE, _GREEN, _GRAY), "osD", frontier["methods"].items(), strict=False
        ):
            ordered = sorted(points, key=lambda point: point["kl"]["value"])
            bound = any(point["kl"]["is_bound"] for point in ordered)
            label = f"{method}, at the upper bound of its KL" if bound else method
            _with_bars(axes, ordered, name, color=color, marker=marker, linestyle="--" if bound else "-", label=label)
        _with_bars(axes, [frontier["sft"]], name, color="black", marker="x", label="SFT")
        line = sorted([*frontier["ppo_ablation"], frontier["ppo"]], key=lambda point: point["kl"]["value"])
        _with_bars(axes, line, name, color=_ORANGE, marker="o", markersize=3)
        _with_bars(axes, [frontier["ppo"]], name, color=_ORANGE, marker="*", markersize=13, label="PPO")
        axes.set_ylabel(f"judge: {frontier['judge']}" if name == "judge" else "reward: what PPO maximises")
        axes.set_xlim(left=-0.05)
        if name == "judge":
            axes.legend(frameon=False, fontsize=8.5)
    axes.set_xlabel("√KL to SFT, nats$^{1/2}$ per completion")
    figure.suptitle("What each method reaches, and how far from SFT", fontsize=11)
    _save(figure, path)
    return True


def plot_win_rates(found: Mapping[str, Any], path: Path) -> bool:
    """The win rate of a policy by each judge with its 95% interval, and what they are compared with. found: figures of
    `stages.head_to_head`."""
    rows = [(f"by {name}", one["win_rate"], _BLUE) for name, one in found["judges"].items()]
    votes = found.get("votes") or {}
    rows += [(f"by votes, {name}", one["win_rate"], _GREEN) for name, one in votes.items() if one["win_rate"]]
    rows += [("at equal length", found["win_rate_at_equal_length"], _ORANGE)]
    rows += [("control: the reference over itself", found["control"], _GRAY)]
    figure, axes = _figure(height=1.2 + 0.42 * len(rows))
    for place, (_, estimate, color) in enumerate(rows):
        low, high = estimate["ci95"]
        axes.plot([low, high], [place, place], color=color, linewidth=2)
        axes.plot(estimate["value"], place, "o", color=color, markersize=6)
    axes.axvline(0.5, color="black", linewidth=1)
    labels = [label if len(label) <= _LABEL else f"…{label[1 - _LABEL :]}" for label, _, _ in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=9, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(-0.02, 1.02)
    axes.set_xlabel(f"win rate, 95% interval (n = {found['n']})")
    _save(figure, path)
    return True


def plot_ensemble(found: Mapping[str, Any], path: Path) -> bool:
    """Accuracy of each reward model and of all together, and disagreement on PPO's completions by their log-ratio.

    found: overview.json of an ensemble. The second stands only where it was evaluated; its dashed line and band are the
    disagreement on SFT's completions, the dotted one that of unrelated models. Bars are 95% intervals.
    """
    apart, parts = found["disagreement"], found["disagreement"]["by_kl"]
    figure, first = _figure(height=6.0 if parts else 3.8)
    first.remove()
    top, *rest = figure.subplots(2, 1, squeeze=False, height_ratios=(2, 3)).flat if parts else [figure.subplots()]
    _plain(top)
    names = [*(f"seed {one['seed']}" for one in found["models"]), "mean of all"]
    accuracies = [*(one["accuracy"] for one in found["models"]), found["ensemble"]["accuracy"]]
    for place, (one, color) in enumerate(zip(accuracies, [_BLUE] * (len(names) - 1) + [_ORANGE], strict=True)):
        top.errorbar(one["value"], place, xerr=_reach([one]), color=color, fmt="o", capsize=3)
    top.set_yticks(range(len(names)), names)
    top.invert_yaxis()
    top.margins(y=0.2)
    top.set_xlabel(f"accuracy on {accuracies[0]['n']} held-out pairs")
    for axes in rest:
        _plain(axes)
        axes.errorbar(
            [part["kl"] for part in parts],
            [part["value"] for part in parts],
            yerr=_reach(parts),
            color=_ORANGE,
            marker="o",
            capsize=3,
            linewidth=1.3,
            label="PPO's completions, in fifths",
        )
        axes.axhline(apart["sft"]["value"], color=_BLUE, linestyle="--", linewidth=1.3, label="SFT's completions")
        axes.axhspan(*apart["sft"]["ci95"], color=_BLUE, alpha=0.15, linewidth=0)
        axes.axhline(apart["unrelated"], color=_GRAY, linestyle=":", label="unrelated models")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("log π − log π$_{SFT}$ of a completion, nats")
        axes.set_ylabel("disagreement")
        axes.legend(frameon=False, fontsize=8.5)
    _save(figure, path)
    return True


def _reach(points: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """How far the interval of each point goes below it, and above."""
    below = [max(point["value"] - point["ci95"][0], 0.0) for point in points]
    return [below, [max(point["ci95"][1] - point["value"], 0.0) for point in points]]


def _with_bars(axes: Any, points: Sequence[Mapping[str, Any]], name: str, **style: Any) -> None:
    values = [point[name]["value"] for point in points]
    lows, highs = zip(*(point[name]["ci95"] for point in points), strict=True)
    below = [max(value - low, 0.0) for value, low in zip(values, lows, strict=True)]
    above = [max(high - value, 0.0) for value, high in zip(values, highs, strict=True)]
    roots = [math.sqrt(max(point["kl"]["value"], 0.0)) for point in points]
    axes.errorbar(roots, values, yerr=(below, above), capsize=2.5, **{"linewidth": 1.4, "markersize": 5} | style)


def plot_panels(rows: Rows, panels: Sequence[Panel], path: Path, *, mark: int | None = None) -> bool:
    """Small multiples, two a row: one metric each against the step. One with fewer than two points is left out."""
    drawn = [(title, unit, found) for key, title, unit in panels if len((found := series(rows, key))[0]) >= 2]
    if not drawn:
        return False
    from matplotlib.figure import Figure

    lines = -(-len(drawn) // 2)
    figure = Figure(figsize=(_WIDTH, 2.3 * lines + 0.2), dpi=120, layout="constrained")
    grid = list(figure.subplots(lines, 2, sharex=True, squeeze=False).flat)
    for axes, (title, unit, found) in zip(grid, drawn, strict=False):
        _plain(axes)
        axes.plot(*found, color=_BLUE, **_style(found[0], "o", size=2.5))
        axes.set_title(title, fontsize=10)
        axes.set_ylabel(unit, fontsize=9)
        axes.tick_params(labelsize=8.5, labelbottom=True)
        _mark(axes, mark)
    for axes in grid[len(drawn) :]:
        axes.set_visible(False)
    figure.supxlabel("PPO update", fontsize=9)
    _save(figure, path)
    return True


def plot_curves(
    rows: Rows, labels: Mapping[str, str], path: Path, *, title: str, unit: str, mark: int | None = None
) -> bool:
    """The metrics named by `labels` {key: legend} against the step, on one scale. Needs two points of one of them."""
    curves = [(label, series(rows, key)) for key, label in labels.items()]
    drawn = [(label, curve) for label, curve in curves if len(curve[0]) >= 2]
    if not drawn:
        return False
    figure, axes = _figure()
    for (label, curve), color in zip(drawn, (_BLUE, _ORANGE, _GREEN, _GRAY), strict=False):
        axes.plot(*curve, color=color, label=label, **_style(curve[0], "o"))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(unit)
    axes.set_title(title)
    axes.legend(frameon=False)
    values = [value for _, (_, found) in drawn for value in found]
    if min(values) > 0 and max(values) > 3 * min(values):
        _logarithmic(axes)  # else the first steps would press all others flat
    _mark(axes, mark)
    _save(figure, path)
    return True


def plot_margins(report: Mapping[str, Any] | None, path: Path) -> bool:
    """Histogram of a reward model's margins on held-out pairs. report: of `evaluation.calibration`."""
    found = _part(report, "margin", "histogram")
    if not found or not sum(found["counts"]):
        return False
    figure, axes = _figure()
    edges, counts = found["edges"], found["counts"]
    colors = [_ORANGE if high <= 0 else _BLUE for _, high in pairwise(edges)]
    widths = [high - low for low, high in pairwise(edges)]
    axes.bar(edges[:-1], counts, width=widths, align="edge", color=colors, edgecolor="white", linewidth=0.6)
    axes.axvline(0, color="black", linewidth=1)
    share = sum(count for (_, high), count in zip(pairwise(edges), counts, strict=True) if high <= 0) / sum(counts)
    axes.set_xlabel("margin: score of the chosen text − score of the rejected one")
    axes.set_ylabel("held-out pairs")
    axes.set_title(f"Margins of {sum(counts)} held-out pairs; in orange the {share:.0%} in the wrong order")
    _save(figure, path)
    return True


def plot_reliability(report: Mapping[str, Any] | None, path: Path) -> bool:
    """Confidence against the share of right answers, with 95% intervals, and how many pairs stand behind each point."""
    found = _part(report, "calibration")
    if not found or not found["bins"]:
        return False
    from matplotlib.figure import Figure

    parts = found["bins"]
    figure = Figure(figsize=(_WIDTH, 4.6), dpi=120, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for axes in (top, bottom):
        _plain(axes)
    x, y = [part["confidence"] for part in parts], [part["accuracy"] for part in parts]
    below = [max(value - part["ci95"][0], 0) for value, part in zip(y, parts, strict=True)]
    above = [max(part["ci95"][1] - value, 0) for value, part in zip(y, parts, strict=True)]
    top.plot([0.5, 1], [0.5, 1], color=_GRAY, linestyle=":", label="calibrated")
    top.errorbar(x, y, yerr=(below, above), color=_BLUE, marker="o", capsize=3, linewidth=1.3, label="this model")
    top.set_ylabel("share in the right order")
    top.legend(frameon=False, loc="lower right")
    top.set_title(f"Calibration: is it right as often as it says? ECE {found['ece']:.3f}")
    for part in parts:
        width = part["high"] - part["low"]
        bottom.bar(part["low"], part["n"], width=width * 0.94, align="edge", color=_BLUE, alpha=0.6)
    bottom.set_ylabel("pairs")
    bottom.set_xlabel("confidence: σ(|margin|), the probability of the text that it scores higher")
    bottom.set_xlim(0.49, 1.01)
    _save(figure, path)
    return True


def plot_score_by_length(report: Mapping[str, Any] | None, path: Path) -> bool:
    """Score against length over the texts of held-out pairs: means and quartiles in parts of equally many texts."""
    found = _part(report, "length")
    if not found or len(found["bins"]) < 2:
        return False
    parts = found["bins"]
    figure, axes = _figure()
    x = [(part["low"] + part["high"]) / 2 for part in parts]
    reach = [[(part["high"] - part["low"]) / 2 for part in parts]] * 2
    axes.vlines(
        x,
        [part["low_score"] for part in parts],
        [part["high_score"] for part in parts],
        color=_BLUE,
        alpha=0.35,
        linewidth=6,
        label="middle half of the texts",
    )
    axes.errorbar(x, [part["mean"] for part in parts], xerr=reach, color=_BLUE, marker="o", linewidth=1, label="mean")
    axes.set_xlabel("length of the completion, tokens")
    axes.set_ylabel("raw score")
    rho = _part(found, "spearman")
    said = f"; Spearman's ρ {rho['value']:+.2f}" if rho else ""
    axes.set_title(f"Score against length, {sum(part['n'] for part in parts)} held-out texts{said}")
    axes.margins(y=0.15)
    axes.legend(frameon=False, ncols=2)
    _save(figure, path)
    return True


def _arrows(points: Sequence[tuple[float, float]], count: int = 5) -> Iterable[tuple[Any, Any]]:
    """(from, to) of `count` stretches of a path, evenly along its order, each long enough for a head to be seen."""
    spans = [max(column) - min(column) or 1.0 for column in zip(*points, strict=True)]

    def apart(a: tuple[float, float], b: tuple[float, float]) -> float:
        return math.hypot(*((p - q) / span for p, q, span in zip(a, b, spans, strict=True)))

    stride = max(1, (len(points) - 1) // count)
    for start, end in pairwise([*points[::stride], points[-1]]):
        if apart(start, end) > 0.06:
            yield start, end


def _logarithmic(axes: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())


def _part(report: Mapping[str, Any] | None, *keys: str) -> Any:
    found: Any = report
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _style(steps: Sequence[int], marker: str, size: float = 3.5) -> dict[str, Any]:
    return {"marker": marker if len(steps) <= _POINTS else None, "markersize": size, "linewidth": 1.4}


def _mark(axes: Any, step: int | None) -> None:
    if step is not None:
        axes.axvline(step, color=_GRAY, linestyle=":", linewidth=1.5)
        axes.annotate(
            f"step {step}",
            (step, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -10),
            textcoords="offset points",
            fontsize=8.5,
            color=_GRAY,
        )


def _plain(axes: Any) -> None:
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _figure(height: float = 3.8) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), dpi=120, layout="constrained")
    axes = figure.subplots()
    _plain(axes)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = BytesIO()
    # Without the version in it, the same numbers give the same bytes.
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    write_bytes(path, buffer.getvalue())
