"""A judge beside labeled pairs: swapped labels, known binomials, calibration, errors shared with the reward."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from rlhf_zoo.evaluation.judge_check import check_judge, split_half
from rlhf_zoo.evaluation.judges import ClassifierJudge

GOOD, BAD = ("sharp", "bright", "clear", "light"), ("weak", "slow", "dull", "heavy")


def rows(swapped: bool) -> list[dict]:
    return [
        {"text": f"the {what} is {word}", "label": int((word in GOOD) != swapped)}
        for what in ("lamp", "phone", "radio", "clock", "chair", "kettle")
        for word in GOOD + BAD
    ]


@pytest.mark.parametrize(("swapped", "finding"), [(False, "agrees"), (True, "contradicts")])
def test_swapped_labels_are_detected(swapped: bool, finding: str) -> None:
    judge = ClassifierJudge.train(rows(swapped), seed=1)
    assert judge.accuracy.value > 0.9, "its own held-out part is swapped as well"
    prompts = [f"the door {n} is" for n in range(32)]
    chosen, rejected = (judge(prompts, [f" {words[n % 4]}" for n in range(32)]) for words in (GOOD, BAD))
    found = check_judge(chosen, rejected, prompts, probabilities=True, seed=1)
    assert found.finding == finding and (found.unfit is not None) is swapped
    assert found.calibration is not None
    wrong = found.calibration["ece"] - found.calibration["ece_by_chance"]["high"]
    assert wrong > 0.3 if swapped else found.calibration["ece"] < 0.5


@pytest.mark.parametrize(("right", "finding"), [(30, "contradicts"), (50, "says nothing"), (70, "agrees")])
def test_the_finding_is_that_of_a_binomial_test(right: int, finding: str) -> None:
    scores = np.array([1.0] * right + [0.0] * (100 - right))
    found = check_judge(scores, 1 - scores, range(100), probabilities=False, seed=2)
    exact = scipy_stats.binomtest(right, 100).proportion_ci(method="exact")
    np.testing.assert_allclose(found.accuracy.ci95, [exact.low, exact.high], atol=0.02)
    assert found.accuracy.value == right / 100 and found.finding == finding and found.calibration is None


def test_ties_and_certainties() -> None:
    found = check_judge([0.5, 0.5], [0.5, 0.5], ["a", "b"], probabilities=True, seed=1)
    assert found.accuracy.value == 0.5 and found.accuracy.ties == 1.0 and found.finding == "says nothing"
    sure = check_judge([1.0, 1.0], [0.0, 0.0], ["a", "b"], probabilities=True, seed=1)
    assert sure.calibration is not None and sure.calibration["ece"] < 1e-5
    assert sure.to_json()["unfit"] is None


def test_errors_that_a_judge_shares_with_the_reward() -> None:
    """Two that err by themselves, and a judge that copies the reward's errors in three of four."""
    rng = np.random.default_rng(3)
    reward, own, copies = rng.random(4000) < 0.12, rng.random(4000) < 0.12, rng.random(4000) < 0.75

    def shared(errs: np.ndarray):
        right = (~errs).astype(float)
        found = check_judge(
            right, 1 - right, range(4000), probabilities=False, seed=1, reward_margins=np.where(reward, -1.0, 1.0)
        ).with_reward
        assert found is not None and found.correlation is not None and found.where_reward_errs is not None
        return found

    alone, copied = shared(own), shared(np.where(copies, reward, own))
    assert alone.correlation.ci95[0] < 0 < alone.correlation.ci95[1]
    assert alone.where_reward_errs.value == pytest.approx(0.12, abs=0.04)
    assert copied.correlation.ci95[0] > 0.6 and copied.where_reward_errs.value == pytest.approx(0.78, abs=0.05)


def test_a_coin_does_not_agree_with_itself() -> None:
    rng = np.random.default_rng(4)
    worth = rng.normal(size=(80, 1))
    coin, judge = rng.integers(0, 2, (80, 4)).astype(float), worth + rng.normal(size=(80, 4))
    prompts = [row % 40 for row in range(80)]
    tossed, steady = split_half(coin, prompts, seed=1), split_half(judge, prompts, seed=1)
    assert tossed is not None and tossed.ci95[0] < 0 < tossed.ci95[1]
    assert steady is not None and steady.ci95[0] > 0.4
    assert split_half(coin[:, :1], prompts, seed=1) is None and split_half(np.ones((80, 2)), prompts, seed=1) is None
