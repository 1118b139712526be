"""Points of a frontier: interpolation, equal compute, win rates of a choice, against brute force."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlhf_zoo.evaluation.compute import Compute, Passes
from rlhf_zoo.evaluation.frontier import (
    Point,
    at_kl,
    best_within,
    cheapest_filter,
    difference,
    mean_by_prompt,
    weighted_mean,
    win_shares,
)
from rlhf_zoo.evaluation.stats import bootstrap_mean, proportion, win_rate


def point(
    label: str, kl: float, judge: list[float], *, training: float = 0.0, serving: float = 0.0, **more: Any
) -> Point:
    """FLOPs are given directly: one parameter, and half as many tokens read."""
    return Point(
        label, np.full(len(judge), kl), np.array(judge) * 10, np.array(judge), len(judge),
        training=Compute({"policy": Passes(1, read=training / 2)}),
        serving=Compute({"policy": Passes(1, read=serving / 2)}), **more,
    )  # fmt: skip


def test_between_two_near_points_scores_are_linear_in_the_root_of_kl() -> None:
    line = [point("b", 1.44, [2.0, 4.0]), point("a", 0.64, [0.0, 0.0]), point("c", 2.56, [3.0, 3.0])]
    found = at_kl(line, 1.0)
    assert found is not None and found.label == "between a and b"
    np.testing.assert_allclose(found.judge, [1.0, 2.0])
    np.testing.assert_allclose(found.reward, [10.0, 20.0])
    found = at_kl(line, 1.96)
    assert found is not None
    np.testing.assert_allclose(found.judge, [2.5, 3.5])
    assert at_kl(line, 1.44) is line[0] and at_kl(line, 0.64) is line[1] and at_kl(line, 2.56) is line[2]


def test_nothing_is_extrapolated_nor_read_off_a_long_chord() -> None:
    line = [point("a", 1.0, [0.0]), point("b", 1.44, [2.0]), point("c", 4.0, [2.0])]
    assert at_kl(line, 0.99) is None and at_kl(line, 4.01) is None and at_kl([], 1.0) is None
    assert at_kl(line, 1.2) is not None and at_kl(line, 3.0) is None, "√4 − √1.44 is 0.8"
    assert at_kl([point("a", -1e-9, [0.0]), point("b", 1.0, [1.0])], 0.0) is not None, "an estimate below 0 is 0"


def test_seeds_are_averaged_and_kept() -> None:
    first = point("seed 1", 1.0, [0.0, 2.0], training=100, wins={"sft": np.array([0.0, 1.0])})
    second = point("seed 2", 3.0, [2.0, 2.0], training=300, wins={"sft": np.array([1.0, 1.0])})
    both = weighted_mean([first, second], label="β = 0.1")
    assert both.mean_kl == 2.0 and both.n == 4 and both.seed_points == (first, second)
    np.testing.assert_allclose(both.judge, [1.0, 2.0])
    np.testing.assert_allclose(both.wins["sft"], [0.5, 1.0])
    assert both.flops(0) == 200, "a seed is a run: what one costs"


def test_the_best_that_can_be_paid_for() -> None:
    cheap = point("cheap", 1.0, [1.0], training=10, serving=1)
    good = point("good", 1.0, [3.0], training=10, serving=50)
    dear = point("dear", 1.0, [9.0], training=1000, serving=1)
    assert best_within([cheap, good, dear], 100, served=10) is cheap
    assert best_within([cheap, good, dear], 600, served=10) is good
    assert best_within([cheap, good, dear], 2000, served=10) is dear
    assert best_within([cheap, good, dear], 100, served=1) is good, "served once, choosing among many is cheap"
    assert best_within([dear], 100, served=1) is None


def test_a_difference_below_the_tolerance_is_a_tie() -> None:
    np.testing.assert_array_equal(win_shares([[1.0, 1.2]], [[1.0 + 1e-12, 1.1]]), [[(0.5 + 0) / 2, 1.0]])


def test_means_of_prompts_give_the_intervals_of_their_completions() -> None:
    rng = np.random.default_rng(3)
    ours, theirs = rng.normal(size=30), rng.normal(size=30)
    groups = [i // 3 for i in range(30)]
    direct = bootstrap_mean(ours, groups, seed=5)
    one = replace(point("a", 1.0, [0.0] * 10), n=30)
    found = one.estimate(mean_by_prompt(ours, 3), seed=5)
    assert found.n == 30 and found.value == pytest.approx(direct.value) and found.ci95 == pytest.approx(direct.ci95)
    won = mean_by_prompt(win_shares(ours[:, None], theirs[:, None])[:, 0], 3)
    direct = win_rate(ours, theirs, groups)
    assert one.rate(won).ci95 == pytest.approx(direct.ci95)
    assert one.rate(np.ones(20), n=60).ci95 == proportion(20, 20).ci95, "winning everywhere is not certainty"


def test_differences_are_paired_by_prompt() -> None:
    """Prompts differ by far more than the methods do, and one is better by 1 on each."""
    prompts = [0.0, 100.0, -50.0, 7.0]
    better, worse = point("a", 1.0, [value + 1 for value in prompts]), point("b", 1.0, prompts)
    found = difference(better, worse, seed=1)
    assert found["judge"] == {"value": 1.0, "ci95": [1.0, 1.0], "n": 4}
    assert found["reward"]["value"] == 10.0


def test_the_price_of_a_filter() -> None:
    reward = np.array([[0.0, 4.0, 1.0, 3.0], [2.0, 0.0, 6.0, 0.0]])
    found = cheapest_filter(reward, reward / 2, 3.5)
    assert found == {"share": 0.5, "kl": pytest.approx(np.log(2)), "reward": 3.75, "judge": 1.875}
    assert cheapest_filter(reward, reward, 0.0) == {"share": 1.0, "kl": 0.0, "reward": 2.0, "judge": 2.0}
    assert cheapest_filter(reward, reward, 5.1) is None, "not the best sample of each prompt has as much"
