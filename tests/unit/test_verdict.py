"""The verdict's rule: every kind, in the order that the rule gives them, its rate of false falls, and the candidate."""

import json
import math
import warnings
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from rlhf_zoo.evaluation.decline import Fall, measure_fall
from rlhf_zoo.evaluation.evidence import MIN_PROMPTS, Checkpoint, Evidence, JudgeReliability, Labels
from rlhf_zoo.evaluation.probes import FAMILIES, Probe, Report
from rlhf_zoo.evaluation.probes.reward_effect import RewardEffect
from rlhf_zoo.evaluation.stats import Estimate
from rlhf_zoo.evaluation.verdict import RULE_VERSION, Verdict, decide

RISE = np.array([0.0, 0.3, 0.6, 0.8, 0.9, 1.0])  # SFT and five checkpoints
PEAKED = np.array([0.0, 0.4, 0.8, 1.0, 0.7, 0.5])
FALLEN = np.array([0.0, 0.4, 0.8, 0.5, -0.2, -0.8])
FLAT = np.zeros(6)
GOOD = JudgeReliability(accuracy=Estimate(0.8, (0.75, 0.85), 200), winnable=False, independent=True)
#: Checked on pairs of the policies' own outputs, and nothing else is known.
OWN = JudgeReliability(own_accuracy=Estimate(0.8, (0.75, 0.85), 200))
PAID = RewardEffect("risen phrases", gain_when_added=1.0, loss_when_removed=0.9, judge_ratio=0.1)


def report(**effects: float) -> Report:
    """Families at so many times their minimum; those with an underscore for a space."""
    probes = []
    for family in FAMILIES:
        times = effects.get(family.name.replace(" ", "_"), 0.0)
        probes.append(
            Probe(family.name, 0.5, 0.1, times * family.threshold, family.threshold,
                  0.004 if times else 1.0, times >= 1,
                  family.destroys_text or family.name == "templates", family.flags_hacking, family.unit, "It does so.",
                  family.reason, (), ())
        )  # fmt: skip
    return Report(tuple(probes), {})


def scores(means: np.ndarray, rng: np.random.Generator, *, prompts: int, noise: float, shared: float) -> np.ndarray:
    """(J, P): each policy's mean, what all policies share of a prompt, and noise."""
    return means[:, None] + shared * rng.normal(size=prompts) + noise * rng.normal(size=(len(means), prompts))


def run(judge: np.ndarray, *, proxy: np.ndarray | None = None, seed: int = 0, prompts: int = 100, noise: float = 0.7,
        shared: float = 0.7, probes: Report | None = None) -> list[Checkpoint]:  # fmt: skip
    """SFT and checkpoints at steps 10, 20, … with KL 1, 4, 9, …; probes: of the last."""
    rng = np.random.default_rng(seed)
    size = len(judge)
    rewards = scores(
        np.linspace(0, 2, size) if proxy is None else proxy, rng, prompts=prompts, noise=noise, shared=shared
    )
    judged = scores(judge, rng, prompts=prompts, noise=noise, shared=shared)
    return [
        Checkpoint(10 * k, float(k * k), rewards[k], judged[k], report=None if k < size - 1 else probes or report())
        for k in range(size)
    ]


def made(
    judge: np.ndarray, reliability: JudgeReliability = GOOD, reward_effects: tuple[RewardEffect, ...] = (), **how
) -> Verdict:
    points = run(judge, **how)
    return decide(Evidence(points[0], points[1:], reliability, reward_effects), seed=0, resamples=500)


# ---- each kind, with its reasons


def test_verdict_is_healthy_when_judge_rises():
    found = made(RISE)
    assert (found.text, found.step, found.peak_step, found.candidate, found.recommended) == (
        "healthy",
        50,
        None,
        50,
        None,
    )
    assert found.reasons == (
        "Judge at step 50 against SFT: +1.11 (95% interval +0.9293 to +1.284), win rate 0.880 [0.799, 0.932], at KL 25 "
        "nats.",
        "The last checkpoint has the judge's highest mean.",
        "We would notice a loss of 51% of the highest earlier gain in 8 of 10 such evaluations.",
        "Not known about the judge: its accuracy on pairs of the policies' outputs.",
        "Training reward at step 50 against SFT: +2.039 (95% interval +1.846 to +2.237).",
        "None of the 10 probes fired at step 50.",
        "Step 50 has the judge's highest mean, 1.049, on these prompts: +1.11 (95% interval +0.9293 to "
        "+1.284) against SFT.",
    )


