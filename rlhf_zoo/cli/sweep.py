"""`rlhf-zoo sweep`: a recipe's PPO over a grid of its keys and over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from ..errors import ZooError
from .ablate import show_spread
from .common import FLAGS, LM_EVAL, run_flags, run_options
from .open_run import run_context

if TYPE_CHECKING:
    from ..pipeline.experiments.ablate import Outcome, Variant
    from ..runs.context import Publisher, RunContext


@click.command(context_settings=FLAGS)
@click.argument("recipe")
@click.option(
    "--grid",
    multiple=True,
    required=True,
    metavar="KEY=LIST",
    help="Values of a key of PPO, kl_coef=0.02,0.05,0.1; several times for the combinations of several keys.",
)
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="PPO runs of each combination.")
@run_options
@LM_EVAL
@click.option("--json", "as_json", is_flag=True, help="Print overview.json at the end instead of a table.")
@click.pass_context
def sweep(ctx: click.Context, recipe: str, grid: tuple[str, ...], seeds: int, as_json: bool, **options: Any) -> None:
    """Train PPO under every combination of a grid and several seeds, each a tag, and show one table.

    SFT and reward model are the recipe's own and are trained once. Each cell's chosen checkpoint is a tag of
    RECIPE-ppo, such as kl-coef-0.05-seed-2, which `rlhf-zoo pull` and `compare` take. After Ctrl-C the same command
    goes on; a finished cell is not trained again. Figures are means over PPO's seeds, with the range, and from five
    seeds on with the 95% interval of the mean. Other keys are flags as for `rlhf-zoo run`.

    \b
    Example:
      rlhf-zoo sweep tiny-world --grid kl_coef=0.02,0.05,0.1 --seeds 3
    """
    from ..pipeline.experiments.sweep import cells, read_grid, write_overview
    from ..runs.recipe import load_recipe

    flags = run_flags(ctx, recipe)
    loaded = load_recipe(recipe)
    if "ppo" not in loaded.stages:
        raise ZooError(f"The recipe {loaded.name} has no stage ppo, so there is nothing to sweep: give it a ppo.yaml.")
    values = read_grid(grid, given=flags.get("ppo", {}))
    with run_context(recipe, flags, **options) as (context, publisher):
        from rich.console import Console

        from ..pipeline.experiments.ablate import own_seed

        run = context.directory
        first = own_seed(context.recipe, flags, run) if seeds > 1 else 1
        outcomes, unsent = _train(context, publisher, cells(values, seeds=seeds, first=first), flags)
        path = write_overview(run, loaded.name, values, outcomes)
        if as_json:
            click.echo(path.read_text(encoding="utf-8").rstrip())
        else:
            show_spread(Console(), "Held-out prompts, by cell; KL in nats per completion", outcomes)
            if context.publish:
                tag = f"{context.repo('ppo')}@{outcomes[0].variant.name}"
                click.echo(f"Each run is a tag, as in `rlhf-zoo pull {tag} --hub {context.hub.label}`.")
            click.echo(f"The figures are in {path}.")
        if unsent is not None:
            raise unsent


def _train(
    context: RunContext, publisher: Publisher | None, every: Sequence[Variant], flags: Mapping[str, Mapping[str, Any]]
) -> tuple[list[Outcome], ZooError | None]:
    """What came of each cell, and what a Hub said that refused a tag."""
    from rich.console import Console

    from ..pipeline import run_recipe as pipeline
    from ..pipeline.experiments.ablate import outcome
    from ..publishing.sweep_tags import send_cell
    from ..runs.lock import sole_writer

    run, console = context.directory, Console(stderr=True)
    opened = [
        (each, replace(context, directory=each.directory(run), base=run, variant=each.name, flags=each.flags(flags)))
        for each in every
    ]
    for variant, cell in opened:
        if variant.seed is None:  # what a seed changes is no mistake
            pipeline.check(cell)
    shared = replace(context, restart=False, checked=True)  # --restart is of the cells
    pipeline.claim(shared, publisher)
    for stage in context.recipe.stages:
        if stage != "ppo":
            console.rule(f"[bold]{stage}")
            pipeline.run_stage(shared, stage, publisher)
    if publisher is not None:
        publisher.drain()
    outcomes: list[Outcome] = []
    refused: ZooError | None = None
    for place, (variant, cell) in enumerate(opened, start=1):
        console.rule(f"[bold]{variant.label} ({place} of {len(opened)})")
        variant.note(run)
        with sole_writer(cell.directory, command=context.command):
            pipeline.run(cell, console)
            if publisher is not None:
                try:
                    send_cell(context, cell, variant.name)
                except ZooError as error:
                    console.print(f"Warning: {error}", highlight=False, markup=False)
                    refused = error
        outcomes.append(outcome(variant, run))
    return outcomes, refused
