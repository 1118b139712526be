"""Judge checks on labeled pairs: swapped labels, binomial tests, calibration, errors shared with the reward."""

import random

import numpy as np
import pytest
from scipy import stats as scipy_stats

from rlhf_zoo.evaluation.judges.check import (
    JudgeCheck,
    PairCheck,
    check_pairs,
    majority_preferences,
    shared_errors,
    split_half,
)
from rlhf_zoo.evaluation.judges.scalar import ClassifierJudge

GOOD, BAD = ("sharp", "bright", "clear", "light"), ("weak", "slow", "dull", "heavy")


def rows(swapped: bool) -> list[dict]:
    return [
        {"text": f"the {what} is {word}", "label": int((word in GOOD) != swapped)}
        for what in ("lamp", "phone", "radio", "clock", "chair", "kettle")
        for word in GOOD + BAD
    ]


@pytest.mark.parametrize(("swapped", "finding"), [(False, "agrees"), (True, "contradicts")])
def test_check_pairs_detects_swapped_labels(swapped: bool, finding: str) -> None:
    judge = ClassifierJudge.train(rows(swapped), seed=1)
    assert judge.accuracy.value > 0.9, "its own held-out part is swapped as well"
    prompts = [f"the door {n} is" for n in range(32)]
    chosen, rejected = (judge(prompts, [f" {words[n % 4]}" for n in range(32)]) for words in (GOOD, BAD))
    result = check_pairs(chosen, rejected, prompts, are_probabilities=True, seed=1)
    assert result.finding == finding and (result.why_unfit is not None) is swapped
    assert result.calibration is not None
    wrong = result.calibration["ece"] - result.calibration["ece_by_chance"]["high"]
    assert wrong > 0.3 if swapped else result.calibration["ece"] < 0.5


@pytest.mark.parametrize(("right", "finding"), [(30, "contradicts"), (50, "inconclusive"), (70, "agrees")])
def test_check_pairs_finding_matches_binomial_test(right: int, finding: str) -> None:
    scores = np.array([1.0] * right + [0.0] * (100 - right))
    result = check_pairs(scores, 1 - scores, range(100), are_probabilities=False, seed=2)
    exact = scipy_stats.binomtest(right, 100).proportion_ci(method="exact")
    np.testing.assert_allclose(result.accuracy.ci95, [exact.low, exact.high], atol=0.02)
    assert result.accuracy.value == right / 100 and result.finding == finding and result.calibration is None


def test_check_pairs_handles_ties_and_certain_scores() -> None:
    result = check_pairs([0.5, 0.5], [0.5, 0.5], ["a", "b"], are_probabilities=True, seed=1)
    assert result.accuracy.value == 0.5 and result.accuracy.ties == 1.0 and result.finding == "inconclusive"
    sure = check_pairs([1.0, 1.0], [0.0, 0.0], ["a", "b"], are_probabilities=True, seed=1)
    assert sure.calibration is not None and sure.calibration["ece"] < 1e-5
    assert sure.to_json()["unfit"] is None


def check(errs: np.ndarray, reward_errs: np.ndarray) -> PairCheck:
    """The check of a judge and a reward that are wrong at the given pairs and right elsewhere."""
    judge, reward = (np.where(wrong, -1.0, 1.0) for wrong in (errs, reward_errs))
    return check_pairs(judge, -judge, range(len(errs)), are_probabilities=False, seed=1, reward_margins=reward)


def test_with_reward_measures_shared_errors() -> None:
    """An independent judge, and one that copies the reward's errors in three of four pairs."""
    rng = np.random.default_rng(3)
    reward, independent, copies = rng.random(4000) < 0.12, rng.random(4000) < 0.12, rng.random(4000) < 0.75
    alone, copied = (check(errs, reward).shared_errors for errs in (independent, np.where(copies, reward, independent)))
    assert alone.correlation.ci95[0] < 0 < alone.correlation.ci95[1]
    assert alone.where_reward_errs.value == pytest.approx(0.12, abs=0.04)
    assert copied.correlation.ci95[0] > 0.6 and copied.where_reward_errs.value == pytest.approx(0.78, abs=0.05)


def test_judge_check_decides_independence() -> None:
    """An independent judge, a copying one, one with too few errors to tell; own pairs count first."""
    rng = np.random.default_rng(5)
    reward, independent, copies = rng.random(800) < 0.3, rng.random(800) < 0.2, rng.random(800) < 0.5
    alone, copied = check(independent, reward), check(np.where(copies, reward, independent), reward)
    few = check(independent[:60], np.arange(60) < 9)
    assert alone.shared_errors.excess.value == pytest.approx(0, abs=0.06)
    assert JudgeCheck(labeled_check=alone).independent is True and JudgeCheck(labeled_check=copied).independent is False
    assert JudgeCheck(labeled_check=few).independent is None and JudgeCheck().independent is None
    assert JudgeCheck(labeled_check=copied, own_check=alone).independent is True, "the policies' own outputs decide"
    assert JudgeCheck(labeled_check=copied, own_check=few).independent is False, "where they can"
    assert JudgeCheck(labeled_check=alone, own_check=alone, same_labels=True).independent is False
    assert JudgeCheck(labeled_check=alone).to_json()["independent"] is True
    faultless = check(np.zeros(800, dtype=bool), reward).shared_errors
    assert faultless.correlation is None and faultless.independent is True


def test_majority_preferences_clear_gold_judge_of_label_noise() -> None:
    """The gold utility errs where noise flipped its own labels, and so does every good reward model."""
    rng = np.random.default_rng(6)
    worth = rng.normal(size=(2000, 2)) * 1.5
    chance = 1 / (1 + np.exp(worth[:, 0] - worth[:, 1]))  # that the second is preferred
    drawn = (rng.random(2000) < chance).astype(int)
    gold = (worth[:, 1] > worth[:, 0]).astype(int)
    reward = np.where(rng.random(2000) < 0.15, 1 - gold, gold)

    def independent(label: np.ndarray, decided: np.ndarray) -> bool | None:
        margins = (np.where(side[decided] == label[decided], 1.0, -1.0) for side in (gold, reward))
        return shared_errors(*margins, range(int(decided.sum())), seed=1).independent

    def prefer(first: str, second: str, rng: random.Random) -> int:
        return int(rng.random() < 1 / (1 + np.exp(float(first) - float(second))))

    assert independent(drawn, np.ones(2000, dtype=bool)) is False
    meant = majority_preferences([(str(a), str(b)) for a, b in worth], prefer, seed=1)
    decided = np.array([preference is not None for preference in meant])
    assert 0.3 < decided.mean() < 0.9
    assert independent(np.array([-1 if preference is None else preference for preference in meant]), decided) is True


def test_split_half_reliability_is_zero_for_random_judge() -> None:
    rng = np.random.default_rng(4)
    worth = rng.normal(size=(80, 1))
    coin, judge = rng.integers(0, 2, (80, 4)).astype(float), worth + rng.normal(size=(80, 4))
    prompts = [row % 40 for row in range(80)]
    tossed, steady = split_half(coin, prompts, seed=1), split_half(judge, prompts, seed=1)
    assert tossed is not None and tossed.ci95[0] < 0 < tossed.ci95[1]
    assert steady is not None and steady.ci95[0] > 0.4
    assert split_half(coin[:, :1], prompts, seed=1) is None and split_half(np.ones((80, 2)), prompts, seed=1) is None