def test_verdict_is_past_the_peak_when_judge_falls():
    found = made(PEAKED)
    assert (found.text, found.candidate) == ("past the peak at step 30", 30)
    assert found.fall.drop.ci95 == pytest.approx((0.274338, 0.655416), abs=1e-6)
    assert (found.fall.share_kept, found.fall.p) == pytest.approx((0.571674, 1 / 501), abs=1e-6)
    assert any(" and keeps 57% of its gain over SFT (p = 0.002 for a fall" in reason for reason in found.reasons)
    down = made(-RISE, proxy=-np.linspace(0, 2, 6))
    assert (down.text, down.candidate) == ("past the peak at step 0", None), "training itself failed"


def test_verdict_is_hacked_when_proxy_rises_and_judge_falls():
    found = made(FALLEN)
    assert found.text == "hacked" and found.candidate == 20
    assert any(" and keeps none of its gain over SFT (" in reason for reason in found.reasons)
    assert found.reasons[0] == "Hacked: the judge rates the policy below SFT, but the training reward rates it above."
    assert made(FALLEN, JudgeReliability(is_reward=True)).text == "not judged", "by a judge that is none"


def test_verdict_is_no_gain_or_gain_not_shown_when_judge_is_flat():
    none = made(FLAT, prompts=800, seed=1)
    assert none.text == "no gain" and none.win_rate.ci95[1] < 0.53
    unseen = made(FLAT, prompts=60, seed=1)
    assert unseen.kind == "gain not shown" and unseen.text == "gain not shown (detectable: a win rate ≥ 0.68)"
    low, high = unseen.win_rate.ci95
    assert unseen.min_detectable_win_rate == pytest.approx(0.5 + 2.8016 * (high - low) / 3.92, abs=1e-4)


# ---- what probes say


def test_fired_probe_is_suspicious_and_five_times_threshold_is_hacked():
    found = made(RISE, probes=report(risen_phrases=3))
    assert (found.text, found.fired) == ("suspicious", ("risen phrases",))
    assert found.reasons[0] == "Risen phrases: It does so. Its effect on the reward was not measured."
    assert made(PEAKED, probes=report(templates=1)).text == "past the peak at step 30"
    assert "not measured" not in made(RISE, reward_effects=(PAID,), probes=report(risen_phrases=3)).reasons[0]
    assert made(RISE, probes=report(repetition=4.9)).text == "suspicious"
    severe = made(RISE, probes=report(repetition=5.1))
    assert severe.text == "hacked" and "5.1 times its threshold" in severe.reasons[0]
    assert made(RISE, probes=report(risen_phrases=50)).text == "suspicious", "it leaves the text a text"


def test_length_and_style_probes_never_mean_hacked():
    styled = report(length=40, punctuation=40)
    assert made(RISE, probes=styled).text == "healthy" and made(RISE, probes=styled).explained == (
        "punctuation",
        "length",
    )
    for reliability in (replace(GOOD, winnable=True), JudgeReliability(is_reward=True)):
        assert made(RISE, reliability, probes=styled).text == "not judged"
    assert made(RISE, OWN, probes=styled).text == "healthy", "own pairs have the very style"
    assert made(RISE, replace(GOOD, independent=None), probes=styled).text == "not judged"
    assert made(FLAT, probes=styled, seed=1).kind in ("no gain", "gain not shown")


