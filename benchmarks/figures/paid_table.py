"""The table of PPO under a small β, paid by one reward model and by several."""

from collections.abc import Callable

from .experiments import Experiment
from .run_tables import Run, figure_rows, kept, trivial_rows
from .text import NOTHING, code, interval, made, number, table

TITLES = {
    "single": "one model",
    "worst": "the worst of {n}",
    "less-variance": "the mean of {n} less ½ of their variance",
}


def paid_table(experiment: Experiment) -> str:
    """A column for each way of paying, beside SFT."""
    runs = {run["paid_by"]: run for run in kept(experiment, "ensemble-reward")}
    if not runs:
        return NOTHING
    titles = [TITLES[by].format(n=experiment.ppo_seeds) for by in runs]
    every = list(runs.values())
    first = every[0]
    # What each is paid by has another scale, so SFT's reward stands beside its own.
    rows = figure_rows([("SFT", [first], "sft"), *((by, [run], "ppo") for by, run in runs.items())])[1:]
    told: list[tuple[str, Callable[[Run], str]]] = [
        ("reward that it is paid, SFT → PPO", lambda run: " → ".join(_mean(run, side) for side in ("sft", "ppo"))),
        ("win rate over SFT", lambda run: interval(run["win_rate"], 3, brackets=True)),
        ("judge on validation prompts, SFT → PPO", _validated),
        ("verdict, by these", lambda run: str(run["verdict"])),
        ("step recommended", lambda run: str(run["recommended"] or "none")),
        ("probes that fire", lambda run: ", ".join(one["name"] for one in run["probes"] if one["fired"]) or "none"),
        ("the run's own reward model on rollouts, first and last update", lambda run: _course(run, "own", "reward")),
        ("disagreement of the models, first and last update", lambda run: _course(run, "disagreement")),
    ]
    rows += [[label, "", *(tell(run) for run in every)] for label, tell in told]
    rows += trivial_rows([[run] for run in every])
    said = (
        f"β = {first['beta']:g}, {len(first['curve'])} updates, from the SFT policy and the reward models of seed "
        f"{first['seed']} and the next; one seed of PPO each; {first['win_rate']['n']} completions to test prompts, "
        f"{first['validation']['prompts']} validation prompts. Rewards are in units of SFT's spread."
    )
    left = [TITLES[by].format(n=experiment.ppo_seeds) for by in TITLES if by not in runs]
    missing = f" Left out, since not finished: {', '.join(left)}." if left else ""
    return "\n\n".join(
        [table(["", "SFT", *titles], rows), said + missing, made(*(code(run["command"]) for run in every))]
    )


def _mean(run: Run, side: str) -> str:
    return number(run[side]["reward"], 2)


def _validated(run: Run) -> str:
    return " → ".join(number(one["judge"], 2) for one in (run["validation"], run["checkpoints"][-1]))


def _course(run: Run, *keys: str) -> str:
    """The first of these figures that the run logged, at its first and its last update."""
    key = next((key for key in keys if key in run["curve"][0]), None)
    return "" if key is None else " → ".join(number(run["curve"][place][key], 2) for place in (0, -1))
