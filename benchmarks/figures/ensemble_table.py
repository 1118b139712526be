"""The table of reward models trained with several seeds, and their disagreement."""

from functools import partial

from . import keep
from .experiments import Experiment
from .text import NOTHING, code, interval, made_by, number, table

HEADINGS = ("reward model", "accuracy", "ECE (by chance up to)", "ρ with the judge, SFT", "ρ with the judge, PPO")
_with_interval = partial(interval, digits=3, brackets=True)


def ensemble_table(experiment: Experiment) -> str:
    """A row for each model and one for their mean; below it, the disagreement on SFT's and PPO's completions."""
    result = keep.load(experiment.name("ensemble"))
    if not result:
        return NOTHING
    rows = [
        [
            f"seed {model['seed']}" + (", the run's own" if index == 0 else ""),
            _with_interval(model["accuracy"]),
            f"{number(model['ece'], 3)} ({number(model['ece_by_chance']['high'], 3)})",
            *(_with_interval(model["judge_correlation"][side]) for side in ("sft", "ppo")),
        ]
        for index, model in enumerate(result["models"])
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
    disagreement = result["disagreement"]
    agreement = number(100 * result["agreement"]["mean"], 1)
    sft, ppo = (_with_interval(disagreement[side]) for side in ("sft", "ppo"))
    text = (
        f"{mean['accuracy']['n']} held-out pairs, of which two models order {agreement}% alike. Disagreement on "
        f"{disagreement['sft']['n']} completions of SFT {sft}, of PPO {ppo}; unrelated models would have "
        f"{number(disagreement['unrelated'], 2)}. In brackets: 95% intervals."
    )
    return "\n\n".join([table(HEADINGS, rows), text, made_by(code(result["command"]))])