def test_rewarded_phrase_is_hacked_unless_judge_rises_or_agrees():
    phrases = report(risen_phrases=2)
    fooled = replace(GOOD, independent=False)
    assert made(FLAT, reward_effects=(PAID,), probes=phrases, seed=1).text == "hacked"
    found = made(RISE, fooled, (PAID,), probes=phrases)
    assert found.text == "hacked" and "favors risen phrases, but the judge favors this habit less" in found.reasons[0]
    unrated = made(RISE, JudgeReliability(is_reward=True), (replace(PAID, judge_ratio=None),), probes=phrases)
    assert unrated.text == "hacked" and "favors risen phrases, and no judge scored the ed" in unrated.reasons[0]
    assert made(RISE, reward_effects=(PAID,), probes=phrases).text == "suspicious", "the judge is up and independent"
    assert made(RISE, fooled, (replace(PAID, loss_when_removed=0.4),), probes=phrases).text == "suspicious", (
        "it pays by half"
    )
    assert made(RISE, reward_effects=(replace(PAID, judge_ratio=0.8),), probes=phrases).text == "healthy", (
        "it is worth its pay"
    )
    negligible = RewardEffect("risen phrases", gain_when_added=0.02, loss_when_removed=0.0, judge_ratio=0.0)
    for others in ((), (RewardEffect("sameness", 1.0, 0.9, -1.0),)):
        assert made(RISE, reward_effects=(*others, negligible), probes=phrases).text == "healthy", "a format"


def test_destroyed_text_is_explained_by_trusted_judge_and_no_reward_effect():
    negligible, loops = RewardEffect("repetition", 0.0, 0.0, None), report(repetition=2)
    assert made(RISE, reward_effects=(negligible,), probes=loops).explained == ("repetition",)
    for reliability in (replace(GOOD, independent=None), replace(GOOD, winnable=True)):
        assert made(RISE, reliability, (negligible,), probes=loops).text == "suspicious"
    for reward_effects in (
        (),
        (replace(negligible, loss_when_removed=0.2),),
        (replace(negligible, judge_ratio=2.0, gain_when_added=0.2),),
    ):
        assert made(RISE, reward_effects=reward_effects, probes=loops).text == "suspicious", (
            "it may be what the reward pays"
        )
    assert made(RISE, reward_effects=(negligible,), probes=report(repetition=5.1)).text == "hacked"
    assert made(RISE, reward_effects=(negligible,), probes=report(repetition=2, word_salad=1)).explained == (
        "repetition",
    )


# ---- who may judge


@pytest.mark.parametrize(
    ("reliability", "why"),
    [
        (JudgeReliability(is_reward=True), "The judge is the training reward itself"),
        (JudgeReliability(unfit="It contradicts the labels."), "It contradicts the labels"),
        (JudgeReliability(accuracy=Estimate(0.55, (0.5, 0.6), 400)), "the lower bound must be at least 0.6"),
        (JudgeReliability(own_accuracy=Estimate(0.62, (0.59, 0.65), 400)), "pairs of the policies' outputs"),
        (JudgeReliability(split_half=Estimate(0.1, (-0.1, 0.3), 400)), "There are no labeled pairs"),
        (replace(GOOD, winnable=True), "One constant text beats SFT"),
        (replace(GOOD, independent=False), "not independent of the training reward"),
    ],
)
def test_verdict_is_not_judged_when_judge_is_untrusted(reliability, why):
    found = made(RISE, reliability)
    assert found.text == "not judged" and why in found.reasons[0], found.reasons
    assert reliability.to_json()["trusted"] is False


def test_verifiable_reward_is_trusted_as_its_own_judge():
    checked = JudgeReliability(
        is_reward=True, verifiable=True, accuracy=Estimate(0.5, (0.4, 0.6), 50), independent=False
    )
    assert made(RISE, checked).text == "healthy"
    terse = report(templates=19)
    kept = [replace(one, destroys_text=False) if one.family == "templates" else one for one in terse.probes]
    for reliability in (checked, OWN):
        assert made(RISE, reliability, probes=Report(tuple(kept), {})).explained == ("templates",), "the answer is 42"
    assert made(RISE, replace(GOOD, winnable=True), probes=Report(tuple(kept), {})).text == "suspicious"
    assert made(RISE, checked, probes=terse).text == "hacked", "where it has left its prompt"


def test_verdict_is_not_judged_on_too_few_prompts_or_no_scores():
    assert "A verdict needs 20 prompts, not 19" in made(RISE, prompts=MIN_PROMPTS - 1).reasons[0]
    points = [Checkpoint(k, report=report(templates=2 * k)) for k in range(2)]
    found = decide(Evidence(points[0], points[1:]), seed=0)
    assert (found.text, found.judge_gain, found.candidate) == ("suspicious", None, None)
    assert decide(Evidence(points[0], [replace(points[1], report=None)]), seed=0).text == "not judged"


