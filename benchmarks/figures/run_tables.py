"""The tables of a recipe's runs over seeds."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlhf_zoo.modeling.prompt_keys import format_group_count

from . import keep
from .experiments import Experiment
from .text import NOTHING, code, name_seeds, spread, table

Run = Mapping[str, Any]

FIGURES = (
    ("reward (the proxy)", "reward", 2),
    ("judge", "judge", 2),
    ("KL to SFT, nats per completion", "kl", 2),
    ("length, tokens", "length", 1),
    ("ended by itself, share", "eos_rate", 3),
    ("distinct-2", "distinct_2", 2),
    ("repetition", "repetition", 3),
)


def runs_table(experiment: Experiment) -> str:
    """A column each for SFT, PPO, and PPO under β = 0: the mean over seeds, and the range in brackets."""
    runs = keep.load(experiment.recipe).get("runs", [])
    if not runs:
        return NOTHING
    ablation = keep.load(f"{experiment.recipe}-ablation").get("runs", [])
    without_kl = [run for run in ablation if run["beta"] == 0 and has_same_prompts(run, runs[0])]
    columns = [("SFT", runs, "sft"), ("PPO", runs, "ppo")]
    if without_kl:
        columns.append((f"PPO, β = 0, {len(without_kl[0]['curve'])} updates", without_kl, "ppo"))
    rows = figure_rows(columns)
    for name in runs[0]["judges"]:
        cells = [spread([run["judges"][name]["win_rate"]["value"] for run in group], 3) for _, group, _ in columns[1:]]
        control = spread([run["control"]["value"] for run in runs], 3) + " (SFT itself, other seed)"
        rows.append(
            [f"win rate over SFT, by the {name}", control if name == next(iter(runs[0]["judges"])) else "", *cells]
        )
    if all("win_rate_at_equal_length" in run for _, group, _ in columns[1:] for run in group):
        cells = [spread([run["win_rate_at_equal_length"]["value"] for run in group], 3) for _, group, _ in columns[1:]]
        rows.append([f"win rate over SFT at equal length, by the {next(iter(runs[0]['judges']))}", "", *cells])
    rows += [*_answer_rows(columns), *trivial_rows([group for _, group, _ in columns[1:]])]
    rows.append(["verdict", "", *(_count_kinds(group) for _, group, _ in columns[1:])])
    messages = [
        f"{name_seeds(run['seed'] for run in runs).capitalize()}: mean, and the range in brackets; "
        f"{_completions(runs[0])} each."
    ]
    if without_kl:
        messages.append(
            f"β = 0: PPO's {name_seeds(run['ppo_seed'] for run in without_kl)}, from the SFT and reward model of seed "
            f"{without_kl[0]['seed']}."
        )
    if models := [run["reward_model"] for run in runs if run["reward_model"]]:
        accuracy, pairs = spread([model["accuracy"] for model in models], 3), _range(model["n"] for model in models)
        messages.append(f"Reward model: accuracy {accuracy} on {pairs} held-out pairs.")
    messages += [
        f"Lowest end of a win rate's 95% interval: {min(run['win_rate']['ci95'][0] for run in runs):.3f}.",
        f"Peak memory: {max(run['peak_rss_mib'] for run in runs):.0f} MiB.",
        *missing_seeds(experiment, runs),
    ]
    made_by = f"Made by `make evidence`, which runs {code(runs[0]['command'])} and the other seeds"
    made_by += f"; β = 0 by {code(without_kl[0]['command'])}." if without_kl else "."
    shown = table(["held-out prompts", *(title for title, _, _ in columns)], rows)
    return "\n\n".join([shown, " ".join(messages), made_by])


def has_same_prompts(run: Run, other: Run) -> bool:
    """Whether two runs were tested on equally many completions. If not, they had different test prompts."""
    return bool(run["win_rate"]["n"] == other["win_rate"]["n"])


def _completions(run: Run) -> str:
    """Counts the completions behind a run's figures, and their prompts if the file has them."""
    counted = f"{run['win_rate']['n']} completions"
    return f"{counted} to {run['prompts']} test prompts{_groups(run)}" if "prompts" in run else counted


def _groups(counts: Mapping[str, Any]) -> str:
    return format_group_count(counts.get("groups"), counts["prompts"])


def _answer_rows(columns: Sequence[tuple[str, Sequence[Run], str]]) -> list[list[str]]:
    """Rows of right answers, for each judge that is a rule and each way to read an answer."""
    judges = {name: judge["answers"] for name, judge in columns[0][1][0]["judges"].items() if "answers" in judge}
    return [
        [
            f"right answers, read {reading}",
            *(
                spread([run["judges"][name]["answers"][reading][side]["accuracy"]["value"] for run in group], 3)
                for _, group, side in columns
            ),
        ]
        for name, readings in judges.items()
        for reading in readings
    ]


def trivial_rows(groups: Sequence[Sequence[Run]]) -> list[list[str]]:
    """Rows of win rates of policies without training; no rows if no run measured them."""
    results: dict[str, list[list[float]]] = {}
    for column, group in enumerate(groups):
        for policy in (policy for run in group for policy in run.get("trivial", {}).get("policies", [])):
            results.setdefault(policy["name"], [[] for _ in groups])[column].append(policy["win_rate"]["value"])
    return [
        [f"win rate over SFT, {name}", "", *(spread(rates, 3) if rates else "" for rates in columns)]
        for name, columns in results.items()
    ]


def missing_seeds(experiment: Experiment, runs: Sequence[Run]) -> list[str]:
    """Returns a sentence that names the seeds without figures; [] if there are none."""
    missing = [seed for seed in experiment.seeds if seed not in {run["seed"] for run in runs}]
    return [f"Left out, since not finished: {name_seeds(missing)}."] if missing else []


def figure_rows(columns: Sequence[tuple[str, Sequence[Run], str]]) -> list[list[str]]:
    """A row for each figure, with the mean and range of each column."""
    # SFT's KL to itself is 0 up to rounding.
    return [
        [
            label,
            *(
                "0" if (key, side) == ("kl", "sft") else spread([run[side][key] for run in group], digits)
                for _, group, side in columns
            ),
        ]
        for label, key, digits in FIGURES
    ]


def _count_kinds(runs: Iterable[Run]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in Counter(run["kind"] for run in runs).items())


def _range(counts: Iterable[int]) -> str:
    ordered = sorted(set(counts))
    return str(ordered[0]) if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"
