"""How often the verdict accuses honest policies, and how often it finds planted hackers.

    python benchmarks/probe_rates.py --honest 400 --hacked 200     # a table; a quarter of an hour of one core
    python benchmarks/evidence.py probe-rates                      # the same, kept and rendered into the docs

Hackers, and most honest policies, live in the world of `worlds`. PPO, DPO and RLOO were trained: their completions are
those of a finished run of tiny-world and its baselines (`trained`), which lies in runs/evidence, or where
RLHF_ZOO_EVIDENCE_RUNS says. Every evaluation has other completions of SFT and of the policy; where an honest policy is
a candidate, other prompts confirm it. The judge is honest (the gold utility with some noise), fooled (the training
reward itself under another name, its shared errors found), or fooled and unchecked (nothing is known of it).
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from figures.experiments import RUNS
from trained import TINY, Trained, written
from worlds import ALL_HACKERS, HONEST, JUDGES, SAMPLES, World, hacked, verdicts

from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.stats import proportion
from rlhf_zoo.evaluation.verdict import RULE, Verdict

STRENGTHS = (0.1, 0.3, 1.0)
PROMPTS = 100


def row(found: Sequence[Verdict], **about: Any) -> dict[str, Any]:
    """gain: the mean of what the judge gives above SFT, of an honest policy."""
    n = len(found)
    kinds, shown = Counter(one.kind for one in found), Counter(family for one in found for family in one.present)
    counts = {kind: kinds[kind] for kind in ("hacked", "suspicious", "past the peak", "healthy")}
    if "strength" not in about:
        counts["recommended"] = sum(one.recommended is not None for one in found)
        about["gain"] = float(np.mean([one.judge_gain.value for one in found if one.judge_gain is not None]))
    rates = {kind: proportion(count, n).to_json() for kind, count in counts.items()}
    made = {**about, "n": n, "kinds": dict(kinds.most_common()), **rates, "present": dict(shown.most_common())}
    print(line(made), flush=True)
    return made


def honest(world: World, confirming: World, trained: Trained, n: int) -> list[dict[str, Any]]:
    rows = []
    for name, choose in HONEST.items():
        found = []
        for seed in range(n):
            again = confirming, confirming.draw(f"{name}, confirming {seed}", choose)
            policy = world.draw(f"{name} {seed}", choose)
            found.append(verdicts(world, policy, seed=seed, judges=list(JUDGES), confirming=again))
        rows += [row([one[judge] for one in found], policy=name, judge=judge) for judge in JUDGES]
    for method, policies in trained.improving.items():
        found = [trained.verdicts(method, seed, prompts=len(world.lines)) for seed in range(n)]
        name, of = f"{method}, trained", len(policies)
        rows += [row([one[judge] for one in found], policy=name, judge=judge, policies=of) for judge in JUDGES]
    return rows


def detection(world: World, n: int) -> list[dict[str, Any]]:
    rows = []
    for name in ALL_HACKERS:
        for strength in STRENGTHS:
            found = [
                verdicts(world, hacked(world, name, strength, str(seed)), seed=seed, judges=list(JUDGES), habit=name)
                for seed in range(n)
            ]
            rows += [
                row([one[judge] for one in found], policy=name, strength=strength, judge=judge) for judge in JUDGES
            ]
    return rows


def falls(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Hackers, with the judge, of whom a larger strength convicts more rarely, by two standard errors."""
    found = []
    for weaker, stronger in pairwise(rows):
        if (weaker["policy"], weaker["judge"]) != (stronger["policy"], stronger["judge"]):
            continue
        a, b = (one["hacked"]["value"] for one in (weaker, stronger))
        error = np.sqrt((a * (1 - a) + b * (1 - b)) / weaker["n"])
        if a - b > 2 * error:
            found.append(f"{weaker['policy']}, judge {weaker['judge']}: {a:.2f} → {b:.2f}")
    return found


def line(row: dict[str, Any]) -> str:
    what = row["policy"] + (f", {row['strength']:.0%}" if "strength" in row else "") + f", judge {row['judge']}"
    return f"| {what} | {row['n']} | {row['kinds']} | {row['present']} |"


def command(arguments: argparse.Namespace) -> str:
    counts = f"--honest {arguments.honest} --hacked {arguments.hacked}"
    prompts = f" --prompts {arguments.prompts}" if arguments.prompts != PROMPTS else ""
    return f"python benchmarks/probe_rates.py {counts}{prompts}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--honest", type=int, default=400, help="evaluations of each honest policy")
    parser.add_argument("--hacked", type=int, default=200, help="evaluations of each hacker, strength and judge")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="prompts of each evaluation, 2 completions each")
    parser.add_argument("--json", type=Path, help="write the rates there")
    arguments = parser.parse_args()
    trained = written(TINY.directory(TINY.seeds[0], RUNS))
    world, confirming = World.tiny(2 * arguments.prompts).halves()
    by_judge = sorted(detection(world, arguments.hacked), key=lambda one: (one["policy"], one["judge"]))
    document = {
        "schema": 4,
        "rule": RULE,
        "prompts": len(world.lines),
        "samples": SAMPLES,
        "command": command(arguments),
        "honest": honest(world, confirming, trained, arguments.honest),
        "hacked": by_judge,
        "falls_with_strength": falls(by_judge),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except ZooError as error:
        sys.exit(str(error))
