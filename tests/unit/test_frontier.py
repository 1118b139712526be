"""Frontier points: interpolation over KL, equal compute, win rates and intervals, against brute force."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlhf_zoo.evaluation.compute import Compute, Passes
from rlhf_zoo.evaluation.frontier import (
    Point,
    average_by_prompt,
    average_points,
    best_within_budget,
    compare_points,
    interpolate_at_kl,
    lowest_kl_filter,
    win_shares,
)
from rlhf_zoo.evaluation.stats import bootstrap_mean, proportion, win_rate


def make_point(
    label: str, kl: float, judge: list[float], *, training: float = 0.0, serving: float = 0.0, **more: Any
) -> Point:
    """FLOPs are given directly: one parameter, and half as many tokens read."""
    return Point(
        label, np.full(len(judge), kl), np.array(judge) * 10, np.array(judge), len(judge),
        training=Compute({"policy": Passes(1, read=training / 2)}),
        serving=Compute({"policy": Passes(1, read=serving / 2)}), **more,
    )  # fmt: skip


def test_at_kl_interpolates_linearly_in_sqrt_kl() -> None:
    line = [make_point("b", 1.44, [2.0, 4.0]), make_point("a", 0.64, [0.0, 0.0]), make_point("c", 2.56, [3.0, 3.0])]
    between = interpolate_at_kl(line, 1.0)
    assert between is not None and between.label == "between a and b"
    np.testing.assert_allclose(between.judge, [1.0, 2.0])
    np.testing.assert_allclose(between.reward, [10.0, 20.0])
    between = interpolate_at_kl(line, 1.96)
    assert between is not None
    np.testing.assert_allclose(between.judge, [2.5, 3.5])
    assert (
        interpolate_at_kl(line, 1.44) is line[0]
        and interpolate_at_kl(line, 0.64) is line[1]
        and interpolate_at_kl(line, 2.56) is line[2]
    )


def test_at_kl_neither_extrapolates_nor_spans_wide_gaps() -> None:
    line = [make_point("a", 1.0, [0.0]), make_point("b", 1.44, [2.0]), make_point("c", 4.0, [2.0])]
    assert (
        interpolate_at_kl(line, 0.99) is None
        and interpolate_at_kl(line, 4.01) is None
        and interpolate_at_kl([], 1.0) is None
    )
    assert interpolate_at_kl(line, 1.2) is not None and interpolate_at_kl(line, 3.0) is None, "√4 − √1.44 is 0.8"
    assert interpolate_at_kl([make_point("a", -1e-9, [0.0]), make_point("b", 1.0, [1.0])], 0.0) is not None, (
        "an estimate below 0 is 0"
    )


def test_weighted_mean_averages_and_keeps_seeds() -> None:
    first = make_point("seed 1", 1.0, [0.0, 2.0], training=100, wins={"sft": np.array([0.0, 1.0])})
    second = make_point("seed 2", 3.0, [2.0, 2.0], training=300, wins={"sft": np.array([1.0, 1.0])})
    mean = average_points([first, second], label="β = 0.1")
    assert mean.mean_kl == 2.0 and mean.n == 4 and mean.seed_points == (first, second)
    np.testing.assert_allclose(mean.judge, [1.0, 2.0])
    np.testing.assert_allclose(mean.wins["sft"], [0.5, 1.0])
    assert mean.flops(0) == 200, "a seed is a run: what one costs"


def test_best_within_picks_best_affordable_point() -> None:
    cheap = make_point("cheap", 1.0, [1.0], training=10, serving=1)
    good = make_point("good", 1.0, [3.0], training=10, serving=50)
    dear = make_point("dear", 1.0, [9.0], training=1000, serving=1)
    assert best_within_budget([cheap, good, dear], 100, served=10) is cheap
    assert best_within_budget([cheap, good, dear], 600, served=10) is good
    assert best_within_budget([cheap, good, dear], 2000, served=10) is dear
    assert best_within_budget([cheap, good, dear], 100, served=1) is good, "served once, choosing among many is cheap"
    assert best_within_budget([dear], 100, served=1) is None


def test_win_shares_count_tiny_differences_as_ties() -> None:
    np.testing.assert_array_equal(win_shares([[1.0, 1.2]], [[1.0 + 1e-12, 1.1]]), [[(0.5 + 0) / 2, 1.0]])


def test_prompt_means_give_intervals_of_completions() -> None:
    rng = np.random.default_rng(3)
    ours, theirs = rng.normal(size=30), rng.normal(size=30)
    groups = [i // 3 for i in range(30)]
    direct = bootstrap_mean(ours, groups, seed=5)
    point = replace(make_point("a", 1.0, [0.0] * 10), n=30)
    estimate = point.estimate(average_by_prompt(ours, 3), seed=5)
    assert (
        estimate.n == 30
        and estimate.value == pytest.approx(direct.value)
        and estimate.ci95 == pytest.approx(direct.ci95)
    )
    won = average_by_prompt(win_shares(ours[:, None], theirs[:, None])[:, 0], 3)
    direct = win_rate(ours, theirs, groups)
    assert point.rate(won).ci95 == pytest.approx(direct.ci95)
    assert point.rate(np.ones(20), n=60).ci95 == proportion(20, 20).ci95, "winning everywhere is not certainty"


def test_difference_is_paired_by_prompt() -> None:
    """Prompts differ by far more than the methods do, and one is better by 1 on each."""
    prompts = [0.0, 100.0, -50.0, 7.0]
    better, worse = make_point("a", 1.0, [value + 1 for value in prompts]), make_point("b", 1.0, prompts)
    gaps = compare_points(better, worse, seed=1)
    assert gaps["judge"] == {"value": 1.0, "ci95": [1.0, 1.0], "n": 4}
    assert gaps["reward"]["value"] == 10.0


def test_lowest_kl_filter_reaches_target_reward() -> None:
    reward = np.array([[0.0, 4.0, 1.0, 3.0], [2.0, 0.0, 6.0, 0.0]])
    price = lowest_kl_filter(reward, reward / 2, 3.5)
    assert price == {"share": 0.5, "kl": pytest.approx(np.log(2)), "reward": 3.75, "judge": 1.875}
    assert lowest_kl_filter(reward, reward, 0.0) == {"share": 1.0, "kl": 0.0, "reward": 2.0, "judge": 2.0}
    assert lowest_kl_filter(reward, reward, 5.1) is None, "not the best sample of each prompt has as much"
