"""Whether a shared trunk is recommended: runs with a critic of its own and with a head on the policy, seed by seed."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from .experiments import Experiment
from .run_tables import Run, kept
from .text import NOTHING, code, listed, made, number, seeds, spread, table


def critic_table(experiments: Sequence[Experiment]) -> str:
    """Both recipes, and the sentence that follows from them."""
    rows: list[list[str]] = []
    told, commands, proven = [], [], []
    for experiment in experiments:
        apart = {
            critic: [run for run in kept(experiment, "critic") if run["critic"] == critic]
            for critic in ("separate", "shared")
        }
        gaps = [at_equal_kl(*pair) for pair in zip(*apart.values(), strict=True)]
        proven.append(len(gaps) == len(experiment.critic_seeds) and no_worse(gaps))
        if not gaps:
            continue
        rows += [[f"`{experiment.recipe}`, {critic}", *_cells(of)] for critic, of in apart.items()]
        each = listed(number(gap, 3, sign=True) for gap in gaps)
        of = seeds(run["seed"] for run in apart["shared"])
        told.append(f"`{experiment.recipe}`, {of}: {each}, mean {number(statistics.mean(gaps), 3, sign=True)}")
        commands.append(code(apart["shared"][0]["command"]) + " and the other seeds")
    if not rows:
        return NOTHING
    says = "recommended" if all(proven) else "not recommended"
    said = (
        f"Win rate at equal KL, shared less separate, on {'; on '.join(told)}. A mean over three seeds is no worse "
        f"where it is not below 0 by more than its standard error; by both recipes `critic: shared` is **{says}**."
    )
    headings = ("", "reward", "judge", "KL", "win rate over SFT, each seed", "verdict")
    return "\n".join([table(headings, rows), "", said, "", made(*commands)])


def at_equal_kl(separate: Run, shared: Run) -> float:
    """Win rate of `shared` less that of `separate`, at the lower KL of both.

    The other one is read on the line in √KL from SFT, which wins half against itself.
    """
    least = max(min(run["ppo"]["kl"] for run in (separate, shared)), 0.0)
    read = [
        0.5 + (run["win_rate"]["value"] - 0.5) * math.sqrt(least / run["ppo"]["kl"]) if run["ppo"]["kl"] > 0 else 0.5
        for run in (separate, shared)
    ]
    return read[1] - read[0]


def no_worse(gaps: Sequence[float]) -> bool:
    """Whether the mean over seeds is not below 0 by more than its standard error."""
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
    return statistics.mean(gaps) >= -error


def _cells(runs: Sequence[Run]) -> list[str]:
    figures = [spread([run["ppo"][name] for run in runs], 2) for name in ("reward", "judge", "kl")]
    wins = []
    for run in runs:
        value, low, high = (number(one, 3) for one in (run["win_rate"]["value"], *run["win_rate"]["ci95"]))
        wins.append(f"{value} ({low} to {high})")
    kinds = Counter(run["kind"] for run in runs).items()
    return [*figures, "; ".join(wins), listed(f"{count} {kind}" for kind, count in kinds)]
