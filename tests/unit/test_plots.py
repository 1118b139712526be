"""Plots of a card: what is drawn, that it is legible, and that equal numbers give equal bytes."""

import math
from pathlib import Path

import numpy as np
import pytest
from card_run import over_training, reward_report
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from rlhf_zoo.publishing import plots, reward_plots

ROWS = [
    {
        "step": step, "objective/score": math.sqrt(step), "objective/kl": step / 4 - 0.3, "loss": 1 / step,
        "completions/length": 10 + step % 3, "objective/entropy": 1 / step, "kl_coef": 0.1 + step / 100,
    }
    for step in range(1, 13)
]  # fmt: skip
PANELS = (
    ("completions/length", "Length", "tokens"),
    ("objective/entropy", "Entropy", "nats"),
    ("kl_coef", "β", ""),
    ("missing", "Missing", ""),
)
REPORT = reward_report()


def point(kl: float, score: float, *, bound: bool = False) -> dict:
    told = {"value": score, "ci95": [score - 0.2, score + 0.1], "n": 6}
    return {"kl": {"value": kl, "is_bound": bound}, "judge": told, "reward": told}


FRONTIER = {
    "judge": "gold utility",
    "sft": point(-1e-8, 0.0),
    "ppo": point(4.0, 2.0),
    "ppo_ablation": [point(1.0, 1.1)],
    "methods": {
        "best-of-n": [point(0.0, 0.0, bound=True), point(0.6, 1.0, bound=True), point(1.9, 1.5, bound=True)],
        "dpo": [point(3.0, 1.0), point(1.0, 0.7)],
    },
}


def ensemble(*, evaluated: bool) -> dict:
    told = {"value": 0.9, "ci95": [0.88, 0.91], "n": 300}
    parts = [{"kl": kl, "value": 0.2 + kl / 20, "ci95": [0.15, 0.3 + kl / 20]} for kl in (-0.2, 1.0, 4.0)]
    apart = {"sft": {"value": 0.2, "ci95": [0.18, 0.21]}, "unrelated": 0.8, "by_kl": parts if evaluated else []}
    models = [{"seed": seed, "accuracy": told} for seed in (1, 2)]
    return {"models": models, "ensemble": {"accuracy": told}, "disagreement": apart}


DRAWINGS = {
    "reward_kl": lambda path: plots.plot_reward_and_kl(ROWS, path),
    "sqrt_kl": lambda path: plots.plot_reward_against_kl(ROWS, path),
    "panels": lambda path: plots.plot_panels(ROWS, PANELS, path),
    "curves": lambda path: plots.plot_curves(ROWS, {"loss": "training", "x": "none"}, path, title="Loss", unit="nats"),
    "margins": lambda path: reward_plots.plot_margins(REPORT, path),
    "reliability": lambda path: reward_plots.plot_reliability(REPORT, path),
    "length": lambda path: reward_plots.plot_score_by_length(REPORT, path),
    "frontier": lambda path: plots.plot_frontier(FRONTIER, path),
    "ensemble": lambda path: plots.plot_ensemble(ensemble(evaluated=True), path),
    "ensemble_before_eval": lambda path: plots.plot_ensemble(ensemble(evaluated=False), path),
    "over_training": lambda path: plots.plot_over_training(over_training(), path),
    "against_kl": lambda path: plots.plot_against_kl(over_training(), path),
}


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


@pytest.mark.parametrize("name", DRAWINGS)
def test_plot_has_card_width_and_is_deterministic(name, tmp_path):
    first, second = tmp_path / "a.png", tmp_path / "b" / "b.png"
    assert DRAWINGS[name](first) is True
    if name in ("sqrt_kl", "frontier"):
        assert DRAWINGS[name](second) and first.read_bytes() == second.read_bytes()
    image = pixels(first)
    assert image.shape[1] == 864 and 400 < image.shape[0] < 900
    ink = (image < 128).any(axis=2)
    assert 0.005 < ink.mean() < 0.5, "neither empty nor black"
    assert not ink[:, :2].any() and not ink[:, -2:].any(), "nothing is cut off at the sides"
    assert not ink[:2].any() and not ink[-2:].any(), "nor above or below"


