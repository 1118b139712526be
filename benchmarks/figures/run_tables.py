"""The tables of runs: over seeds, and under β = 0 beside the recipe's own β."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlhf_zoo.modeling.prompt_keys import format_group_count

from . import keep
from .experiments import Experiment
from .text import NOTHING, code, listed, made, seeds, spread, table

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
    """SFT, PPO over seeds, and PPO under β = 0 beside them: mean over seeds, range in brackets."""
    runs = kept(experiment, "runs")
    if not runs:
        return NOTHING
    cut = [run for run in kept(experiment, "ablation") if run["beta"] == 0 and same_prompts(run, runs[0])]
    columns = [("SFT", runs, "sft"), ("PPO", runs, "ppo")]
    if cut:
        columns.append((f"PPO, β = 0, {len(cut[0]['curve'])} updates", cut, "ppo"))
    rows = figure_rows(columns)
    for name in runs[0]["judges"]:
        cells = [spread([run["judges"][name]["win_rate"]["value"] for run in of], 3) for _, of, side in columns[1:]]
        control = spread([run["control"]["value"] for run in runs], 3) + " (SFT itself, other seed)"
        rows.append(
            [f"win rate over SFT, by the {name}", control if name == next(iter(runs[0]["judges"])) else "", *cells]
        )
    if all("win_rate_at_equal_length" in run for _, of, _ in columns[1:] for run in of):
        cells = [spread([run["win_rate_at_equal_length"]["value"] for run in of], 3) for _, of, _ in columns[1:]]
        rows.append([f"win rate over SFT at equal length, by the {next(iter(runs[0]['judges']))}", "", *cells])
    rows += [*_answer_rows(columns), *trivial_rows([of for _, of, _ in columns[1:]])]
    rows.append(["verdict", "", *(_counted(run["kind"] for run in of) for _, of, _ in columns[1:])])
    messages = [
        f"{seeds(run['seed'] for run in runs).capitalize()}: mean, and the range in brackets; "
        f"{_completions(runs[0])} each."
    ]
    if cut:
        messages.append(
            f"β = 0: PPO's {seeds(run['ppo_seed'] for run in cut)}, from the SFT and reward model of seed "
            f"{cut[0]['seed']}."
        )
    if models := [run["reward_model"] for run in runs if run["reward_model"]]:
        accuracy, pairs = spread([one["accuracy"] for one in models], 3), _sizes(one["n"] for one in models)
        messages.append(f"Reward model: accuracy {accuracy} on {pairs} held-out pairs.")
    messages += [
        f"Lowest end of a win rate's 95% interval: {min(run['win_rate']['ci95'][0] for run in runs):.3f}.",
        f"Peak memory: {max(run['peak_rss_mib'] for run in runs):.0f} MiB.",
        *missing_seeds(experiment, runs),
    ]
    return "\n".join(
        [
            table(["held-out prompts", *(title for title, _, _ in columns)], rows),
            "",
            " ".join(messages),
            "",
            made(code(runs[0]["command"]) + " and the other seeds", *(code(run["command"]) for run in cut[:1])),
        ]
    )


def same_prompts(run: Run, other: Run) -> bool:
    """Whether two runs were tested on as many completions. If not, figures differ also by the prompts."""
    return bool(run["win_rate"]["n"] == other["win_rate"]["n"])


def _completions(run: Run) -> str:
    """How many completions a run's figures are of; and of how many prompts, where that was kept."""
    counted = f"{run['win_rate']['n']} completions"
    return f"{counted} to {run['prompts']} test prompts{_groups(run)}" if "prompts" in run else counted


def _groups(of: Mapping[str, Any]) -> str:
    return format_group_count(of.get("groups"), of["prompts"])


def _answer_rows(columns: Sequence[tuple[str, Sequence[Run], str]]) -> list[list[str]]:
    """Right answers by the rules among the judges that check them, by how an answer is read."""
    judges = {name: judge["answers"] for name, judge in columns[0][1][0]["judges"].items() if "answers" in judge}
    return [
        [
            f"right answers, read {reading}",
            *(
                spread([run["judges"][name]["answers"][reading][side]["accuracy"]["value"] for run in of], 3)
                for _, of, side in columns
            ),
        ]
        for name, readings in judges.items()
        for reading in readings
    ]


def trivial_rows(groups: Sequence[Sequence[Run]]) -> list[list[str]]:
    """Win rates of what needs no training, chosen by the runs of each group; none of runs that did not measure it."""
    results: dict[str, list[list[float]]] = {}
    for place, of in enumerate(groups):
        for one in (policy for run in of for policy in run.get("trivial", {}).get("policies", [])):
            results.setdefault(one["name"], [[] for _ in groups])[place].append(one["win_rate"]["value"])
    return [
        [f"win rate over SFT, {name}", "", *(spread(each, 3) if each else "" for each in rates)]
        for name, rates in results.items()
    ]


