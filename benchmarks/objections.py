"""What was held against version 1 of the verdict, measured again under the rule of today; it takes about two minutes.

    python benchmarks/evidence.py objections

The rates of hackers and honest policies are `probe_rates.py`'s; here is what needs no texts.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import product
from math import sqrt
from typing import Any

import numpy as np
from figures import keep
from figures.experiments import EXPERIMENTS

from rlhf_zoo.evaluation.frontier import NEAR
from rlhf_zoo.evaluation.judge_check import split_half
from rlhf_zoo.evaluation.length_control import length_controlled_win_rate
from rlhf_zoo.evaluation.probes import Report
from rlhf_zoo.evaluation.stats import bootstrap_mean, proportion, share
from rlhf_zoo.evaluation.verdict import Checkpoint, Evidence, Standing, decide

PROMPTS, CHECKPOINTS, LABELED = 100, 4, 200
TINY, REMARKS, *_ = EXPERIMENTS


def coin(draws: int, *, checked: bool) -> dict[str, float]:
    """How often a judge that tosses coins calls a run healthy, and has a step of it recommended.

    Two completions to each of 100 prompts, and as many to confirm; checked: tried on 200 labeled pairs, else on none.
    """
    rng = np.random.default_rng(1)
    healthy = recommended = 0
    for seed in range(draws):
        both = rng.integers(0, 2, (2, CHECKPOINTS + 1, PROMPTS, 2))
        tossed, again = both.mean(3)
        halves = split_half(both[0, [0, -1]].reshape(-1, 2), [*range(PROMPTS)] * 2, seed=seed)
        points = [Checkpoint(step, step, None, row, report=Report((), {})) for step, row in enumerate(tossed)]
        accuracy = proportion(int(rng.binomial(LABELED, 0.5)), LABELED) if checked else None
        found = decide(
            Evidence(points[0], points[1:], Standing(accuracy=accuracy, split_half=halves)), seed=seed, resamples=200
        )
        healthy += found.kind == "healthy"
        if (step := found.candidate) is not None:
            gain = bootstrap_mean(again[step] - again[0], range(PROMPTS), seed=seed, resamples=200)
            recommended += found.confirm(step, gain).recommended is not None
    return {"healthy": healthy / draws, "recommended": recommended / draws}


def chords() -> dict[str, Any]:
    """By how much a chord misses the judge's mean of a point that was measured, on tiny-world.

    through_sft: PPO's larger β, from SFT to PPO. left_out: inner points of the methods, from their neighbors, where
    these are as near as a reading asks.
    """
    kept = keep.load(TINY.name("baselines"))
    through_sft = _miss(kept["sft"], kept["ppo_ablation"][0], kept["ppo"])
    left_out = {}
    for method, points in kept["methods"].items():
        ordered = sorted(points, key=lambda one: one["kl"]["value"])
        for low, point, high in zip(ordered, ordered[1:], ordered[2:], strict=False):
            if _root(high) - _root(low) <= NEAR:
                left_out[f"{method}, {point['label']}"] = _miss(low, point, high)
    return {"through_sft": through_sft, "left_out": left_out}


def _root(point: Mapping[str, Any]) -> float:
    return sqrt(max(0.0, point["kl"]["value"]))


def _miss(low: Mapping[str, Any], point: Mapping[str, Any], high: Mapping[str, Any]) -> float:
    along = (_root(point) - _root(low)) / (_root(high) - _root(low))
    a, b = low["judge"]["value"], high["judge"]["value"]
    return abs(float(a + along * (b - a) - point["judge"]["value"]))


def at_equal_length(*, better: float, longer: float, draws: int) -> dict[str, float]:
    """The win rate at equal length where good texts are longer: its truth, what is printed, and how often it warns.

    better: of one side, in deviations of the worth; longer: besides, in deviations of the difference of lengths. A
    text's length is its worth and twice as much of chance; 600 comparisons.
    """
    rng = np.random.default_rng(2)
    printed, true, warned = [], [], 0
    for seed in range(draws):
        worth = rng.normal(size=(2, 600))
        worth[0] += better
        lengths = worth + 2 * rng.normal(size=(2, 600)) + 50
        lengths[0] += longer * (lengths[0] - lengths[1]).std()
        won = (worth[0] > worth[1]).astype(float)
        found = length_controlled_win_rate(won, lengths[0], lengths[1], range(600), seed=seed, resamples=2)
        printed.append(found.value)
        true.append(won.mean())
        warned += found.warning is not None
    return {"truth": float(np.mean(true)), "printed": float(np.mean(printed)), "warned": warned / draws}


def falls(runs: Sequence[Mapping[str, Any]]) -> list[int]:
    """Of each run, to how many percent of an earlier gain it would have to fall for 80% of evaluations to notice."""
    said = (re.search(r"A fall to (\d+)% of the highest gain", " ".join(run["reasons"])) for run in runs)
    return [int(one.group(1)) for one in said if one]


def coverage(trials: int) -> list[dict[str, float]]:
    """How often the 95% interval of a share holds it, by share, prompts, samples of a prompt and their likeness."""
    rng, found = np.random.default_rng(1), []
    for p, prompts, samples, alike in product((0.5, 0.8, 0.95, 0.98), (20, 48, 180), (1, 3), (0.001, 0.5)):
        spread = (1 - alike) / alike
        rates = rng.beta(p * spread, (1 - p) * spread, size=(trials, prompts))
        won = rng.random((trials, prompts, samples)) < rates[:, :, None]
        groups = np.repeat(np.arange(prompts), samples).tolist()
        bounds = [share(one.ravel().astype(float), groups).ci95 for one in won]
        held = float(np.mean([low <= p <= high for low, high in bounds]))
        found.append({"share": p, "prompts": prompts, "samples": samples, "alike": alike, "covered": held})
    return found


def of_means(trials: int) -> list[dict[str, Any]]:
    """The same of means of prompts' scores, normal and exponential."""
    rng, found = np.random.default_rng(1), []
    for prompts, (name, true) in product((20, 48, 180), {"normal": 0.0, "exponential": 1.0}.items()):
        draw = rng.standard_normal if name == "normal" else rng.standard_exponential
        bounds = [bootstrap_mean(draw(prompts), range(prompts), seed=0).ci95 for _ in range(trials)]
        held = float(np.mean([low <= true <= high for low, high in bounds]))
        found.append({"scores": name, "prompts": prompts, "covered": held})
    return found


def measured() -> dict[str, Any]:
    return {
        "schema": 2,
        "command": "python benchmarks/evidence.py objections",
        "coin": {name: coin(400, checked=name == "checked") for name in ("checked", "unchecked")},
        "chords": chords(),
        "as good, one deviation longer": at_equal_length(better=0, longer=1, draws=200),
        "better, and longer by that alone": at_equal_length(better=0.75, longer=0, draws=200),
        "falls": {one.recipe: falls(keep.load(one.name("runs"))["runs"]) for one in (TINY, REMARKS)},
        "coverage": coverage(2000),
        "coverage of means": of_means(2000),
    }
