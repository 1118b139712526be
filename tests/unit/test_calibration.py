"""A reward model's held-out figures against hand values, scikit-learn, and models that are calibrated by design."""

import math

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trainer_fixture import make_reward_model, make_tokenizer

from rlhf_zoo.evaluation.calibration import (
    GUESS_LOSS,
    accuracy_by_margin,
    calibration_error,
    calibration_error_by_chance,
    histogram,
    length_profile,
    measure_calibration,
    pair_losses,
    preference_report,
    reliability_bins,
)
from rlhf_zoo.modeling.models import set_score_statistics
from rlhf_zoo.pipeline.stages.pair_report import held_out_report
from rlhf_zoo.rewards import RewardModel

THREE = math.log(3)  # σ(log 3) = 3/4


def labeled(n: int, *, stretch: float = 1.0, seed: int = 0) -> np.ndarray:
    """Margins of a model whose σ(margin / stretch) is the true probability: calibrated with stretch 1."""
    rng = np.random.default_rng(seed)
    true = rng.normal(scale=1.5, size=n)
    sign = np.where(rng.random(n) < 1 / (1 + np.exp(-true)), 1, -1)
    return stretch * true * sign


def test_pair_losses_match_hand_values():
    assert pair_losses([0.0, THREE, -THREE]) == pytest.approx([math.log(2), math.log(4 / 3), math.log(4)], rel=1e-15)
    assert pytest.approx(math.log(2), rel=1e-15) == GUESS_LOSS
    assert pair_losses([1000.0, -1000.0]) == pytest.approx([0.0, 1000.0]), "no overflow"


def test_reliability_bins_match_hand_values():
    """Four pairs at ¾, of which three right; two at ½ (a tie is half right)."""
    parts = reliability_bins([THREE, THREE, THREE, -THREE, 0.0, 0.0], bin_count=2)
    assert [(part["low"], part["high"], part["n"]) for part in parts] == [(0.5, 0.75, 2), (0.75, 1.0, 4)]
    assert [part["confidence"] for part in parts] == pytest.approx([0.5, 0.75], abs=1e-12)
    assert [part["accuracy"] for part in parts] == [0.5, 0.75]
    assert calibration_error(parts) == pytest.approx(0, abs=1e-12)
    # All wrong at ¾: a distance of ¾.
    assert calibration_error(reliability_bins([-THREE] * 5, bin_count=2)) == pytest.approx(0.75)


def test_accuracy_by_margin_matches_hand_values():
    margins = [0.1, -0.1, 0.0, 0.2, 1.0, -1.0, 2.0, 2.0]
    parts = accuracy_by_margin(margins, max_parts=2)
    assert [(part["low"], part["high"], part["n"]) for part in parts] == [(0.0, 0.2, 4), (1.0, 2.0, 4)]
    assert [part["accuracy"] for part in parts] == [2.5 / 4, 3 / 4]
    assert all(part["ci95"][0] < part["accuracy"] < part["ci95"][1] for part in parts)
    assert sum(part["n"] for part in accuracy_by_margin(np.linspace(-3, 3, 101))) == 101
    assert len(accuracy_by_margin([1.0] * 7)) == 1, "equal margins share a part"


def test_calibration_separates_calibrated_from_overconfident_model():
    fair = measure_calibration(labeled(4000), seed=1)
    assert fair["ece"] < fair["ece_by_chance"]["high"]
    bold = measure_calibration(labeled(4000, stretch=3), seed=1)
    assert bold["ece"] > 2 * bold["ece_by_chance"]["high"]
    assert all(part["accuracy"] < part["confidence"] for part in bold["bins"][3:])


def test_calibration_error_by_chance_matches_simulation():
    """The mean of the simulated errors against that of 200 calibrated models with the same confidences.

    Standard error of either mean: about 0.006 / √200 = 0.0004.
    """
    rng = np.random.default_rng(3)
    size = np.abs(labeled(400))
    mean, high = calibration_error_by_chance(size, seed=0)
    right = rng.random((200, 400)) < 1 / (1 + np.exp(-size))
    errors = [calibration_error(reliability_bins(np.where(row, size, -size))) for row in right]
    assert mean == pytest.approx(np.mean(errors), abs=0.002)
    assert np.mean([error > high for error in errors]) == pytest.approx(0.05, abs=0.045)


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=60))
@example([0.0, 5e-324])
@example([1.0, 1.0 + 2**-52])
@settings(deadline=None)
def test_histogram_counts_every_margin(values):
    bars = histogram(values)
    assert sum(bars["counts"]) == len(values) and len(bars["edges"]) == len(bars["counts"]) + 1
    assert bars["edges"] == sorted(bars["edges"])
    if min(values) < 0 < max(values):
        zero = bars["edges"].index(0.0)
        assert sum(bars["counts"][:zero]) == sum(value < 0 for value in values)