def ablation_table(experiment: Experiment) -> str:
    """Verdicts, probes and figures under β = 0 and the recipe's β."""
    runs = kept(experiment, "ablation")
    if not runs:
        return NOTHING
    groups = by_beta(runs)
    titles = [f"β = {beta:g}" + (", the recipe's" if beta == experiment.beta else "") for beta in groups]
    verdicts: list[tuple[str, Callable[[Run], str]]] = [
        ("verdict", lambda run: str(run["verdict"])),
        ("step recommended", lambda run: str(run["recommended"] or "none")),
        (
            "families of probes that fire",
            lambda run: str(len({one["family"] for one in run["probes"] if one["fired"]})),
        ),
    ]
    rows = [
        [f"{label}, each seed", "", *(listed(tell(run) for run in of) for of in groups.values())]
        for label, tell in verdicts
    ]
    rows.append(["probes that fire, in how many runs", "", *(_fired(of) for of in groups.values())])
    columns = [
        ("SFT", next(iter(groups.values())), "sft"),
        *((title, of, "ppo") for title, of in zip(titles, groups.values(), strict=True)),
    ]
    rows += figure_rows(columns)
    rows.append(
        ["win rate over SFT", "", *(spread([run["win_rate"]["value"] for run in of], 3) for of in groups.values())]
    )
    rows += trivial_rows(list(groups.values()))
    first = runs[0]
    seen = first["validation"]
    messages = [
        f"PPO's {seeds(dict.fromkeys(run['ppo_seed'] for run in runs))}, {len(first['curve'])} updates each, "
        f"from the SFT and reward model of seed {first['seed']}; figures are the mean, the range in brackets. Verdict "
        f"and probes: {seen['prompts']} validation prompts{_groups(seen)}, {seen['samples']} completions each. "
        f"Figures: {_completions(first)}{'' if 'prompts' in first else ' to test prompts'}.",
        *missing_variants(experiment, runs),
    ]
    names = dict.fromkeys(one["family"] for run in runs for one in run["probes"])
    probes = [_probe_row(name, groups) for name in names]
    headings = ["probe at the last checkpoint", "threshold", *(part for title in titles for part in (title, "fires"))]
    return "\n".join(
        [
            table(["", "SFT", *titles], rows),
            "",
            " ".join(messages),
            "",
            table(headings, probes),
            "",
            "A family's effect, and the smallest that counts.",
            "",
            made(code(first["command"])),
        ]
    )


def kept(experiment: Experiment, part: str) -> list[Run]:
    """What docs/evidence has of a part of it."""
    return list(keep.load(experiment.name(part)).get("runs", []))


def by_beta(runs: Iterable[Run]) -> dict[float, list[Run]]:
    results: dict[float, list[Run]] = {}
    for run in runs:
        results.setdefault(run["beta"], []).append(run)
    return results


def missing_seeds(experiment: Experiment, runs: Sequence[Run]) -> list[str]:
    """A sentence for the seeds that are not kept; [] where all are."""
    left = [seed for seed in experiment.seeds if seed not in {run["seed"] for run in runs}]
    return [f"Left out, since not finished: {seeds(left)}."] if left else []


def missing_variants(experiment: Experiment, runs: Sequence[Run]) -> list[str]:
    """The same for the runs of the ablation."""
    there = {(run["beta"], run["ppo_seed"]) for run in runs}
    asked = [(one.value, keep.variant_seed(experiment, one.seed)) for one in experiment.variants]
    left = [f"β = {beta:g} seed {seed}" for beta, seed in asked if (beta, seed) not in there]
    return [f"Left out, since not finished: {listed(left)}."] if left else []


def figure_rows(columns: Sequence[tuple[str, Sequence[Run], str]]) -> list[list[str]]:
    """A row for each figure, mean and range of each column."""
    # The reference against itself: what is left of zero is rounding.
    return [
        [
            label,
            *(
                "0" if (key, side) == ("kl", "sft") else spread([run[side][key] for run in of], digits)
                for _, of, side in columns
            ),
        ]
        for label, key, digits in FIGURES
    ]


def _fired(runs: Sequence[Run]) -> str:
    counts = Counter(one["family"] for run in runs for one in run["probes"] if one["fired"])
    return ", ".join(f"{name} {count}/{len(runs)}" for name, count in counts.items()) or "none"


def _probe_row(name: str, groups: Mapping[float, Sequence[Run]]) -> list[str]:
    each = [[one for run in of for one in run["probes"] if one["family"] == name] for of in groups.values()]
    result = [one for of in each for one in of]
    digits = 3 if abs(result[0]["threshold"]) < 10 else 1
    cells = [f"`{name}`", spread([one["threshold"] for one in result], digits)]
    for of in each:
        fired = f"{sum(one['fired'] for one in of)}/{len(of)}"
        cells += [spread([one["effect"] for one in of], 3), fired] if of else ["", ""]
    return cells


def _counted(words: Iterable[str]) -> str:
    return ", ".join(f"{count} {word}" for word, count in Counter(words).items())


def _sizes(values: Iterable[int]) -> str:
    result = sorted(set(values))
    return str(result[0]) if len(result) == 1 else f"{result[0]} to {result[-1]}"