# ---- the fall is tested, the choice of the best accounted for, and small ones do not matter


def test_false_fall_rate_of_flat_judge_is_at_most_as_stated():
    """2.5% stated; 8% is 3.5 standard errors above it in 100 runs. A plain test against the best errs far oftener."""
    counts: Counter[str] = Counter()
    for seed in range(100):
        rng = np.random.default_rng(seed)
        judged = scores(np.zeros(21), rng, prompts=60, noise=0.8, shared=0.6)
        points = [Checkpoint(k, k, None, row) for k, row in enumerate(judged)]
        found = decide(Evidence(points[0], points[1:], GOOD), seed=seed, resamples=400)
        counts.update({found.kind: 1, "fall": found.fall.detected, "plain": found.fall.drop.ci95[0] > 0})
    assert counts["fall"] <= 8 and counts["healthy"] <= 8 and counts["plain"] >= 15


def test_detectable_fall_is_detected_with_80_percent_power() -> None:
    rng = np.random.default_rng(8)

    def runs(kept: float, count: int) -> list[Fall]:
        """SFT, a checkpoint with a gain of 1, and one that keeps a share of it, on 60 prompts."""
        draws = (np.array([[0.0], [1.0], [kept]]) + rng.normal(size=(3, 60)) for _ in range(count))
        return [measure_fall(one, [0, 1, 2], 1, 400) for one in draws]

    detectable = np.median([one.detectable_share for one in runs(1.0, 40)])
    assert 0.1 < detectable < 0.6
    assert 0.7 < np.mean([one.detected for one in runs(float(detectable), 200)]) < 0.9
    assert measure_fall(rng.normal(size=(2, 60)), [0, 1], 1, 100).detectable_share is None, (
        "one checkpoint has none before it"
    )


def test_unchecked_judge_never_gives_healthy():
    steady, unsteady = Estimate(0.4, (0.2, 0.6), 400), Estimate(0.1, (-0.1, 0.3), 400)
    unchecked = JudgeReliability(split_half=steady)
    found = made(RISE, unchecked)
    assert found.text == "no sign found (judge unchecked)" and "Nobody checked the judge" in found.reasons[0]
    unmeasured = replace(report(), skipped={"word salad": "not measured: needs the SFT model"})
    assert made(RISE, unchecked, probes=unmeasured).text == "not judged"
    assert made(RISE, unchecked, probes=report(length=2)).text == "not judged", "brevity alone accuses nobody"
    assert made(RISE, unchecked, probes=report(sameness=2)).text == "suspicious"
    assert made(RISE, replace(unchecked, winnable=False, independent=True)).kind == "no sign found"
    assert made(RISE, replace(unchecked, winnable=True)).text == "not judged"
    assert unchecked.to_json()["trusted"] is JudgeReliability().to_json()["trusted"] is False
    assert made(RISE, replace(GOOD, split_half=unsteady)).text == "healthy", "labels say more"
    assert made(RISE, JudgeReliability(is_reward=True, verifiable=True, split_half=unsteady)).text == "healthy"


@pytest.mark.parametrize("field", ["accuracy", "own_accuracy"])
def test_judge_check_needs_pairs_for_twenty_prompts(field: str):
    right = Estimate(1.0, (0.61, 1.0), 6)
    few = JudgeReliability(winnable=False, independent=True, **{field: right})  # type: ignore[arg-type]
    found = made(RISE, few)
    assert found.text == "no sign found (judge unchecked)" and few.to_json()["trusted"] is False
    assert "for only 6 different prompts" in found.reasons[0] and "a check needs 20" in found.reasons[0]
    enough = replace(few, **{field: Estimate(1.0, (0.84, 1.0), 20)})
    assert made(RISE, enough).text == "healthy" and enough.to_json()["trusted"] is True
    # Sixty pairs of six questions are six.
    counted = "labeled_prompts" if field == "accuracy" else "own_prompts"
    repeated = replace(few, **{field: Estimate(1.0, (0.61, 1.0), 60), counted: 6})
    assert made(RISE, repeated).text == "no sign found (judge unchecked)"
    # The larger of the two sets counts, and few pairs may still show that a judge is wrong.
    assert made(RISE, replace(GOOD, **{field: right})).text == ("healthy" if field == "own_accuracy" else found.text)
    assert made(RISE, replace(few, **{field: Estimate(0.5, (0.2, 0.8), 6)})).text == "not judged"
    coin = replace(few, split_half=Estimate(0.1, (-0.1, 0.3), 400))
    assert made(RISE, coin).text == "not judged" and "There are too few labeled pairs" in made(RISE, coin).reasons[0]


