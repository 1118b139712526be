"""The table of smollm2-reviews: each seed and β, from the figures that benchmarks/reviews.py kept."""

from . import keep
from .experiments import REVIEWS
from .text import NOTHING, code, interval, number, table

HEADS = (
    "β",
    "seed",
    "machine",
    "reward, PPO − SFT",
    "KL, nats",
    "wins against SFT by the classifier, %",
    "VADER, SFT → PPO",
    "errors in 100 words, SFT → PPO",
    "repetition, %, SFT → PPO",
    "verdict",
)
VADER, GRAMMAR = "rule:vader()", 'rule:grammar(ignore=["Style", "Capitalization"])'


def reviews_table() -> str:
    """A row for each policy, larger β first, and the commands of the runs."""
    kept = keep.load(REVIEWS).get("runs", [])
    if not kept:
        return NOTHING
    runs = sorted(kept, key=lambda run: (-run["beta"], run["seed"]))
    rows = []
    for run in runs:
        percent = {"value": run["win_rate"]["value"] * 100, "ci95": [end * 100 for end in run["win_rate"]["ci95"]]}
        vader, errors = run["judges"][VADER], run["judges"][GRAMMAR]
        moved = (
            (vader["sft"]["value"], vader["ppo"]["value"], 2),
            (-errors["sft"]["value"], -errors["ppo"]["value"], 1),
            (100 * run["sft"]["repetition"]["value"], 100 * run["ppo"]["repetition"]["value"], 1),
        )
        rows.append([
            f"{run['beta']:g}",
            str(run["seed"]),
            run["machine"],
            interval(run["reward_gain"], 2),
            number(run["ppo"]["kl"]["value"], 1),
            interval(percent, 1),
            *(f"{number(before, digits)} → {number(after, digits)}" for before, after, digits in moved),
            f"{run['verdict']} (rule {run['rule']})",
        ])  # fmt: skip
    commands = dict.fromkeys(run["command"] for run in kept)
    made_by = ["Made by", "", *(f"- {code(command)}" for command in commands)]
    note = f"{runs[0]['win_rate']['n']} continuations of {runs[0]['prompts']} test prompts, 95% intervals over prompts."
    return "\n".join([table(HEADS, rows), "", note, "", *made_by])