def test_win_rate_plot_handles_any_judge_name(tmp_path):
    """A name is text: a formula in it is none, and a long one does not push the picture out of its frame."""
    rate = {"value": 0.8, "ci95": [0.7, 0.9], "n": 300}
    judges = {
        "classifier": {"win_rate": rate},
        "rule:f(p=r'$x_{$')": {"win_rate": rate},
        "reward:" + "a/" * 80: {"win_rate": rate},
    }
    found = {"judges": judges, "win_rate_at_equal_length": rate, "control": rate, "n": 300}
    assert plots.plot_win_rates(found, tmp_path / "a.png")
    voted = {**found, "votes": {"u/v": {"win_rate": {**rate, "value": 0.1}}, "u/w": {"win_rate": None}}}
    assert plots.plot_win_rates(voted, tmp_path / "b.png")
    tall, taller = pixels(tmp_path / "a.png"), pixels(tmp_path / "b.png")
    assert tall.shape[1] == taller.shape[1] and tall.shape[0] < taller.shape[0]


@pytest.mark.parametrize("name", ["over_training", "curves", "margins"])
def test_first_plot_of_card_is_legible_on_white_and_black(tmp_path, name):
    draw = {**DRAWINGS, "over_training": lambda path: plots.plot_over_training(over_training(), path)}[name]
    assert draw(tmp_path / "a.png")
    image = np.asarray(Image.open(tmp_path / "a.png").convert("RGBA")).astype(int)
    assert (image[:2, :, 3] == 0).all() and (image[..., 3] == 0).mean() > 0.4, "the background is transparent"
    ink = image[image[..., 3] > 250][:, :3]
    assert ink.max(axis=1).min() > 100 and ink.min(axis=1).max() < 220, "no text is black, and none is white"


@pytest.mark.parametrize(("factor", "scales"), [(1.0, 2), (100.0, 3)])
def test_judge_gets_its_own_axis_when_scales_differ(monkeypatch, factor, scales):
    figures, over = [], over_training()
    for row in (over["sft"], *over["checkpoints"]):
        row["reward"] = {"value": row["reward"]["value"] * factor, "ci95": [x * factor for x in row["reward"]["ci95"]]}
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
    plots.plot_over_training(over, Path("unused"))
    assert len(figures[0].axes) == scales


@pytest.mark.parametrize("factor", [1.0, 0.002, 3000.0])
def test_tick_labels_of_first_plot_are_within_figure(monkeypatch, factor):
    figures, over = [], over_training()
    for row in (over["sft"], *over["checkpoints"]):
        for key in ("reward", "judge", "kl"):
            row[key] = {"value": row[key]["value"] * factor, "ci95": [x * factor for x in row[key]["ci95"]]}
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
    plots.plot_over_training(over, Path("unused"))
    renderer = FigureCanvasAgg(figures[0]).get_renderer()
    figures[0].draw(renderer)
    boxes = [label.get_window_extent(renderer) for axes in figures[0].axes for label in axes.get_yticklabels()]
    assert len(boxes) > 4 and min(box.x0 for box in boxes) >= 0


def test_fit_is_drawn_only_in_range_of_checkpoints(monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
    plots.plot_against_kl(over_training(), Path("unused"))
    curves = [line.get_xdata() for axes in figures[0].axes for line in axes.lines if line.get_color() == plots.GRAY]
    assert len(curves) == 2
    assert all((min(x), max(x)) == pytest.approx((math.sqrt(2), math.sqrt(20))) for x in curves), "not from SFT on"


@pytest.mark.parametrize(
    "rows", [[], ROWS[:1], [{"step": 1}, {"step": 2}], [{**ROWS[0]}, {"step": 2, "loss": math.nan}]]
)
def test_plots_are_skipped_on_too_little_data(rows, tmp_path):
    path = tmp_path / "none.png"
    assert not plots.plot_reward_and_kl(rows, path) and not plots.plot_reward_against_kl(rows, path)
    assert not plots.plot_panels(rows, PANELS, path)
    assert not plots.plot_curves(rows, {"loss": "training"}, path, title="", unit="")
    assert not path.exists()


@pytest.mark.parametrize(
    "report", [None, {}, {"accuracy": 0.7, "n": 3}, {"margin": {}, "calibration": None, "length": {"bins": []}}]
)
def test_plots_are_skipped_when_report_lacks_figures(report, tmp_path):
    path = tmp_path / "none.png"
    for plot in (reward_plots.plot_margins, reward_plots.plot_reliability, reward_plots.plot_score_by_length):
        assert not plot(report, path)
    assert not path.exists()


def test_series_skips_missing_and_nan_values():
    rows = [{"step": 1, "x": 1}, {"step": 2, "x": None}, {"step": 3}, {"step": 4, "x": math.nan}, {"step": 5, "x": 2.5}]
    assert plots.series(rows, "x") == ([1, 5], [1.0, 2.5])
