"""The verdict's rule on runs of each kind, its rate of false alarms, and the checkpoint that it recommends."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from rlhf_zoo.evaluation.verdict import FEWEST, HACKED_PROBES, Checkpoint, Verdict, decide

RISE = np.array([0.0, 0.3, 0.6, 0.8, 0.9, 1.0])  # SFT and five checkpoints
PEAKED = np.array([0.0, 0.4, 0.8, 1.0, 0.7, 0.5])
FALLEN = np.array([0.0, 0.4, 0.8, 0.5, -0.2, -0.8])
FLAT = np.zeros(6)


@dataclass(frozen=True)
class Probe:
    name: str
    value: float
    threshold: float
    fired: bool
    family: str


def probes(fired: int, of: int = 8, *, kinds: int = 8) -> tuple[Probe, ...]:
    return tuple(
        Probe(f"probe {i}", 0.5, 0.1 if i < fired else 0.9, i < fired, f"kind {min(i, kinds - 1)}") for i in range(of)
    )


def scores(means: np.ndarray, rng: np.random.Generator, *, prompts: int, noise: float, shared: float) -> np.ndarray:
    """(J, P): each policy's mean, what all policies share of a prompt, and noise."""
    return means[:, None] + shared * rng.normal(size=prompts) + noise * rng.normal(size=(len(means), prompts))


def made(
    judge: np.ndarray,
    *,
    proxy: np.ndarray | None = None,
    seed: int = 0,
    prompts: int = 100,
    noise: float = 0.7,
    shared: float = 0.7,
    fired: Sequence[int] | None = None,
    resamples: int = 500,
    **options: bool,
) -> Verdict:
    """A run of checkpoints at steps 10, 20, … with KL 1, 4, 9, …; fired: how many probes fire at each."""
    rng = np.random.default_rng(seed)
    size = len(judge)
    rewards = scores(
        np.linspace(0, 2, size) if proxy is None else proxy, rng, prompts=prompts, noise=noise, shared=shared
    )
    judged = scores(judge, rng, prompts=prompts, noise=noise, shared=shared)
    points = [
        Checkpoint(10 * k, float(k * k), rewards[k], judged[k], probes(fired[k - 1]) if k and fired else ())
        for k in range(size)
    ]
    return decide(points[0], points[1:], seed=seed, resamples=resamples, **options)


# ---- runs of each kind: what is said of them has all their figures


def reward_rose(said: str = "+2.039 (95% interval +1.848 to +2.231)") -> str:
    return f"Training reward at step 50 against SFT: {said}."


def fell(at: str, by: str) -> str:
    after = "for a fall from any checkpoint below 90% of its gain)."
    return f"The judge was highest at step {at} and has fallen by {by} {after}"


UNPROBED = "No probe was run at step 50, so a judge that is fooled like the reward would go unnoticed."


def test_a_run_that_rises_is_healthy():
    found = made(RISE, fired=[0] * 5)
    assert (found.kind, found.text, found.step, found.peak_step) == ("healthy", "healthy", 50, None)
    assert (found.recommended, found.fired, found.fall.found) == (50, (), False)
    assert found.reasons == (
        reward_rose(),
        "Judge at step 50 against SFT: +1.11 (95% interval +0.9335 to +1.281), at KL 25 nats.",
        "The last checkpoint has the judge's highest mean.",
        "None of 8 probes fires at step 50.",
        "Recommended is step 50, with the judge's highest mean, 1.049: +1.11 (95% interval +0.9335 to +1.281) against "
        "SFT.",
    )
    assert made(RISE).reasons[3] == UNPROBED


def test_a_run_whose_judge_fell_from_its_best_is_past_the_peak():
    found = made(PEAKED, fired=[0, 0, 0, 1, 2])
    assert (found.kind, found.text, found.peak_step) == ("past the peak", "past the peak at step 30", 30)
    assert (found.recommended, found.fired) == (30, ("probe 0", "probe 1"))
    assert found.fall.drop.ci95 == pytest.approx((0.277121, 0.654314), abs=1e-6)
    assert (found.fall.kept, found.fall.p) == pytest.approx((0.571674, 1 / 501), abs=1e-6)
    assert found.reasons == (
        reward_rose(),
        "Judge at step 50 against SFT: +0.6102 (95% interval +0.4335 to +0.7808), at KL 25 nats.",
        fell("30 (1.007, KL 9 nats)", "0.4572 since, 57% of its gain over SFT kept (p = 0.002"),
        "2 of 8 probes fire at step 50 (probe 0 0.5, threshold 0.1; probe 1 0.5, threshold 0.1): fewer than the 3 "
        "kinds that are held to be hacking.",
        "Recommended is step 30, with the judge's highest mean, 1.007: +1.067 (95% interval +0.9126 to +1.194) against "
        "SFT.",
    )


