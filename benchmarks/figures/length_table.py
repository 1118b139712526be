"""How much of what a reward model knows is length: its accuracy by which side is longer, beside the longer one's."""

from collections.abc import Callable
from typing import Any

from .experiments import Experiment
from .run_tables import kept
from .text import NOTHING, code, made, spread, table


def length_table(experiment: Experiment) -> str:
    """Over the held-out pairs of each seed's reward model: mean, and the range over seeds."""
    runs = kept(experiment, "runs")
    if not runs:
        return NOTHING
    models = [run["reward_model"] for run in runs]

    def over(figure: Callable[[Any], float]) -> str:
        return spread([figure(model) for model in models], 3)

    rows = [
        [
            "all",
            str(models[0]["n"]),
            over(lambda model: model["accuracy"]),
            over(lambda model: model["longer_wins"]["value"]),
        ]
    ]
    for key, what, rule in (
        ("chosen_longer", "the chosen one is the longer", "1"),
        ("chosen_shorter", "the chosen one is the shorter", "0"),
        ("same_length", "lengths within a tenth of each other", ""),
    ):
        if any(key not in model for model in models):  # no pair is of this kind
            continue
        sizes = sorted({model[key]["n"] for model in models})
        rows.append([what, " to ".join(map(str, dict.fromkeys((sizes[0], sizes[-1])))),
                     over(lambda model, key=key: model[key]["value"]), rule])  # fmt: skip
    likes = over(lambda model: model["prefers_longer"]["value"])
    return "\n".join(
        [
            table(["held-out pairs", "n", "ordered rightly by the reward model", "by the rule: the longer one"], rows),
            "",
            f"The model scores the longer one higher in {likes} of the pairs. Lengths are in tokens.",
            "",
            made(code(runs[0]["command"]) + " and the other seeds"),
        ]
    )
