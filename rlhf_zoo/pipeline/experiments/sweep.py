"""Sweeps and ablations: PPO with several values of its keys and several seeds, from one SFT policy and reward model.

A cell of a sweep is a run in runs/RECIPE/sweep/NAME/, and NAME is its tag in the recipe's PPO repository. An ablation
varies a single key: its runs are in runs/RECIPE/ablation/NAME/ and have their own repositories.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ZooError
from ...fileio import write_json
from ...publishing.plots import plot_ablation
from ...publishing.sweep_tags import send_cell
from ...runs.context import Publisher, RunContext
from ...runs.lock import sole_writer
from .. import run_recipe
from .runner import Flags, Outcome, Variant, group_by_setting, run_variants

if TYPE_CHECKING:
    from rich.console import Console

SWEEP, ABLATION = "sweep", "ablation"


def train(
    context: RunContext, publisher: Publisher | None, cells: Sequence[Variant], flags: Flags, console: "Console"
) -> tuple[list[Outcome], ZooError | None]:
    """Trains the stages that all cells share, then trains each cell and publishes it as a tag.

    Args:
        context: The recipe's own run.
        publisher: The run's publisher; None if the run is not published.
        cells: The cells, in the order in which they are trained.
        flags: The command's flags, by stage.
        console: A rich console.

    Returns:
        The outcomes of the cells, and the last error with which the Hub refused a tag, or None.
    """
    run_directory = context.directory
    send_errors: list[ZooError] = []
    for cell in cells:
        if cell.seed is None:  # check each value once: another seed cannot make it invalid
            run_recipe.check(replace(context, **cell.context_fields(run_directory, flags)))
    shared_context = replace(context, restart=False, preflight_passed=True)
    run_recipe.claim_repositories(shared_context, publisher)
    shared_stages = [stage for stage in context.recipe.stages if stage != "ppo"]
    run_recipe.run_stages(shared_context, shared_stages, console, publisher)
    if publisher is not None:
        publisher.drain()

    @contextlib.contextmanager
    def open_cell(cell: Variant) -> Iterator[tuple[RunContext, None]]:
        cell_context = replace(context, **cell.context_fields(run_directory, flags))
        with sole_writer(cell_context.directory, command=context.command):
            yield cell_context, None  # no publisher, because `send_cell` sends the cell
            if publisher is not None:
                try:
                    send_cell(context, cell_context, cell.name)
                except ZooError as error:  # the command fails only at the end, so that the next cells still train
                    console.print(f"Warning: {error}", highlight=False, markup=False)
                    send_errors.append(error)

    outcomes = run_variants(run_directory, cells, open_cell, console)
    return outcomes, send_errors[-1] if send_errors else None


def write_overview(
    run_directory: Path, recipe: str, outcomes: Sequence[Outcome], grid: Mapping[str, Sequence[Any]] | None = None
) -> Path:
    """Writes overview.json (and for an ablation overview.png) next to the runs of a sweep or ablation.

    Args:
        run_directory: The run directory.
        recipe: Name of the recipe.
        outcomes: The outcomes of the variants.
        grid: Key -> values of a sweep; None for an ablation.

    Returns:
        The path of overview.json.
    """
    first_variant = outcomes[0].variant
    varied_keys = {"key": first_variant.settings[0][0]} if grid is None else {"grid": dict(grid)}
    path = run_directory / first_variant.folder / "overview.json"
    results = _results(
        outcomes, lambda variant: {"value": variant.value} if grid is None else {"settings": dict(variant.settings)}
    )
    write_json(path, {"schema": 1, "recipe": recipe, **varied_keys, **results})
    if grid is None:
        plot_ablation({outcome.variant.label: outcome.rows for outcome in outcomes}, path.with_suffix(".png"))
    return path


def _results(outcomes: Sequence[Outcome], identify: Callable[[Variant], dict[str, Any]]) -> dict[str, Any]:
    """Returns `runs` and `over_seeds` of overview.json: one entry for each run, and one for each setting."""
    runs = [
        {
            **identify(outcome.variant),
            "seed": outcome.variant.seed,
            "directory": outcome.variant.name,
            "repo": outcome.repo,
            "figures": dict(outcome.estimates),
            "win_rate": dict(outcome.win_rate),
            **outcome.judgment,
        }
        for outcome in outcomes
    ]
    by_setting = [
        {
            **identify(group[0].variant),
            "seeds": len(group),
            "figures": {metric: spread.to_json() for metric, spread in spreads.items()},
            "verdicts": [outcome.judgment["verdict"] for outcome in group],
        }
        for _, spreads, group in group_by_setting(outcomes)
    ]
    return {"runs": runs, "over_seeds": by_setting}