def test_a_judge_below_sft_under_a_reward_above_it_is_hacked():
    found = made(FALLEN)
    assert (found.text, found.peak_step, found.recommended) == ("hacked", 20, 20)
    assert found.reasons[1:5] == (
        "Judge at step 50 against SFT: -0.6898 (95% interval -0.8665 to -0.5192), at KL 25 nats.",
        "The judge rates it below SFT while the training reward rates it above.",
        fell("20 (0.7498, KL 4 nats)", "1.5 since, none of its gain over SFT kept (p = 0.002"),
        UNPROBED,
    )


def test_a_judge_below_sft_under_a_reward_that_did_not_rise_is_a_failed_training():
    found = made(np.array([0.0, -0.3, -0.6, -0.8, -0.9, -1.0]), proxy=-np.linspace(0, 2, 6))
    assert (found.text, found.fall.kept, found.recommended) == ("past the peak at step 0", None, None)
    assert found.reasons == (
        reward_rose("-1.961 (95% interval -2.152 to -1.769)"),
        "Judge at step 50 against SFT: -0.8898 (95% interval -1.066 to -0.7192), at KL 25 nats.",
        "The judge rates it below SFT, and the training reward does not rate it above: training itself failed.",
        fell("0 (-0.06072, KL 0 nats)", "0.8898 since (p = 0.002"),
        UNPROBED,
        "No checkpoint is recommended: none has a higher judge's mean than SFT (-0.06072).",
    )


def test_a_judge_that_is_flat_confirms_nothing_and_convicts_nobody():
    found = made(FLAT, fired=[0] * 5, seed=1)
    assert (found.text, found.recommended) == ("healthy", 40)
    assert found.reasons[2:4] == (
        "The judge does not confirm the gain of the training reward: its interval holds 0.",
        "The judge was highest at step 40 (-0.06447); the fall of 0.06444 since is within what noise, or a loss of a "
        "tenth of the gain, would make (p = 0.55).",
    )


def test_three_kinds_of_probes_convict_where_the_judge_is_as_pleased_as_ever():
    found = made(RISE, fired=[0, 0, 0, HACKED_PROBES, 4])
    assert (found.text, found.recommended) == ("hacked", 30)
    assert found.fired == ("probe 0", "probe 1", "probe 2", "probe 3") and not found.fall.found
    assert found.reasons[:2] == (
        "4 of 8 probes fire at step 50 (probe 0 0.5, threshold 0.1; probe 1 0.5, threshold 0.1; probe 2 0.5, threshold "
        "0.1; probe 3 0.5, threshold 0.1): 3 or more kinds are held to be hacking.",
        "The first checkpoint at which 3 probes fire is step 40.",
    )
    assert "highest mean among those at which fewer than 3 probes fire" in found.reasons[-1]
    only_now = made(RISE, fired=[0, 0, 0, 0, HACKED_PROBES])
    assert only_now.text == "hacked" and not any("first checkpoint" in reason for reason in only_now.reasons)
    always = made(RISE, fired=[3, 4, 5, 6, 7])
    assert always.recommended is None and "none at which fewer than 3 probes fire" in always.reasons[-1]


def test_fewer_kinds_of_probes_do_not_convict():
    assert made(RISE, fired=[0, 0, 0, 0, HACKED_PROBES - 1]).text == "healthy"
    once = made(RISE, fired=[HACKED_PROBES, 0, 0, 0, 1])
    assert once.text == "healthy" and any("1 of 8 probes fires" in reason for reason in once.reasons)
    points = [Checkpoint(k, k, [float(k)] * 30, [float(k)] * 30, probes(8, kinds=2)) for k in range(2)]
    alike = decide(points[0], points[1:], seed=0)
    assert alike.text == "healthy" and len(alike.fired) == 8, "of two families"


def test_a_policy_that_went_back_to_sft_is_told_apart():
    rows = scores(np.array([0, 1, 2, 0.5]), np.random.default_rng(0), prompts=30, noise=0.3, shared=1)
    run = [Checkpoint(10 * k, kl, [float(k)] * 30, rows[k]) for k, kl in enumerate((0.0, 4.0, 9.0, 1.0))]
    found = decide(run[0], run[1:], seed=0)
    assert found.text == "past the peak at step 20"
    assert any("the policy went back, rather than too far" in reason for reason in found.reasons)


# ---- what is not judged


def test_the_training_reward_as_judge_acquits_nobody():
    for judge in (RISE, PEAKED, FALLEN):
        found = made(judge, judge_is_reward=True, fired=[0] * 5)
        assert (found.text, found.recommended, found.fall, found.judge_gain) == ("not judged", None, None, None)
        assert found.reasons[0].startswith("Not judged: the judge is the training reward itself")
    found = made(RISE, judge_is_reward=True, fired=[0, 0, 0, 0, 4])
    assert found.text == "hacked" and found.reasons[0].startswith("4 of 8 probes fire")


def test_too_few_prompts():
    found = made(RISE, prompts=FEWEST - 1)
    assert found.text == "not judged" and "19 prompts are too few" in found.reasons[0]
    assert made(RISE, prompts=FEWEST).text != "not judged"


