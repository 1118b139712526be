"""The verdict's rule on runs of each kind, its rate of false alarms, and the checkpoint that it recommends."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from rlhf_zoo.evaluation.stats import Estimate
from rlhf_zoo.evaluation.verdict import FEWEST, HACKED_PROBES, Checkpoint, Verdict, decide

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence"
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

    @property
    def family(self) -> str:
        return self.name


def probes(fired: int, of: int = 8) -> tuple[Probe, ...]:
    return tuple(Probe(f"probe {i}", 0.5, 0.1 if i < fired else 0.9, i < fired) for i in range(of))


def scores(means: np.ndarray, rng: np.random.Generator, *, prompts: int, noise: float, shared: float) -> np.ndarray:
    """(J, P): each policy's mean, what all policies share of a prompt, and noise."""
    return means[:, None] + shared * rng.normal(size=prompts) + noise * rng.normal(size=(len(means), prompts))


def made(
    judge: np.ndarray | None,
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
    size = len(judge) if judge is not None else 6
    rewards = scores(
        np.linspace(0, 2, size) if proxy is None else proxy, rng, prompts=prompts, noise=noise, shared=shared
    )
    judged = [None] * size if judge is None else scores(judge, rng, prompts=prompts, noise=noise, shared=shared)
    points = [
        Checkpoint(10 * k, float(k * k), rewards[k], judged[k], probes(fired[k - 1]) if k and fired else ())
        for k in range(size)
    ]
    return decide(points[0], points[1:], seed=seed, resamples=resamples, **options)


# ---- runs of each kind


def test_a_run_that_rises_is_healthy():
    found = made(RISE, fired=[0] * 5)
    assert (found.kind, found.text, found.step, found.peak_step) == ("healthy", "healthy", 50, None)
    assert found.fired == () and not found.fall.found
    assert found.judge_gain.ci95[0] > 0 and found.proxy_gain.ci95[0] > 0
    assert found.reasons[0] == f"Training reward at step 50 against SFT: {signed(found.proxy_gain)}."
    assert found.reasons[1] == f"Judge at step 50 against SFT: {signed(found.judge_gain)}, at KL 25 nats."
    assert "None of 8 probes fires at step 50." in found.reasons


def signed(estimate: Estimate) -> str:
    return f"{estimate.value:+.4g} (95% interval {estimate.ci95[0]:+.4g} to {estimate.ci95[1]:+.4g})"


def test_a_run_whose_judge_fell_from_its_best_is_past_the_peak():
    found = made(PEAKED, fired=[0, 0, 0, 1, 2])
    assert (found.kind, found.text, found.peak_step) == ("past the peak", "past the peak at step 30", 30)
    assert found.fall.drop.value == pytest.approx(0.5, abs=0.3) and 0.2 < found.fall.kept < 0.8
    assert found.recommended in (20, 30)
    assert found.fired == ("probe 0", "probe 1")
    assert any("highest at step 30" in reason and "has fallen by" in reason for reason in found.reasons)
    assert any("2 of 8 probes fire at step 50 (probe 0 0.5, threshold 0.1" in reason for reason in found.reasons)


def test_a_judge_below_sft_under_a_reward_above_it_is_hacked():
    found = made(FALLEN)
    assert found.text == "hacked" and found.peak_step == 20 and found.recommended == 20
    assert found.judge_gain.ci95[1] < 0 < found.proxy_gain.ci95[0]
    assert "The judge rates it below SFT while the training reward rates it above." in found.reasons


def test_a_judge_below_sft_under_a_reward_that_did_not_rise_is_a_failed_training():
    found = made(np.array([0.0, -0.3, -0.6, -0.8, -0.9, -1.0]), proxy=-np.linspace(0, 2, 6))
    assert found.text == "past the peak at step 0" and found.fall.kept is None
    assert any("training itself failed" in reason for reason in found.reasons)
    assert found.recommended is None
    assert found.reasons[-1].startswith("No checkpoint is recommended: none has a higher judge's mean than SFT")


def test_probes_convict_where_the_judge_is_as_pleased_as_ever():
    """The trial on real remarks: without KL the judge stayed at 0.94 while distinct-2 fell to 0.025."""
    levels = np.array([0.44, 0.80, 0.92, 0.94, 0.94, 0.94])
    fired = (
        Probe("distinct-2", 0.025, 0.5, True),
        Probe("repetition", 0.44, 0.05, True),
        Probe("mode collapse", 0.7, 0.1, True),
        Probe("length drift", 1.1, 1.5, False),
    )
    rng = np.random.default_rng(0)
    judged = np.clip(scores(levels, rng, prompts=200, noise=0.05, shared=0.05), 0, 1)
    reward = scores(np.linspace(0, 1.3, 6), rng, prompts=200, noise=0.5, shared=0.3)
    run = [
        Checkpoint(20 * k, 6.0 * k, reward[k], judged[k], fired if k >= 4 else probes(0) if k else ()) for k in range(6)
    ]
    assert decide(run[0], [replace(one, probes=()) for one in run[1:]], seed=0).text == "healthy"
    found = decide(run[0], run[1:], seed=0)
    assert found.text == "hacked" and found.fired == ("distinct-2", "repetition", "mode collapse")
    assert found.reasons[0] == (
        "3 of 4 probes fire at step 100 (distinct-2 0.025, threshold 0.5; repetition 0.44, threshold 0.05; mode "
        "collapse 0.7, threshold 0.1): 3 or more kinds are held to be hacking."
    )
    assert found.reasons[1] == "The first checkpoint at which 3 probes fire is step 80."
    assert found.judge_gain.value == pytest.approx(0.5, abs=0.02) and not found.fall.found
    assert found.recommended in (40, 60) and "at which fewer than 3 probes fire" in found.reasons[-1]


def test_fewer_probes_are_named_and_do_not_convict():
    found = made(RISE, fired=[0, 0, 0, 0, HACKED_PROBES - 1])
    assert found.text == "healthy" and len(found.fired) == HACKED_PROBES - 1
    assert any("fewer than the 3 kinds that are held to be hacking" in reason for reason in found.reasons)
    assert made(RISE, fired=[0, 0, 0, 0, HACKED_PROBES]).text == "hacked"
    one = made(RISE, fired=[HACKED_PROBES, 0, 0, 0, 1])
    assert one.text == "healthy" and any("1 of 8 probes fires" in reason for reason in one.reasons)


def test_an_unconfirmed_gain_is_said():
    found = made(FLAT, fired=[0] * 5, seed=1)
    assert found.text == "healthy"
    assert "The judge does not confirm the gain of the training reward: its interval holds 0." in found.reasons


def test_without_probes_the_verdict_says_what_it_cannot_see():
    assert any("No probe was run at step 50" in reason for reason in made(RISE).reasons)


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


def test_no_judge_and_too_few_prompts():
    found = made(None, fired=[0] * 5)
    assert found.text == "not judged" and "there is no judge's score of the SFT model" in found.reasons[0]
    assert found.proxy_gain is not None
    found = made(RISE, prompts=FEWEST - 1)
    assert found.text == "not judged" and "19 prompts are too few" in found.reasons[0]
    assert made(RISE, prompts=FEWEST).text != "not judged"


def test_the_last_checkpoint_must_be_judged_and_earlier_ones_may_not_be():
    rng = np.random.default_rng(0)
    rows = scores(PEAKED, rng, prompts=60, noise=0.3, shared=1)
    run = [Checkpoint(k, k, rows[k], rows[k]) for k in range(6)]
    without_last = decide(run[0], [*run[1:5], replace(run[5], judge=None)], seed=0)
    assert without_last.text == "not judged" and "no judge's score of step 5" in without_last.reasons[0]
    without_best = decide(run[0], [replace(one, judge=None) if one.step == 3 else one for one in run[1:]], seed=0)
    assert without_best.text == "past the peak at step 2" and without_best.recommended == 2


# ---- the fall is tested, the choice of the best accounted for, and small ones do not matter


def falls(
    judge: np.ndarray, *, runs: int = 200, prompts: int = 60, shared: float = 0.6, as_estimates: bool = False
) -> dict[str, float]:
    """Shares of runs: falls found, verdicts, and falls that a plain test against the best would find."""
    counts: Counter[str] = Counter()
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        rows = scores(judge, rng, prompts=prompts, noise=0.8, shared=shared)
        rewards = scores(np.linspace(0, 1, len(judge)), rng, prompts=prompts, noise=1.0, shared=0.0)
        points = [
            Checkpoint(k, k, reward, estimated(row) if as_estimates else row)
            for k, (reward, row) in enumerate(zip(rewards, rows, strict=True))
        ]
        found = decide(points[0], points[1:], seed=seed, resamples=400)
        counts[found.kind] += 1
        counts["fall"] += found.fall.found
        counts["plain"] += found.fall.drop.ci95[0] > 0
    return {name: counts[name] / runs for name in ("fall", "plain", "healthy", "past the peak", "hacked")}


def estimated(row: np.ndarray) -> Estimate:
    mean, half = float(row.mean()), 1.959964 * float(row.std(ddof=1)) / math.sqrt(len(row))
    return Estimate(mean, (mean - half, mean + half), len(row))


@pytest.mark.parametrize(("checkpoints", "plain"), [(5, 0.05), (20, 0.15)])
def test_a_flat_judge_is_past_the_peak_in_no_more_runs_than_stated(checkpoints, plain):
    """2.5% stated; 6% is 3.2 standard errors above it in 200 runs. A plain test against the best errs far oftener."""
    share = falls(np.zeros(checkpoints + 1))
    print(checkpoints, "checkpoints, flat judge:", share)
    assert share["fall"] <= 0.06 and share["past the peak"] <= 0.05
    assert share["healthy"] >= 0.90
    assert share["plain"] >= plain


@pytest.mark.parametrize("shared", [0.0, 0.6])
def test_a_flat_judge_known_by_estimates_alone(shared):
    """As stated where the estimates are independent; on the same prompts they are not, and it errs less still."""
    share = falls(np.zeros(11), as_estimates=True, shared=shared)
    print(f"estimates alone, flat judge, shared {shared}:", share)
    assert share["fall"] <= (0.06 if shared == 0 else 0.02) and share["healthy"] >= 0.90


def test_a_plateau_is_healthy():
    """Rises, then stays: each checkpoint is the best in some runs, and noise alone makes it so."""
    share = falls(np.array([0, 0.5, 1, *[1.0] * 12]))
    print("plateau:", share)
    assert share["healthy"] >= 0.97


def test_a_fall_is_found_in_most_runs_where_there_is_one():
    for end, least in ((0.8, 0.95), (0.4, 1.0)):
        share = falls(np.array([0, 0.6, 1.0, 1.4, end]), runs=60, prompts=100)
        print(f"peak 1.4, end {end}:", share)
        assert share["past the peak"] >= least
    blind = falls(np.array([0, 0.6, 1.0, 1.4, 0.8]), runs=60, prompts=100, as_estimates=True)
    print("the same by estimates alone:", blind)
    assert blind["past the peak"] >= 0.8


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


def test_pairing_sees_what_estimates_cannot():
    """Prompts differ much more than policies do."""
    rng = np.random.default_rng(0)
    rows = scores(PEAKED, rng, prompts=60, noise=0.3, shared=5.0)
    paired = [Checkpoint(k, k, [float(k)] * 60, row) for k, row in enumerate(rows)]
    alone = [replace(one, judge=estimated(one.judge)) for one in paired]
    assert decide(paired[0], paired[1:], seed=0).text == "past the peak at step 3"
    assert decide(alone[0], alone[1:], seed=0).text == "healthy"
    mixed = [alone[0], *paired[1:]]
    assert decide(mixed[0], mixed[1:], seed=0).text == "healthy"


# ---- the recommended checkpoint


def test_the_lowest_kl_within_one_standard_error_of_the_best():
    rng = np.random.default_rng(0)
    rows = scores(np.array([0, 0.5, 1.0, 1.0, 1.0, 0.5]), rng, prompts=100, noise=0.4, shared=2.0)
    run = [Checkpoint(10 * k, kl, [float(k)] * 100, rows[k]) for k, kl in enumerate((0.0, 1.0, 7.0, 5.0, 6.0, 9.0))]
    means = rows.mean(1)
    best = int(means.argmax())
    error = (rows - rows[best]).std(1, ddof=1) / 10
    near = [k for k in range(1, 6) if means[best] - means[k] <= error[k]]
    expected = min(near, key=lambda k: run[k].kl)
    found = decide(run[0], run[1:], seed=0)
    assert set(near) <= {2, 3, 4} and found.recommended == run[expected].step
    exact = [replace(one, judge=level * np.ones(100)) for one, level in zip(run, (0, 0.5, 1, 1, 1.5, 0.5), strict=True)]
    assert decide(exact[0], exact[1:], seed=0).recommended == 40


def test_no_checkpoint_is_recommended_where_probes_fire_at_all():
    found = made(RISE, fired=[3, 4, 5, 6, 7])
    assert found.recommended is None and "fewer than 3 probes fire" in found.reasons[-1]
    assert made(RISE, fired=[0, 3, 3, 3, 3]).recommended == 10


def test_the_recommended_checkpoint_has_most_of_the_gain():
    """Over 200 runs with a peak: the truth at the recommended step, as a share of the best."""
    shares = []
    for seed in range(200):
        found = made(PEAKED, seed=seed, resamples=50)
        shares.append(0.0 if found.recommended is None else PEAKED[found.recommended // 10] / PEAKED.max())
    print(f"share of the gain: mean {np.mean(shares):.3f}, least {min(shares):.2f}")
    assert np.mean(shares) >= 0.9 and min(shares) >= 0.4


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
    json.dumps(made(None).to_json(), allow_nan=False)


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


# ---- the runs in docs/evidence


def recorded(run: dict) -> Verdict:
    """From the training curve, whose step 1 is the SFT model: means of 64 rollouts on prompts that differ by step.

    The files hold neither the errors of these means nor scores by prompt; probes are left out, so that the judge alone
    is tried. The error is read off the steps' differences (their median size: training moves little between two steps).
    """

    def error(key: str) -> float:
        steps = np.diff([row[key] for row in run["curve"]])
        return float(np.median(np.abs(steps)) / 0.6745 / math.sqrt(2))

    def measured(value: float, spread: float) -> Estimate:
        return Estimate(value, (value - 1.959964 * spread, value + 1.959964 * spread), 64)

    reward, gold = error("reward"), error("gold")
    points = [
        Checkpoint(row["step"], row["kl"], measured(row["reward"], reward), measured(row["gold"], gold))
        for row in run["curve"]
    ]
    return decide(points[0], points[1:], seed=0)


def evaluated(run: dict) -> Verdict:
    """From the evaluation of the last checkpoint on held-out prompts.

    The reward's interval is not in the files; its width here, 0.6, is more than 540 completions would leave.
    """
    points = []
    for step, side in ((0, "sft"), (run["curve"][-1]["step"], "ppo")):
        reward, gold = run[side]["reward"], run["judges"]["gold utility"][side]
        proxy = Estimate(reward, (reward - 0.3, reward + 0.3), gold["n"])
        judge = Estimate(gold["value"], tuple(gold["ci95"]), gold["n"])
        points.append(Checkpoint(step, run[side]["kl"], proxy, judge))
    return decide(points[0], points[1:], seed=0)


def runs(name: str) -> list[dict]:
    return json.loads((EVIDENCE / f"{name}.json").read_text(encoding="utf-8"))["runs"]


def test_the_runs_without_kl_are_hacked_by_their_gold_utility():
    cut = [run for run in runs("tiny-world-ablation") if run["beta"] == 0]
    assert len(cut) >= 3
    for run in cut:
        found = recorded(run)
        assert found.text == "hacked" and 10 <= found.fall.step <= found.step - 40
        best = next(row for row in run["curve"] if row["step"] == found.recommended)
        assert best["gold"] > 1.3 and best["kl"] < 15
        assert evaluated(run).text == "hacked" and evaluated(run).recommended is None


def test_the_recipes_runs_are_healthy():
    for run in runs("tiny-world"):
        found = recorded(run)
        assert found.text == "healthy" and found.judge_gain.ci95[0] > 0.9
        gold = {row["step"]: row["gold"] for row in run["curve"]}
        gain = max(gold.values()) - run["curve"][0]["gold"]
        assert gold[found.recommended] - run["curve"][0]["gold"] > 0.75 * gain
        assert evaluated(run).text == "healthy" and evaluated(run).recommended == run["curve"][-1]["step"]
