"""The table of the share of the possible gain that the recommended checkpoint has."""

from collections.abc import Sequence

from .experiments import Experiment
from .gain import Gain, share_of_gain
from .run_tables import Run, by_beta, kept, missing_seeds, missing_variants
from .text import NOTHING, code, made, number, spread, table

HEADINGS = ("run", "SFT", "best checkpoint", "recommended", "share of the gain: recommended", "last checkpoint")


def gain_table(experiment: Experiment) -> str:
    """Run by run: over seeds, and under β = 0 and the recipe's β."""
    whole = [run for run in kept(experiment, "runs") if "gain" in run]
    ablated = [run for run in kept(experiment, "ablation") if "gain" in run]
    every = [*whole, *ablated]
    if not every:
        return NOTHING
    rows = _rows("whole runs", {f"seed {run['seed']}": run for run in whole})
    for beta, runs in by_beta(ablated).items():
        rows += _rows(f"β = {beta:g}", {f"β = {beta:g}, PPO's seed {run['ppo_seed']}": run for run in runs})
    prompts, samples = (every[0]["gain"][name] for name in ("prompts", "samples"))
    said = [
        f"Mean gold utility of {prompts * samples} completions to {prompts} test prompts, in brackets the step. The "
        "recommended checkpoint was chosen on validation prompts. The best one is chosen by the figures that it is "
        "shown with, which makes the possible gain look a little larger than it is."
    ]
    if none := sum(run["recommended"] is None for run in every):
        said.append(
            f"In {none} of {len(every)} runs no checkpoint is recommended: one stays with SFT, and the share is 0 "
            "where a checkpoint is better than SFT."
        )
    said += [*missing_seeds(experiment, whole), *missing_variants(experiment, ablated)]
    commands = [code(whole[0]["command"]) + " and the other seeds"] if whole else []
    commands += [code(run["command"]) for run in ablated[:1]]
    return "\n\n".join([table(HEADINGS, rows), " ".join(said), made(*commands)])


def gain_of(run: Run) -> Gain:
    """From a kept run that has its `gain`."""
    gold = {row["step"]: row["gold"] for row in run["gain"]["checkpoints"]}
    return share_of_gain(run["gain"]["sft"], gold, run["recommended"])


def _rows(title: str, runs: dict[str, Run]) -> list[list[str]]:
    """A row for each run, and one for all; none where there is no run."""
    if not runs:
        return []
    gains = {label: gain_of(run) for label, run in runs.items()}
    rows = [[label, *_cells(gain)] for label, gain in gains.items()]
    shares = ([one.share for one in gains.values()], [one.last_share for one in gains.values()])
    return [*rows, [f"**{title}: mean, range**", "", "", "", *(f"**{_all(each)}**" for each in shares)]]


def _cells(gain: Gain) -> list[str]:
    chosen = "none" if gain.recommended is None else f"{number(gain.recommended, 2)} ({gain.recommended_step})"
    best = f"{number(gain.best, 2)} ({gain.best_step})"
    return [number(gain.sft, 2), best, chosen, _all([gain.share]), _all([gain.last_share])]


def _all(shares: Sequence[float | None]) -> str:
    there = [share for share in shares if share is not None]
    return spread(there, 2) if there else "none to be had"
