"""The tables of a sweep over a grid, and of rounds."""

from collections import Counter
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from . import keep
from .experiments import Experiment
from .text import NOTHING, code, interval, listed, made, number, table

Row = Mapping[str, Any]
SWEPT = {"reward": 2, "judge": 2, "kl": 2, "length": 1, "distinct_2": 2, "win_rate": 3}


def sweep_table(experiment: Experiment) -> str:
    """A row for each value of the grid, with the range over seeds."""
    kept = keep.load(experiment.name("sweep"))
    if not kept:
        return NOTHING
    rows = [
        [
            listed(f"`{key}: {value}`" for key, value in one["settings"].items()),
            *(_spread(one["figures"][name], digits) for name, digits in SWEPT.items()),
            listed(f"{count} {verdict}" for verdict, count in Counter(one["verdicts"]).items()),
        ]
        for one in kept["over_seeds"]
    ]
    headings = ("", "reward", "judge", "KL", "length", "distinct-2", "win rate over SFT", "verdicts")
    return "\n\n".join([table(headings, rows), made(code(kept["command"]))])


def rounds_table(experiment: Experiment) -> str:
    """A row for each seed and round, and by how much the last round's judge is above the first's, over seeds."""
    kept = keep.load(experiment.name("rounds"))
    if not kept:
        return NOTHING
    rows = [[f"{one['seed']}", f"{one['round']}", *_round(one)] for one in kept["runs"]]
    gains = [one["judge_less_before"]["value"] for one in kept["runs"] if one["judge_less_before"]]
    low, high = (number(end, 2, sign=True) for end in (min(gains), max(gains)))
    headings = (
        "seed", "round", "new pairs", "reward model, accuracy", "reward", "gold utility", "KL, nats",
        "win rate over SFT", "verdict", "gold utility less round 1's",
    )  # fmt: skip
    mean = number(fmean(gains), 2, sign=True)
    said = f"Over {len(gains)} seeds round 2 adds {mean} ({low} to {high}) to the gold utility."
    return "\n\n".join([table(headings, rows), said, made(code(kept["command"]) + " and the other seeds")])


def _round(one: Row) -> list[str]:
    figures = (interval(one["figures"][name], 2, brackets=True) for name in ("reward", "judge", "kl"))
    pairs, gain = one["pairs"], one["judge_less_before"]
    return [
        f"{pairs['new']}" if pairs else "",
        number(one["reward_model"]["accuracy"], 3),
        *figures,
        interval(one["win_rate"], 3, brackets=True),
        one["verdict"],
        interval(gain, 2, sign=True, brackets=True) if gain else "",
    ]


def _spread(found: Row, digits: int) -> str:
    mean, low, high = (number(one, digits) for one in (found["mean"], *found["range"]))
    return f"{mean} ({low} to {high})"