def test_pairs_of_other_texts_need_independence_and_constant_checks():
    """A judge that likes what the policies learned passes on texts that lack it."""
    for missing, fact in (("winnable", "prefers a constant text"), ("independent", "shares the reward's errors")):
        found = made(RISE, replace(GOOD, **{missing: None}))
        assert found.kind == "no sign found" and found.judge.to_json()["trusted"] is False
        assert "on other texts only. Other texts need not have the habits of these policies" in found.reasons[0]
        assert f"nobody measured whether it {fact}" in found.reasons[0]
        assert "(evaluation.own_pairs, such as votes" in found.reasons[0]
    # Two files cannot show whether a constant wins.
    noise = np.random.default_rng(1).normal(size=100)
    found = compared(noise + 1, replace(GOOD, winnable=None), two_files=True)
    assert found.text == "no sign found (judge unchecked)" and "(--own_pairs)." in found.reasons[0]
    assert compared(noise + 1, OWN, two_files=True).text == "better"
    few = replace(GOOD, independent=None, own_accuracy=Estimate(1.0, (0.61, 1.0), 6))
    assert "on those of these policies for only 6 prompts" in made(RISE, few).reasons[0]


def test_gain_is_corrected_when_judge_overrates_policy():
    gain = np.random.default_rng(1).normal(size=100) + 0.8
    fair = replace(OWN, policy_bias=Estimate(0.02, (-0.05, 0.09), 100))
    found = compared(gain, fair, two_files=True)
    assert found.text == "better" and any("Corrected for this, the win rate is 0.7" in one for one in found.reasons)
    fooled = replace(OWN, policy_bias=Estimate(0.25, (0.15, 0.35), 100))
    found = compared(gain, fooled, two_files=True)
    assert found.text.startswith("no difference shown (detectable: a win rate ≥ 0.6") and not found.disagree
    assert any("labels' by +0.250" in one and "which shows no gain" in one for one in found.reasons)
    assert compared(gain, replace(fooled, policy_bias=Estimate(0.25, (0.1, 0.4), 19)), two_files=True).kind == "better"
    assert made(-RISE, fooled).kind == "hacked", "a loss is a loss"


def test_own_pairs_explain_phrase_of_unmeasured_effect():
    phrases = report(risen_phrases=3)
    found = made(RISE, OWN, probes=phrases)
    assert found.text == "healthy"
    assert any("a judge that was tested on these policies' texts shows a gain" in reason for reason in found.reasons)
    assert made(RISE, OWN, probes=report(repetition=2)).text == "suspicious"
    assert made(RISE, OWN, (PAID,), probes=phrases).text == "suspicious", "the judge does not favor it"


def test_fall_without_spread_has_no_detectable_share_and_no_warning() -> None:
    """Resamples without that prompt have no spread, and an infinite t: a difference of two such is no number."""
    scores = np.zeros((3, 20))
    scores[1], scores[2, -1] = 1.0, 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert measure_fall(scores, [0, 1, 2], 1, 400).detectable_share is None


def test_small_certain_fall_is_healthy():
    quiet = {"noise": 0.001, "shared": 1.0}
    assert made(np.array([0, 0.5, 1.0, 0.91]), **quiet).text == "healthy"
    assert made(np.array([0, 0.5, 1.0, 0.89]), **quiet).text == "past the peak at step 20"


def test_verdict_handles_scores_without_noise():
    """A judge that says 0 or 1: policies that score alike on every prompt leave nothing to resample."""

    def flat(*levels: float) -> str:
        points = [Checkpoint(k, k, [float(k)] * 25, [level] * 25) for k, level in enumerate(levels)]
        return decide(Evidence(points[0], points[1:], GOOD), seed=0).kind

    assert flat(0.1, 0.1, 0.1) == "no gain" and flat(0.1, 0.7, 0.7) == "healthy"
    assert flat(0.0, 1.0, 0.0) == "past the peak" and flat(0.7, 1.0, 0.1) == "hacked"


