"""Whether a setting is recommended: runs without it and with it, of one SFT policy and reward model, seed by seed."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from .experiments import SETTINGS, Experiment
from .run_tables import Run, kept
from .text import NOTHING, code, interval, listed, made, number, seeds, spread, table


def setting_table(part: str, experiments: Sequence[Experiment]) -> str:
    """Both recipes, and the sentence that follows from them. part: of SETTINGS."""
    setting = SETTINGS[part]
    rows: list[list[str]] = []
    told, commands, proven = [], [], []
    for experiment in experiments:
        apart = {
            name: [run for run in kept(experiment, part) if run[part] == name]
            for name in (setting.without, setting.name)
        }
        gaps = [at_equal_kl(*pair) for pair in zip(*apart.values(), strict=True)]
        proven.append(len(gaps) == len(experiment.setting_seeds) and no_worse(gaps))
        if not gaps:
            continue
        rows += [[f"`{experiment.recipe}`, {name}", *_cells(of)] for name, of in apart.items()]
        each = listed(number(gap, 3, sign=True) for gap in gaps)
        of = seeds(run["seed"] for run in apart[setting.name])
        told.append(f"`{experiment.recipe}`, {of}: {each}, mean {number(statistics.mean(gaps), 3, sign=True)}")
        commands.append(code(apart[setting.name][0]["command"]) + " and the other seeds")
    if not rows:
        return NOTHING
    says = "recommended" if all(proven) else "not recommended"
    said = (
        f"Win rate at equal KL, {setting.name} less {setting.without}, on {'; on '.join(told)}. A mean over three "
        f"seeds is no worse where it is not below 0 by more than its standard error; by both recipes `{setting.key}` "
        f"is **{says}**."
    )
    headings = ("", "reward", "judge", "KL", "win rate over SFT, each seed", "verdict")
    return "\n".join([table(headings, rows), "", said, "", made(*commands)])


def at_equal_kl(without: Run, with_it: Run) -> float:
    """Win rate of the second less that of the first, at the lower KL of both.

    The other one is read on the line in √KL from SFT, which wins half against itself.
    """
    least = max(min(run["ppo"]["kl"] for run in (without, with_it)), 0.0)
    read = [
        0.5 + (run["win_rate"]["value"] - 0.5) * math.sqrt(least / run["ppo"]["kl"]) if run["ppo"]["kl"] > 0 else 0.5
        for run in (without, with_it)
    ]
    return read[1] - read[0]


def no_worse(gaps: Sequence[float]) -> bool:
    """Whether the mean over seeds is not below 0 by more than its standard error."""
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
    return statistics.mean(gaps) >= -error


def _cells(runs: Sequence[Run]) -> list[str]:
    figures = [spread([run["ppo"][name] for run in runs], 2) for name in ("reward", "judge", "kl")]
    wins = "; ".join(interval(run["win_rate"], 3) for run in runs)
    kinds = Counter(run["kind"] for run in runs).items()
    return [*figures, wins, listed(f"{count} {kind}" for kind, count in kinds)]
