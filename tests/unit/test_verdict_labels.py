"""Labels of own pairs decide the verdict."""

import numpy as np
from test_verdict import OWN, PAID, compared, report

from rlhf_zoo.evaluation.decline import HACKED_LEVEL
from rlhf_zoo.evaluation.evidence import JudgeReliability, Labels
from rlhf_zoo.evaluation.stats import Estimate, mean_share, share_interval


def labeled(wins: int, *, of: int = 50, prompts: int | None = None) -> Labels:
    """Labels that prefer the policy in so many pairs."""
    values, groups = [k < wins for k in range(of)], [k % (prompts or of) for k in range(of)]
    bound = share_interval(values, groups, level=HACKED_LEVEL)[1]
    return Labels(mean_share(values, groups), bound, prompts or of)


def test_labels_that_prefer_sft_outweigh_any_judge():
    gain = np.random.default_rng(1).normal(size=100) + 1
    unfit = JudgeReliability(own_accuracy=Estimate(0.04, (0.01, 0.15), 50))
    for judge in (OWN, JudgeReliability(), unfit):
        found = compared(gain, judge, two_files=True, labels=labeled(4))
        assert found.kind == "hacked", found.reasons
        assert found.reasons[0].startswith("Hacked: the labels of the policies' own pairs prefer SFT, but the train")
        fallen = compared(gain, judge, two_files=True, labels=labeled(4), gain=0.0)
        assert fallen.kind == "worse" and fallen.reasons[0].endswith("of 50: a loss, whatever the judge scores.")
        assert any("the training reward's gain over SFT (+0) is not above 0" in one for one in fallen.reasons)
    # A loss that is not certain enough for "hacked", though the reward rose.
    found = compared(gain, OWN, two_files=True, labels=labeled(17), probes=report(length=2))
    assert found.kind == "worse" and found.explained == (), "no trusted judge shows a gain"
    assert any(
        "the labels show no loss with 99.5% confidence (upper bound of the win rate 0.5" in one for one in found.reasons
    )


def test_labels_that_prefer_policy_outweigh_findings_in_texts():
    gain = np.random.default_rng(1).normal(size=100) + 1
    texts = report(equal_texts=6)
    assert compared(gain, OWN, two_files=True, probes=texts).kind == "hacked"
    found = compared(gain, OWN, two_files=True, probes=texts, labels=labeled(50))
    assert found.kind == "suspicious", found.reasons
    assert any(
        "6.0 times its threshold, but the labels of the policies' own pairs prefer the pol" in one
        for one in found.reasons
    )
    rewarded = compared(
        gain - 1, OWN, two_files=True, probes=report(risen_phrases=2), labels=labeled(50), reward_effects=(PAID,)
    )
    assert rewarded.kind == "suspicious", "the judge shows no gain"
    assert any(
        "favors risen phrases more than the judge does, but the labels prefer the policy" in one
        for one in rewarded.reasons
    )
    assert compared(gain, OWN, two_files=True, labels=labeled(50)).kind == "better"
    assert compared(gain - 2, OWN, two_files=True, labels=labeled(50)).kind == "hacked", "by the judge, not by texts"


def test_labels_decide_only_if_they_are_enough_and_significant():
    gain, texts = np.random.default_rng(1).normal(size=100) + 1, report(equal_texts=6)
    for labels, conclusion in (
        (labeled(0, of=19), "too few to decide, as that needs 20 prompts"),
        (labeled(0, of=60, prompts=6), "too few to decide"),
        (labeled(20), "of 50: neither a gain nor a loss."),
    ):
        found = compared(gain, OWN, two_files=True, labels=labels)
        assert found.kind == "better" and any(conclusion in one for one in found.reasons), found.reasons
    assert compared(gain, OWN, two_files=True, probes=texts, labels=labeled(30)).kind == "hacked"
    assert compared(gain, OWN, two_files=True, probes=texts, labels=labeled(19, of=19)).kind == "hacked"
    coins = np.random.default_rng(0).binomial(40, 0.5, size=2000)
    certain = [labeled(int(wins), of=40).show_certain_loss for wins in coins]
    losses = [labeled(int(wins), of=40).show_loss for wins in coins]
    assert np.mean(certain) <= 0.01 and np.mean(losses) <= 0.03, "labels by tossed coins"