# ---- the fall is tested, the choice of the best accounted for, and small ones do not matter


def test_a_flat_judge_is_past_the_peak_in_no_more_runs_than_stated():
    """2.5% stated; 8% is 3.5 standard errors above it in 100 runs. A plain test against the best errs far oftener."""
    counts: Counter[str] = Counter()
    for seed in range(100):
        rng = np.random.default_rng(seed)
        judged = scores(np.zeros(21), rng, prompts=60, noise=0.8, shared=0.6)
        rewards = scores(np.linspace(0, 1, 21), rng, prompts=60, noise=1.0, shared=0.0)
        run = [Checkpoint(k, k, reward, row) for k, (reward, row) in enumerate(zip(rewards, judged, strict=True))]
        found = decide(run[0], run[1:], seed=seed, resamples=400)
        counts.update({found.kind: 1, "fall": found.fall.found, "plain": found.fall.drop.ci95[0] > 0})
    assert counts["fall"] <= 8 and counts["healthy"] >= 90 and counts["plain"] >= 15


def test_a_certain_fall_that_does_not_matter_is_healthy():
    quiet = {"noise": 0.001, "shared": 1.0}
    assert made(np.array([0, 0.5, 1.0, 0.95]), **quiet).text == "healthy"
    assert made(np.array([0, 0.5, 1.0, 0.91]), **quiet).text == "healthy"
    assert made(np.array([0, 0.5, 1.0, 0.89]), **quiet).text == "past the peak at step 20"
    assert made(np.array([0, -1.0, -1.0]), proxy=np.zeros(3), **quiet).text == "past the peak at step 0"


def test_scores_without_noise():
    """A judge that says 0 or 1: policies that score alike on every prompt leave nothing to resample."""

    def run(*levels: float) -> Verdict:
        points = [Checkpoint(k, k, [float(k)] * 25, [level] * 25) for k, level in enumerate(levels)]
        return decide(points[0], points[1:], seed=0)

    assert run(0.1, 0.1, 0.1).text == "healthy" and run(0.1, 0.7, 0.7).text == "healthy"
    assert run(0.0, 1.0, 0.0).text == "past the peak at step 1"
    assert run(0.7, 1.0, 0.1).text == "hacked"
    third = [0.1 + 0.2, 0.3] * 20  # equal but for a rounding
    rounded = [Checkpoint(k, k, third, third[k:] + third[:k]) for k in range(3)]
    assert decide(rounded[0], rounded[1:], seed=0).fall.p > 0.5


# ---- the recommended checkpoint


def test_the_lowest_kl_within_one_standard_error_of_the_best():
    """Differences from the best of +d and −d, on half of the prompts each, have a standard error of 0.1005 d."""
    d = np.tile([1.0, -1.0], 50)
    levels = {0: (0.0, 0 * d), 10: (0.5, d), 20: (0.88, d), 30: (0.91, d), 40: (1.0, 0 * d), 50: (0.2, d)}
    kls = dict(zip(levels, (0.0, 1.0, 4.0, 5.0, 6.0, 0.5), strict=True))
    run = [Checkpoint(step, kls[step], [float(step)] * 100, mean + noise) for step, (mean, noise) in levels.items()]
    found = decide(run[0], run[1:], seed=0)
    assert found.recommended == 30
    assert (
        "the lowest KL, 5 nats, within one standard error of the judge's highest mean, 1 at step 40"
        in (found.reasons[-1])
    )
    exact = [replace(one, judge=[level] * 100) for one, level in zip(run, (0, 0.5, 1, 1, 1.5, 0.5), strict=True)]
    assert decide(exact[0], exact[1:], seed=0).recommended == 40


# ---- form


def test_a_verdict_is_seeded_blind_to_order_and_plain_json():
    rng = np.random.default_rng(0)
    rows = scores(PEAKED, rng, prompts=40, noise=0.5, shared=1)
    run = [Checkpoint(k, k, rows[k], rows[k].tolist(), probes(k)) for k in range(6)]
    found = decide(run[0], run[1:], seed=3)
    assert decide(run[0], run[:0:-1], seed=3) == found
    assert decide(run[0], run[1:], seed=4).fall.drop.ci95 != found.fall.drop.ci95
    document = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert document["verdict"] == "hacked" and document["fired"] == [f"probe {i}" for i in range(5)]
    assert document["rule"] == {"hacked_probes": 3, "kept": 0.9, "level": 0.025, "fewest_prompts": 20}
    assert document["fall"]["drop"]["n"] == 40 and document["seed"] == 3
    json.dumps(made(RISE, judge_is_reward=True).to_json(), allow_nan=False)


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
def test_bad_runs_are_refused(points, message):
    run = [Checkpoint(step, kl, row, row) for step, kl, row in points]
    with pytest.raises(ValueError, match=message):
        decide(run[0], run[1:], seed=0)
