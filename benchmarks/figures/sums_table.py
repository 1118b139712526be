"""The tables of tiny-sums: each policy's right answers over seeds, and the figures of each seed."""

from collections.abc import Mapping, Sequence
from typing import Any

from . import keep
from .experiments import SUMS
from .text import NOTHING, code, interval, spread, table

COLUMNS = (
    ("greedy: right", "greedy"),
    ("greedy: shows its work", "greedy_work"),
    ("T = 1: right", "sampled"),
    ("T = 1: shows its work", "sampled_work"),
    ("majority of 16", "majority"),
    ("pass@16", "pass"),
    ("longer sums, greedy", "longer"),
    ("10¹² FLOPs beyond SFT", "teraflops"),
)
Run = Mapping[str, Any]


def sums_table() -> str:
    """A row for each policy: the mean over seeds, and the range in brackets."""
    runs = _runs()
    if not runs:
        return NOTHING
    rows = []
    for policy in runs[0]["policies"]:
        figures = [run["policies"][policy] for run in runs]
        cells = [spread([row[key]["value"] for row in figures], 3) if key in figures[0] else "" for _, key in COLUMNS]
        rows.append([policy, *cells])
    first = next(iter(runs[0]["policies"].values()))["greedy"]
    seconds = {stage: spread([run["seconds"][stage] for run in runs], 0) for stage in ("sft", "ppo", "eval")}
    kl = spread([run["kl"]["value"] for run in runs])
    text = (
        f"Mean of {len(runs)} seeds, and the range in brackets, on {first['n']} unseen problems; the longer sums are "
        f"as many, of numbers with one digit more than any line has. KL of PPO: {kl} nats. Seconds of a run: SFT "
        f"{seconds['sft']}, PPO {seconds['ppo']}, evaluation {seconds['eval']}. Peak memory: "
        f"{max(run['peak_rss_mib'] for run in runs):.0f} MiB."
    )
    return _page(["", *(title for title, _ in COLUMNS)], rows, text, runs)


def seeds_table() -> str:
    """A row for each seed: SFT and PPO, with intervals."""
    runs = _runs()
    if not runs:
        return NOTHING
    columns = [(policy, key) for key in ("greedy", "sampled") for policy in ("SFT", "PPO")]
    heads = ["seed", *(f"{policy}, {'greedy' if key == 'greedy' else 'T = 1'}" for policy, key in columns)]
    rows = [
        [
            str(run["seed"]),
            *(interval(run["policies"][policy][key], 3) for policy, key in columns),
            run["verdict"],
            run["without_judge"],
        ]
        for run in runs
    ]
    text = "Right answers to the unseen problems, with 95% intervals; the verdict by exact match, and without a judge."
    return _page([*heads, "verdict", "probes alone"], rows, text, runs)


def _page(heads: Sequence[str], rows: Sequence[Sequence[str]], note: str, runs: Sequence[Run]) -> str:
    command = code(runs[0]["command"])
    made_by = f"Made by `python benchmarks/evidence.py {SUMS}`, which ran {command} and the other seeds."
    return "\n".join([table(heads, rows), "", note, "", made_by])


def _runs() -> list[Run]:
    return list(keep.load(SUMS).get("runs", []))
