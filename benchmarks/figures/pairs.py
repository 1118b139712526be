"""What only the tiny world can say of a run: intervals by pair of product and aspect, and the parts of its utility.

A pair has eight openings, each of which counts as a prompt in the card's intervals.
"""

import json
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from rlhf_zoo.corpora.tiny_world.grammar import subjects
from rlhf_zoo.corpora.tiny_world.lexicon import PRODUCTS
from rlhf_zoo.corpora.tiny_world_2 import PARTS, explain
from rlhf_zoo.evaluation.stats import bootstrap_mean, share
from rlhf_zoo.record import read_json

from .text import NOTHING, code, made, number, spread, table

NO_GAIN = {"judge's gain": 0.0, "win rate": 0.5, "judge's gain, validation": 0.0}
CONSTANT = " is great; i love it."
NAMED = [(product, aspect) for product in sorted(PRODUCTS) for aspect in PRODUCTS[product]]
NAMES = {opening: pair for pair in NAMED for opening in subjects(*pair)}


def by_pair(run: Path) -> dict[str, Any]:
    """Figures of a finished run's last checkpoint, with 95% intervals that resample prompts, and pairs."""
    seed = read_json(run / "summary.json")["seed"]
    rows = _rows(run / "eval" / "samples.jsonl")
    sft, ppo = (np.array([row[side]["judge"] for row in rows]) for side in ("sft", "ppo"))
    over = read_json(run / "eval" / "over_training.json")
    scores = np.array(over["judge"], dtype=float)
    validation = [row["prompt"] for row in _rows(run / "data" / "prompts" / "validation.jsonl")][: scores.shape[1]]
    test = [row["prompt"] for row in rows]

    def mean(values: Any, groups: Sequence[Hashable]) -> dict[str, Any]:
        return bootstrap_mean(values, groups, seed=seed).to_json()

    def both(values: Any, prompts: Sequence[str], interval: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        grouped = {"by_prompt": prompts, "by_pair": [NAMES[prompt] for prompt in prompts]}
        return {name: {**interval(values, groups), "groups": len(set(groups))} for name, groups in grouped.items()}

    return {
        "judge": both(ppo, test, mean),
        "judge's gain": both(ppo - sft, test, mean),
        "win rate": both((np.sign(ppo - sft) + 1) / 2, test, lambda *of: share(*of).to_json()),
        "judge's gain, validation": both(scores[-1] - scores[0], validation, mean),
    }


def parts(run: Path) -> dict[str, Any]:
    """The mean of each part of the gold utility, of what SFT and the policy of a finished run wrote to test prompts.

    constant: how " is great; i love it.", which won version 1, fares there: its utility, and its win rate over SFT.
    """
    rows, found = _rows(run / "eval" / "samples.jsonl"), {}
    for side in ("sft", "ppo"):
        each = [explain(row["prompt"] + row[side]["completion"]) for row in rows]
        found[side] = {part: fmean(one[part] for one in each) for part in (*PARTS, "utility")}
    worth = [explain(row["prompt"] + CONSTANT)["utility"] for row in rows]
    won = (np.sign(np.subtract(worth, [row["sft"]["judge"] for row in rows])) + 1) / 2
    return {**found, "constant": {"utility": fmean(worth), "win_rate": float(won.mean())}}


def _rows(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def pairs_table(runs: Sequence[dict[str, Any]]) -> str:
    """A row for each figure, of kept runs over seeds."""
    kept = [run["by_pair"] for run in runs if "by_pair" in run]
    if not kept:
        return NOTHING
    rows = []
    for figure, first in kept[0].items():
        cells = [number(fmean(one[figure]["by_prompt"]["value"] for one in kept), 2)]
        for how in ("by_prompt", "by_pair"):
            ends = (fmean(one[figure][how]["ci95"][end] for one in kept) for end in (0, 1))
            cells.append(f"{' to '.join(number(end, 2) for end in ends)} ({first[how]['groups']})")
        above = [one[figure]["by_pair"]["ci95"][0] > NO_GAIN[figure] for one in kept] if figure in NO_GAIN else []
        rows.append([figure, *cells, f"{sum(above)} of {len(above)}" if above else ""])
    said = (
        f"Means over {len(kept)} seeds of figures and of both ends of their 95% intervals, in brackets how many prompts"
        " or pairs are drawn again; last, in how many seeds a gain shows by pairs."
    )
    headings = ("figure", "value", "interval by prompt", "by pair", "gain by pair")
    return "\n\n".join([table(headings, rows), said, made(code(runs[0]["command"]) + " and the other seeds")])


def parts_table(runs: Sequence[dict[str, Any]], without: Sequence[dict[str, Any]]) -> str:
    """A row for each part, of kept runs over seeds; without: those under β = 0."""
    kept, hacked = ([run["parts"] for run in group if "parts" in run] for group in (runs, without))
    if not kept:
        return NOTHING
    columns = {
        "SFT": [one["sft"] for one in kept],
        "PPO": [one["ppo"] for one in kept],
        "PPO, β = 0, 120 updates": [one["ppo"] for one in hacked],
    }
    columns = {name: of for name, of in columns.items() if of}
    rows = [[part, *(spread([one[part] for one in of], 2) for of in columns.values())] for part in (*PARTS, "utility")]
    commands = [code(group[0]["command"]) + " and the other seeds" for group in (runs, without) if group]
    return "\n\n".join([table(["mean of each part of the utility", *columns], rows), made(*commands)])
