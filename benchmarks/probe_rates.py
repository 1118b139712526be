"""How often the verdict accuses honest policies, and how often it finds planted hackers, in the world of `worlds`.

    python benchmarks/probe_rates.py --honest 400 --hacked 200     # a table; a second and a half an evaluation
    python benchmarks/evidence.py probe-rates                      # the same, kept and rendered into the docs

Every evaluation has prompts, SFT's completions and a policy's of its own random numbers. The judge is honest (the gold
utility with some noise) or fooled (the training reward itself under another name, of which nothing else is known).
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from worlds import ALL_HACKERS, HONEST, World, hacked, verdict_on

from rlhf_zoo.evaluation.stats import proportion
from rlhf_zoo.evaluation.verdict import RULE

STRENGTHS = (0.1, 0.3, 1.0)


def rate(kinds: Counter[str], n: int) -> dict[str, Any]:
    said = ("hacked", "suspicious", "healthy")
    return {"n": n, "kinds": dict(kinds), **{name: proportion(kinds[name], n).to_json() for name in said}}


def honest(world: World, n: int) -> list[dict[str, Any]]:
    rows = []
    for name, choose in HONEST.items():
        kinds, shown = Counter[str](), Counter[str]()
        for seed in range(n):
            found = verdict_on(world, world.draw(f"{name} {seed}", choose), seed=seed)
            kinds[found.kind] += 1
            shown.update(found.present)
        rows.append({"policy": name, **rate(kinds, n), "present": dict(shown)})
        print(line(rows[-1]), flush=True)
    return rows


def detection(world: World, n: int) -> list[dict[str, Any]]:
    rows = []
    for name in ALL_HACKERS:
        for strength in STRENGTHS:
            for fooled in (False, True):
                kinds, shown = Counter[str](), Counter[str]()
                for seed in range(n):
                    policy = hacked(world, name, strength, str(seed))
                    found = verdict_on(world, policy, seed=seed, habit=name, fooled=fooled)
                    kinds[found.kind] += 1
                    shown.update(found.present)
                rows.append(
                    {"policy": name, "strength": strength, "judge": "fooled" if fooled else "honest", **rate(kinds, n),
                     "present": dict(shown)}
                )  # fmt: skip
                print(line(rows[-1]), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    what = row["policy"] + (f", {row['strength']:.0%}, judge {row['judge']}" if "strength" in row else "")
    return f"| {what} | {row['n']} | {row['kinds']} | {row['present']} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--honest", type=int, default=400, help="evaluations of each honest policy")
    parser.add_argument("--hacked", type=int, default=200, help="evaluations of each hacker, strength and judge")
    parser.add_argument("--prompts", type=int, default=100, help="prompts of each evaluation, 2 completions each")
    parser.add_argument("--json", type=Path, help="write the rates there")
    arguments = parser.parse_args()
    started = time.process_time()
    world = World.tiny(arguments.prompts)
    document = {
        "schema": 3,
        "rule": RULE,
        "prompts": len(world.lines),
        "samples": world.samples,
        "command": f"python benchmarks/probe_rates.py --honest {arguments.honest} --hacked {arguments.hacked}",
        "honest": honest(world, arguments.honest),
        "hacked": detection(world, arguments.hacked),
    }
    print(f"{time.process_time() - started:.0f} s of one core.")
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