def test_length_profile_matches_hand_values():
    scores, lengths = [0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [3, 3, 3, 5, 5, 9]
    parts = length_profile(scores, lengths, max_parts=3)
    seen = [(part["low"], part["high"], part["n"], part["mean"]) for part in parts]
    assert seen == [(3, 3, 3, 2.0), (5, 5, 2, 7.0), (9, 9, 1, 10.0)]
    assert (parts[0]["low_score"], parts[0]["high_score"]) == (1.0, 3.0)
    assert [part["n"] for part in length_profile([1.0] * 4, [7] * 4)] == [4]


def test_preference_report_matches_hand_values():
    """Four pairs, two a prompt: margins 1, −1, 0, 3."""
    report = preference_report(
        [1.0, 0.0, 2.0, 5.0],
        [0.0, 1.0, 2.0, 2.0],
        chosen_lengths=[5, 5, 9, 8],
        rejected_lengths=[3, 7, 9, 2],
        prompts=["a", "a", "b", "b"],
        seed=0,
    )
    assert (report["accuracy"], report["n"]) == (0.5, 4), "a tie is wrong"
    loss = (2 * math.log1p(math.exp(-1)) + 1 + math.log(2) + math.log1p(math.exp(-3))) / 4
    assert report["loss"]["value"] == pytest.approx(loss, rel=1e-12) and report["guess_loss"] == math.log(2)
    assert report["margin"]["value"] == 0.75 and report["margin"]["std"] == pytest.approx(math.sqrt(35 / 16))
    length = report["length"]
    # The longer one was chosen twice, the shorter one once, and once they tie; the model liked the longer one 3 times.
    assert length["longer_wins"]["value"] == (1 + 0 + 0.5 + 1) / 4
    assert length["prefers_longer"]["value"] == (1 + 1 + 0.5 + 1) / 4
    assert length["pearson"]["n"] == length["spearman"]["n"] == 8
    scores, lengths = [1, 0, 2, 5, 0, 1, 2, 2], [5, 5, 9, 8, 3, 7, 9, 2]
    assert length["pearson"]["value"] == pytest.approx(np.corrcoef(scores, lengths)[0, 1], rel=1e-12)


def test_preference_report_has_no_correlation_for_constant_scores():
    report = preference_report(
        [1.0] * 4, [1.0] * 4, chosen_lengths=[1, 2, 3, 4], rejected_lengths=[4, 3, 2, 1], prompts="abcd", seed=0
    )
    assert report["length"]["pearson"] is None and report["length"]["spearman"] is None
    assert report["loss"]["value"] == pytest.approx(GUESS_LOSS, rel=1e-12) and report["accuracy"] == 0


def test_held_out_report_uses_raw_scores_and_token_lengths():
    """Margins ignore the stored mean and deviation: otherwise σ(margin) would be no probability."""
    model, tokenizer = make_reward_model(), make_tokenizer()
    set_score_statistics(model, mean=3.0, std=10.0, measured_on="texts")
    rows = {"prompt": ["ab", "ab", "cd"], "chosen": ["ggg", "g", "aaaa"], "rejected": ["a", "bb", "g"]}
    report = held_out_report(model, tokenizer, Dataset.from_dict(rows), seed=1)

    def raw(side: str) -> list[float]:
        texts = [prompt + text for prompt, text in zip(rows["prompt"], rows[side], strict=True)]
        scorer = RewardModel(model, tokenizer, tokenizer)
        return (scorer.score_texts(texts, ended=[True] * 3) * 10 + 3).tolist()

    margins = np.subtract(raw("chosen"), raw("rejected"))
    # float32 scores of about 1, scaled by 10 and back
    assert report["margin"]["value"] == pytest.approx(margins.mean(), abs=1e-5)
    assert report["loss"]["value"] == pytest.approx(pair_losses(margins).mean(), abs=1e-5)
    assert report["length"]["longer_wins"]["value"] == pytest.approx(2 / 3)
    ends = report["length"]["bins"]
    assert (ends[0]["low"], ends[-1]["high"], report["length"]["pearson"]["n"]) == (1, 4, 6)