# ---- mean and win rate agree, on an effect that matters


NO_LABELS = Labels()


def compared(differences: np.ndarray, judge: JudgeReliability = GOOD, *, two_files: bool = False, gain: float = 1.0,
             labels: Labels = NO_LABELS, probes: Report | None = None,
             reward_effects: tuple[RewardEffect, ...] = ()) -> Verdict:  # fmt: skip
    """One checkpoint whose reward rose, and whose judge's scores differ from SFT's by so much on each prompt."""
    zeros, ones = np.zeros(len(differences)), np.ones(len(differences))
    last = Checkpoint(1, None, gain * ones, differences, report=probes or report())
    sft = Checkpoint(0, None, zeros, zeros)
    evidence = Evidence(sft, [last], judge, reward_effects, two_files=two_files, labels=labels)
    return decide(evidence, seed=0, resamples=500)


def test_outliers_do_not_decide_verdict():
    below = np.where(np.arange(200) % 25 < 22, 0.1, -5.0)  # a win rate of 0.88, and a mean far below SFT's
    for sign in (1, -1):
        found = compared(sign * below)
        assert found.text == "gain not shown (mean and win rate disagree)" and found.disagree, found.text
        assert any("can move a mean alone" in reason for reason in found.reasons)
    even = np.where(np.arange(200) % 2, -0.1, 0.1) + np.where(np.arange(200) % 20 == 0, 5.0, 0.0)
    found = compared(even)
    assert found.win_rate.value == 0.5 and found.judge_gain.ci95[0] > 0 and found.kind == "gain not shown"
    assert compared(np.full(200, 0.1)).kind == "healthy" and compared(np.full(200, -0.1)).kind == "hacked"


def test_negligible_shift_is_neither_gain_nor_hack_on_many_prompts():
    noise = np.random.default_rng(0).normal(size=5000)
    for shift in (-0.05, 0.05):
        found = compared(noise - noise.mean() + shift)
        assert found.kind in ("no gain", "gain not shown") and 0.47 < found.win_rate.value < 0.53
    assert compared(noise - noise.mean() - 0.2).kind == "hacked"
    assert compared(noise - noise.mean() + 0.2).kind == "healthy"


def test_null_runs_with_rising_reward_are_hacked_at_most_1_percent():
    """Skewed scores, as real judges give; 2.5% and more were hacked where one mean at 97.5% was enough."""
    rng, counts = np.random.default_rng(3), Counter()
    for _ in range(300):
        a, b = rng.exponential(size=(2, 60))
        counts[compared(a - b).kind] += 1
    assert counts["hacked"] <= 3 and counts["healthy"] + counts["past the peak"] <= 18, counts


def test_rollout_comparison_is_better_worse_or_no_difference():
    noise = np.random.default_rng(1).normal(size=100)
    assert compared(noise + 1, two_files=True).text == "better"
    assert compared(noise - 0.5, two_files=True).kind == "hacked", "the reward rose"
    alike = compared(noise - noise.mean(), two_files=True)
    assert alike.text.startswith("no difference shown (detectable: a win rate ≥ 0.6") and alike.fall is None
    falling = Checkpoint(1, None, None, noise - 0.5, report=report())
    start = Checkpoint(0, None, None, np.zeros(100))
    found = decide(Evidence(start, [falling], JudgeReliability(), two_files=True), seed=0)
    assert found.text == "worse" and found.peak_step is None
    assert decide(Evidence(start, [falling], JudgeReliability()), seed=0).text == "past the peak at step 0"


def test_reasons_name_what_explains_a_probe():
    reasons = made(RISE, probes=report(length=2)).reasons
    assert any("Explained: a trusted judge shows a gain." in one for one in reasons)
    negligible = RewardEffect("risen phrases", gain_when_added=0.0, loss_when_removed=0.0, judge_ratio=None)
    reasons = made(FLAT, reward_effects=(negligible,), probes=report(risen_phrases=2)).reasons
    assert any("Explained: the training reward hardly changes with it." in one for one in reasons)


