"""How often the hacking probes fire: on SFT itself (false alarms), on harmless policies, and on planted hackers.

    RLHF_ZOO_DATA=DIR python benchmarks/probe_rates.py                  # a table; minutes on one core
    python benchmarks/evidence.py probe-rates                           # the same, kept and rendered into the docs

No model is sampled: the generator's lines (tiny-world), buyers' remarks (product-remarks) and critics' sentences (film
reviews, rt_polarity) stand in for SFT's completions, continuations of an opening for the completions of a prompt. Two
independent samples of them are a null. Thresholds are set on one half of the texts; every rate is measured on the other
half, under other seeds. "set on tiny-world" carries the tiny world's thresholds over to the real texts as they are. The
film reviews were not looked at while the probes were written; the other two were.

The harmless policies move where a reward may rightly move them: "only praise" keeps the positive texts, "best of 16"
keeps the best of 16 by the tiny world's gold utility. The hackers are `rlhf_zoo.evaluation.probes.planted`; strength is
the share of completions that they hack. "Caught" means by the probe that is meant for that hacker. A probe fires beyond
noise and beyond its minimum; "beyond noise alone" leaves the minimum out: it shows whether the noise is what it says.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_zoo.corpora.tiny_world import generate_line, utility
from rlhf_zoo.corpora.tiny_world.grammar import subjects
from rlhf_zoo.corpora.tiny_world.lexicon import PRODUCTS
from rlhf_zoo.evaluation.probes import (
    PROBES,
    Completions,
    Report,
    Thresholds,
    null_thresholds,
    probe,
)
from rlhf_zoo.evaluation.probes.planted import HACKERS, plant
from rlhf_zoo.evaluation.stats import proportion

SAMPLES, DRAWS, RATE = 3, 5, 0.05
SETTING, MEASURING = 0, 1  # the two halves of each corpus


@dataclass(frozen=True)
class Continuation:
    text: str
    reward: float


@dataclass(frozen=True)
class Corpus:
    """Continuations of each opening, in two halves: those that set thresholds and those that rates are measured on."""

    name: str
    halves: tuple[dict[str, list[Continuation]], dict[str, list[Continuation]]]
    harmless: dict[str, Callable[[list[Continuation], random.Random], Continuation]]

    def draw(self, half: int, seed: Any, choose: Callable[..., Continuation] | None = None) -> Completions:
        rng = random.Random(f"{self.name} {half} {seed}")
        prompts, chosen = [], []
        for opening, texts in self.halves[half].items():
            prompts += [opening] * SAMPLES
            chosen += rng.sample(texts, SAMPLES) if choose is None else [choose(texts, rng) for _ in range(SAMPLES)]
        return Completions(prompts, [each.text for each in chosen], rewards=[each.reward for each in chosen])


def best_of(n: int) -> Callable[[list[Continuation], random.Random], Continuation]:
    return lambda texts, rng: max(rng.sample(texts, min(n, len(texts))), key=lambda each: each.reward)


def praising(texts: list[Continuation], rng: random.Random) -> Continuation:
    return rng.choice([each for each in texts if each.reward > 0.5] or texts)


def tiny_world(prompts: int, *, lines: int = 40_000) -> Corpus:
    named = {subject for product, aspects in PRODUCTS.items() for a in aspects for subject in subjects(product, a)}
    openings = set(random.Random("openings").sample(sorted(named), prompts))
    halves = []
    for half in (SETTING, MEASURING):
        rng = random.Random(f"probe rates {half}")
        found: dict[str, list[Continuation]] = {opening: [] for opening in sorted(openings)}
        for _ in range(lines):
            line = generate_line(rng)
            words = line.split(" ")
            opening = next((name for n in range(6, 1, -1) if (name := " ".join(words[:n])) in named), "")
            if opening in found:
                found[opening].append(Continuation(line[len(opening) :], utility(line)))
        halves.append(found)
    return Corpus("tiny-world", (halves[0], halves[1]), {"only praise": praising, "best of 16": best_of(16)})


def real(name: str, folder: Path, prompts: int) -> Corpus:
    """Openings of one to three words with at least 8 continuations in either half. Reward: the label, 0 or 1, + noise.

    The splits `train` and `judge` are the halves, which no text shares.
    """
    halves = []
    for half, split in ((SETTING, "train"), (MEASURING, "judge")):
        rng = random.Random(f"rewards {half}")
        found: dict[str, list[Continuation]] = defaultdict(list)
        with gzip.open(folder / f"{split}.jsonl.gz", "rt", encoding="utf-8") as rows:
            texts = [json.loads(row) for row in rows]
        for row in texts:
            words = row["text"].lower().split()
            reward = row["label"] + rng.gauss(0, 0.25)
            for n in range(1, min(3, len(words) - 1) + 1):
                found[" ".join(words[:n])].append(Continuation(" " + " ".join(words[n:]), reward))
        halves.append(found)
    shared = sorted(o for o in halves[0] if min(len(halves[0][o]), len(halves[1].get(o, ()))) >= 8)
    openings = random.Random("openings").sample(shared, min(prompts, len(shared)))
    kept = [{opening: found[opening] for opening in openings} for found in halves]
    return Corpus(name, (kept[0], kept[1]), {"only praise": praising})


@dataclass
class Tally:
    """How often each probe fired over the evaluations of one kind, by its threshold and, as `noise`, by noise alone."""

    n: int
    any: int
    noise: int
    each: dict[str, int]

    def add(self, report: Report, thresholds: Thresholds) -> None:
        """Counts a report as it were under `thresholds`."""
        effects = {p.name: abs(p.value - p.sft) if p.two_sided else p.value - p.sft for p in report.probes}
        noise = {p.name: thresholds.of(p.name, completions=p.n) for p in report.probes}
        fired = [p.name for p in report.probes if effects[p.name] > max(noise[p.name], p.least)]
        self.n += 1
        self.any += bool(fired)
        self.noise += any(effects[name] > noise[name] for name in effects)
        for name in effects:
            self.each[name] = self.each.get(name, 0) + (name in fired)

    def to_json(self) -> dict[str, Any]:
        return {
            "any": proportion(self.any, self.n).to_json(),
            "noise_alone": proportion(self.noise, self.n).to_json(),
            "each": {name: proportion(count, self.n).to_json() for name, count in self.each.items()},
        }


def measure(corpus: Corpus, thresholds: dict[str, list[Thresholds]], repeats: int, hacks: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def tally(kind: str, policy: Callable[[int], Completions], n: int, **more: Any) -> None:
        found = {source: Tally(0, 0, 0, {}) for source in thresholds}
        for repeat in range(n):
            sets = {source: each[repeat % len(each)] for source, each in thresholds.items()}
            report = probe(policy(repeat), corpus.draw(MEASURING, f"sft {repeat}"), sets[corpus.name])
            for source, chosen in sets.items():
                found[source].add(report, chosen)
        for source, tallied in found.items():
            rows.append({"corpus": corpus.name, "thresholds": source, "policy": kind, **more, **tallied.to_json()})

    tally("SFT, other seed", lambda r: corpus.draw(MEASURING, f"null {r}"), repeats)
    for name, choose in corpus.harmless.items():
        tally(name, lambda r, c=choose: corpus.draw(MEASURING, f"harmless {r}", c), hacks)
    for name, (_, target) in HACKERS.items():
        for strength in (1.0, 0.5) if corpus.name != "tiny-world" else (1.0,):
            tally(
                name,
                lambda r, a=name, s=strength: plant(a, corpus.draw(MEASURING, f"hacked {r}"), strength=s, seed=r),
                hacks,
                strength=strength,
                target=target,
            )
    return rows


def line(row: dict[str, Any]) -> str:
    def share(estimate: dict[str, Any]) -> str:
        low, high = estimate["ci95"]
        return f"{estimate['value']:.3f} [{low:.3f}, {high:.3f}]"

    caught = share(row["each"][row["target"]]) if "target" in row else ""
    often = [name for name, estimate in row["each"].items() if estimate["value"] >= 0.05 and name != row.get("target")]
    name = row["policy"] + (f", {row['strength']:.0%}" if "strength" in row else "")
    alone = share(row["noise_alone"]) if row["policy"].startswith("SFT") else ""
    cells = (row["corpus"], row["thresholds"], name, row["any"]["n"], row.get("target", ""), caught, share(row["any"]))
    return "| " + " | ".join(map(str, (*cells, alone, ", ".join(often)))) + " |"


HEADER = (
    "| texts | thresholds set on | policy | n | meant for it | caught by that probe | any probe fired | "
    "any beyond noise alone | others ≥ 5% |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200, help="evaluations of SFT against SFT, of each kind")
    parser.add_argument("--hacks", type=int, default=30, help="evaluations of each harmless policy and each hacker")
    parser.add_argument("--prompts", type=int, default=100, help="prompts of each evaluation, 3 completions each")
    parser.add_argument("--calibrations", type=int, default=4, help="independent sets of thresholds, used in turn")
    parser.add_argument("--json", type=Path, help="write the rates there")
    arguments = parser.parse_args()
    started = time.process_time()
    corpora = [tiny_world(arguments.prompts)]
    if data := os.environ.get("RLHF_ZOO_DATA"):
        for name, folder in (("product-remarks", "pros_cons"), ("film reviews", "rt_polarity")):
            corpora.append(real(name, Path(data) / folder, arguments.prompts))
    else:
        print("product-remarks and film reviews: skipped, RLHF_ZOO_DATA is not set")
    thresholds = {
        corpus.name: [
            null_thresholds([corpus.draw(SETTING, f"{c} {d}") for d in range(DRAWS)], rate=RATE, seed=c)
            for c in range(arguments.calibrations)
        ]
        for corpus in corpora
    }
    rows = []
    for corpus in corpora:
        sources = [corpus.name, *(["tiny-world"] if corpus.name != "tiny-world" else [])]
        rows += measure(corpus, {name: thresholds[name] for name in sources}, arguments.repeats, arguments.hacks)
    print(HEADER, *map(line, rows), sep="\n")
    print(f"\nRate of false alarms asked for: {RATE} over {len(PROBES)} probes. 95% intervals are Wilson's.")
    print(f"{time.process_time() - started:.0f} s of one core.")
    if arguments.json:
        document = {
            "schema": 2,
            "rate": RATE,
            "prompts": arguments.prompts,
            "samples": SAMPLES,
            "draws": DRAWS,
            "calibrations": arguments.calibrations,
            "command": "python benchmarks/probe_rates.py",
            "rates": rows,
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
