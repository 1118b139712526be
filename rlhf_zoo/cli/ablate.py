"""`rlhf-zoo ablate`: one recipe under several KL coefficients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ZooError
from .common import FLAGS, run_flags, run_options
from .open_run import open_run, settle_hub, settle_run, writing
from .tables import interval

if TYPE_CHECKING:
    from rich.console import Console

    from ..evaluation.stats import Spread
    from ..pipeline.experiments.ablate import Outcome, Variant
    from ..runs.context import Publisher, RunContext

#: Of the table: as many as stand beside each other in 80 columns.
COLUMNS = {"reward": "reward", "judge": "judge", "kl": "KL", "length": "tokens", "distinct_2": "distinct-2"}


@click.command(context_settings=FLAGS)
@click.argument("recipe")
@click.option("--kl_coef", "--kl-coef", "kl_coef", required=True, metavar="LIST", help="Values of β: 0,0.02,0.1,0.5.")
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="PPO runs of each value.")
@run_options
@click.option("--json", "as_json", is_flag=True, help="Print overview.json at the end instead of a table.")
@click.pass_context
def ablate(
    ctx: click.Context,
    recipe: str,
    kl_coef: str,
    seeds: int,
    output_dir: Path | None,
    hub: str | None,
    source_hub: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Let the string out and pull it in: train PPO from one SFT model under several β, and lay the runs side by side.

    Each run is published as RECIPE-kl-coef-VALUE-ppo, and `rlhf-zoo compare` on one of them has a slider over all. SFT
    and reward model are the recipe's own, in the same run directory; what is finished is not trained again. Other keys
    are flags as for `rlhf-zoo run`. With --seeds, figures are means over PPO's seeds, with the range.

    \b
    Example:
      rlhf-zoo ablate tiny-world --kl_coef 0,0.02,0.1,0.5
    """
    from ..pipeline.experiments.ablate import own_seed, variants

    flags = run_flags(ctx, recipe)
    loaded, run = settle_run(recipe, output_dir=output_dir, namespace=options["namespace"])
    if "ppo" not in loaded.stages:
        raise ZooError(f"The recipe {loaded.name} has no stage ppo, so there is nothing to ablate: give it a ppo.yaml.")
    ppo_flags = flags.get("ppo", {})
    variants("kl_coef", kl_coef, given=ppo_flags)  # a mistake is told before a Hub is asked for anything
    with writing(run), settle_hub(hub, push_to_hub=options["push_to_hub"], source=source_hub) as connected:
        first = own_seed(loaded, flags, run) if seeds > 1 else 1
        outcomes = []
        for variant in variants("kl_coef", kl_coef, given=ppo_flags, seeds=seeds, first=first):
            with (
                writing(variant.directory(run)),
                open_run(
                    loaded,
                    variant.directory(run),
                    variant.flags(flags),
                    connected,
                    base=run,
                    variant=variant.name,
                    **options,
                ) as (context, publisher),
            ):
                outcomes.append(_train(context, publisher, variant, run))
        _report(run, outcomes, context, as_json=as_json)


def _train(context: RunContext, publisher: Publisher | None, variant: Variant, run: Path) -> Outcome:
    from rich.console import Console

    from ..pipeline import run_recipe as pipeline
    from ..pipeline.experiments.ablate import outcome

    variant.note(run)
    console = Console(stderr=True)
    console.rule(f"[bold]{variant.label}")
    pipeline.run(context, console, publisher)
    return outcome(variant, run)


def _report(run: Path, outcomes: Sequence[Outcome], context: RunContext, *, as_json: bool) -> None:
    """Writes the overview, and shows it: as JSON, or as tables."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ..pipeline.experiments.ablate import write_overview

    path, plot = write_overview(run, context.recipe.name, outcomes)
    if as_json:
        click.echo(path.read_text(encoding="utf-8").rstrip())
        return
    console = Console()
    show_spread(console, "Held-out prompts, by β; KL in nats per completion", outcomes)
    samples = Table(title="The same prompts and random numbers under each β", show_lines=True)
    for heading in ("prompt", *(each.variant.label for each in outcomes)):
        samples.add_column(heading)
    for rows in zip(*(each.samples for each in outcomes), strict=True):
        cells = [f"{escape(text)}\n[dim]reward {reward:.2f}, judge {judge:.2f}[/]" for _, text, reward, judge in rows]
        samples.add_row(escape(rows[0][0]), *cells)
    console.print(samples)
    click.echo(f"The figures are in {path}, the curves in {plot}.")
    if context.publish:
        click.echo(f"\nTry next:\n  rlhf-zoo compare {outcomes[0].repo} --hub {context.hub.label}")


def show_spread(console: Console, title: str, outcomes: Sequence[Outcome]) -> None:
    """Prints a table with a row for each setting, its figures over seeds and its verdicts; and which probes fire.

    Args:
        console: A rich console.
        title: Of the table.
        outcomes: The runs.
    """
    from rich.table import Table

    from ..pipeline.experiments.ablate import spread

    table = Table(title=title)
    for heading in ("", *COLUMNS.values(), "win rate", "verdict"):
        table.add_column(heading, justify="left" if heading in ("", "verdict") else "right")
    for setting, figures, runs in spread(outcomes):
        cells = [_over(figures[name]) for name in COLUMNS]
        won = f"{interval(runs[0].win_rate, digits=3)}" if len(runs) == 1 else _over(figures["win_rate"], digits=3)
        verdicts = [run.verdict or "none" for run in runs]
        if len(runs) > 1:  # without what a verdict says in brackets, which differs in each
            counts = Counter(verdict.partition(" (")[0] for verdict in verdicts)
            verdicts = [f"{count} {name}" for name, count in counts.items()]
        table.add_row(setting, *cells, won, ", ".join(verdicts))
    console.print(table)
    for each in outcomes:
        if each.fired:
            console.print(f"{each.variant.label}: probes fire for {', '.join(each.fired)}.", highlight=False)


def _over(figure: Spread, *, digits: int = 2) -> str:
    """A mean over seeds, with its 95% interval, or of few seeds with the range."""
    low, high = (f"{end:.{digits}f}" for end in figure.ci95 or figure.range)
    within = f" [{low}, {high}]" if figure.ci95 else f" ({low} to {high})"
    return f"{figure.mean:.{digits}f}" + (within if figure.n > 1 else "")
