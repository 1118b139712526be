"""`rlhf-zoo ensemble`: trains a recipe's reward model under several seeds."""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from .common import loading, read_flags
from .layout import RecipeCommand
from .open_run import run_context
from .options import RECIPE, json_option, seeds_option, unpublished_run_options
from .tables import interval, print_table


@click.command(cls=RecipeCommand)
@RECIPE
@seeds_option("Number of reward models, including the recipe's own.", minimum=2, default=3)
@unpublished_run_options("Train the additional reward models again, even if they are finished.")
@json_option("Print overview.json instead of a table.")
@click.pass_context
def ensemble(ctx: click.Context, recipe: str, seeds: int, restart: bool, as_json: bool, **options: Any) -> None:
    """Train the reward model under several seeds, and show where the models disagree.

    All models train on the same pairs. If the data, the SFT policy or the recipe's own reward model is missing,
    it is made first. Finished models are not trained again. If the run was evaluated, PPO's completions are scored too.
    Nothing is published; `rlhf-zoo push` sends the run's own stages. Keys of the recipe are flags, as for
    `rlhf-zoo run`.

    \b
    Example:
      rlhf-zoo ensemble tiny-world --seeds 3
    """
    flags = read_flags(ctx, recipe)
    with run_context(recipe, flags, never_publish=True, **options) as (context, _):
        from rich.console import Console

        with loading("loading the trainer"):
            from ..pipeline.experiments.ensemble import overview, train, write_overview

        console = Console(stderr=True)
        runs = train(replace(context, restart=restart), seeds, console)
        console.rule("[bold]scores")
        document = overview(runs)
        path = write_overview(context.directory, document)
    if as_json:
        click.echo(path.read_text(encoding="utf-8").rstrip())
        return
    _show(document)
    click.echo(f"The figures are in {path}, the plot in {path.with_suffix('.png')}.")
    if document["judge"] is None:
        arguments = shlex.quote(recipe)
        if options["output_dir"] is not None:
            arguments += f" --output_dir {shlex.quote(str(options['output_dir']))}"
        click.echo(f"There are no completions of PPO to score: run `rlhf-zoo eval {arguments}` to make them.")


def _show(document: Mapping[str, Any]) -> None:
    disagreement, is_evaluated = document["disagreement"], document["judge"] is not None
    title = f"{document['models'][0]['accuracy']['n']} held-out pairs"
    columns = ["", "accuracy", "ECE"]
    if is_evaluated:
        title += f"; ρ: rank correlation with the judge ({document['judge']}) on completions"
        columns += ["ρ SFT", "ρ PPO", "score PPO"]
    rows = [_row(f"seed {model['seed']}", model) for model in document["models"]]
    print_table(title, columns, [*rows, _row("mean of all", document["ensemble"])])
    on_sft = interval(disagreement["sft"], digits=3)
    lines = [
        f"On average, two of the models agree on {document['agreement']['mean']:.1%} of the pairs.",
        f"Disagreement on SFT's completions: {on_sft} (unrelated models would have {disagreement['unrelated']:.3f}).",
    ]
    if is_evaluated:
        on_ppo = interval(disagreement["ppo"], digits=3)
        change = interval(disagreement["ppo_minus_sft"], digits=3, sign="+")
        excess = interval(document["own_minus_others"], digits=3, sign="+")
        lines += [
            f"Disagreement on PPO's completions: {on_ppo}; the difference from SFT's is {change}.",
            f"The run's own model scores PPO's completions {excess} above the mean of the others.",
        ]
    click.echo("\n".join(lines))


def _row(label: str, model: Mapping[str, Any]) -> list[str]:
    cells = [label, interval(model["accuracy"], digits=3), f"{model['ece']:.3f}" if "ece" in model else ""]
    if model["ppo_score"] is None:
        return cells
    correlations = [f"{rho['value']:.2f}" if rho else "" for rho in model["judge_correlation"].values()]
    return [*cells, *correlations, f"{model['ppo_score']['value']:+.2f}"]
