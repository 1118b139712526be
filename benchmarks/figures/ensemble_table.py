"""The table of reward models under several seeds, and where they disagree."""

from functools import partial

from . import keep
from .experiments import Experiment
from .text import NOTHING, code, interval, made, number, table

HEADINGS = ("reward model", "accuracy", "ECE (by chance up to)", "ρ with the judge, SFT", "ρ with the judge, PPO")
_with_interval = partial(interval, digits=3, brackets=True)


def ensemble_table(experiment: Experiment) -> str:
    """A row for each model, and one for their mean; then the disagreement on SFT's and on PPO's completions."""
    result = keep.load(experiment.name("ensemble"))
    if not result:
        return NOTHING
    rows = [
        [
            f"seed {one['seed']}" + (", the run's own" if place == 0 else ""),
            _with_interval(one["accuracy"]),
            f"{number(one['ece'], 3)} ({number(one['ece_by_chance']['high'], 3)})",
            *(_with_interval(one["judge_correlation"][side]) for side in ("sft", "ppo")),
        ]
        for place, one in enumerate(result["models"])
    ]
    mean = result["ensemble"]
    rows.append(
        [
            "mean of all",
            _with_interval(mean["accuracy"]),
            "",
            *(_with_interval(mean["judge_correlation"][side]) for side in ("sft", "ppo")),
        ]
    )
    apart = result["disagreement"]
    alike = number(100 * result["agreement"]["mean"], 1)
    sft, ppo = (_with_interval(apart[side]) for side in ("sft", "ppo"))
    text = (
        f"{mean['accuracy']['n']} held-out pairs, of which two models order {alike}% alike. Disagreement on "
        f"{apart['sft']['n']} completions of SFT {sft}, of PPO {ppo}; unrelated models would have "
        f"{number(apart['unrelated'], 2)}. In brackets: 95% intervals."
    )
    return "\n\n".join([table(HEADINGS, rows), text, made(code(result["command"]))])