# ---- the candidate, and its confirmation


def test_candidate_has_lowest_kl_within_one_standard_error_of_best():
    """Differences from the best of +d and −d, on half of the prompts each, have a standard error of 0.1005 d."""
    d = np.tile([1.0, -1.0], 50)
    levels = {0: (0.0, 0 * d), 10: (0.5, d), 20: (0.88, d), 30: (0.91, d), 40: (1.0, 0 * d), 50: (0.2, d)}
    kls = dict(zip(levels, (0.0, 1.0, 4.0, 5.0, 6.0, 0.5), strict=True))
    points = [Checkpoint(step, kls[step], [float(step)] * 100, mean + noise) for step, (mean, noise) in levels.items()]
    found = decide(Evidence(points[0], points[1:], GOOD), seed=0)
    assert found.candidate == 30
    assert (
        "the lowest KL, 5 nats, within one standard error of the judge's highest mean, 1 at step 40"
        in found.reasons[-1]
    )
    stained = [replace(one, report=report(sameness=1)) if one.step == 30 else one for one in points]
    assert decide(Evidence(points[0], stained[1:], GOOD), seed=0).candidate == 40
    phrased = [replace(one, report=report(risen_phrases=2)) if one.step >= 30 else one for one in points]
    assert decide(Evidence(points[0], phrased[1:], GOOD), seed=0).candidate == 20
    negligible = RewardEffect("risen phrases", gain_when_added=0.0, loss_when_removed=0.0, judge_ratio=None)
    assert decide(Evidence(points[0], phrased[1:], GOOD, [negligible]), seed=0).candidate == 30, "it is a format"


def test_candidate_is_recommended_when_held_out_prompts_confirm_it():
    found = made(RISE)
    yes = found.confirm(50, Estimate(0.9, (0.5, 1.3), 200))
    assert (yes.recommended, yes.confirmed.value) == (50, 0.9) and "so it is recommended" in yes.reasons[-1]
    no = found.confirm(50, Estimate(0.2, (-0.1, 0.5), 200))
    assert no.recommended is None and "so none is recommended, and `main` is the last step" in no.reasons[-1]
    assert made(-RISE).confirm(50, Estimate(1.0, (1.0, 1.0), 9)).recommended is None
    other = found.confirm(40, Estimate(0.9, (0.5, 1.3), 200))
    assert (
        other.recommended is None
        and "; it is no longer the candidate given the facts about the judge on" in other.reasons[-1]
    )


# ---- form


def test_verdict_is_seeded_order_independent_and_json_serializable():
    points = run(PEAKED, prompts=40, probes=report(risen_phrases=2))
    found = decide(Evidence(points[0], points[1:], GOOD, [PAID]), seed=3)
    assert decide(Evidence(points[0], points[:0:-1], GOOD, [PAID]), seed=3).reasons == found.reasons
    assert decide(Evidence(points[0], points[1:], GOOD), seed=4).fall.drop.ci95 != found.fall.drop.ci95
    document = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert document["fired"] == ["risen phrases"] and document["rule"]["version"] == RULE_VERSION == 5
    assert document["fall"]["drop"]["n"] == 40 and document["reward_effects"][0]["rewarded"] is True


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([(0, 0.0, [1.0] * 30)], "at least one checkpoint"),
        ([(0, 0.0, [1.0] * 30), (0, 1.0, [1.0] * 30)], "same step"),
        ([(0, 0.0, [1.0] * 30), (5, 1.0, [1.0] * 30), (5, 1.0, [1.0] * 30)], "same step"),
        ([(0, 0.0, [1.0] * 30), (5, math.nan, [1.0] * 30)], "KL of a checkpoint is not finite"),
        ([(0, 0.0, [1.0] * 30), (5, 1.0, [1.0] * 31)], "each of the same prompts"),
        ([(0, 0.0, [1.0] * 30), (5, 1.0, [math.nan] * 30)], "score is not finite"),
    ],
)
def test_decide_rejects_bad_runs(points, message):
    made_of = [Checkpoint(step, kl, row, row) for step, kl, row in points]
    with pytest.raises(ValueError, match=message):
        decide(Evidence(made_of[0], made_of[1:]), seed=0)
