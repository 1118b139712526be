"""`rlhf-zoo zoo`: lists the models that a namespace has published."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..runs.registry import STAGES
from .common import check_namespace
from .layout import Command
from .open_run import open_hub
from .options import HUB, UserPath, json_option, namespace_option
from .tables import print_json, print_table, print_text

if TYPE_CHECKING:
    from ..hub.client.connect import Hub
    from ..publishing.catalog.index import CardEstimate, Entry

_SORT_KEYS = ("reward", "kl", "win_rate", "date", "stage", "name")
_README = "recipes/README.md"


@click.command(cls=Command)
@namespace_option("User or organization whose models to list.")
@click.option("--stage", type=click.Choice([*STAGES]), help="Only models of this stage.")
@click.option("--recipe", help="Only models of this recipe.")
@click.option("--base", help="Only models that started from this model, NAMESPACE/NAME or NAME.")
@click.option(
    "--sort",
    type=click.Choice(_SORT_KEYS),
    help="Sort by this column, best or newest first.  [default: by recipe and stage]",
)
@click.option("--reverse", is_flag=True, help="Reverse the order.")
@HUB
@json_option("Print JSON, with 95% intervals and sample sizes.")
@click.option(
    "--readme",
    is_flag=False,
    flag_value=_README,
    type=UserPath(dir_okay=False),
    metavar="[FILE]",
    help=f"Write the benchmark table into a Markdown file; without FILE, into {_README}.",
)
@click.option("--collections", is_flag=True, help="Group each recipe's models and Space in a Collection.")
def zoo(
    namespace: str | None,
    stage: str | None,
    recipe: str | None,
    base: str | None,
    sort: str | None,
    reverse: bool,
    hub: str | None,
    as_json: bool,
    readme: Path | None,
    collections: bool,
) -> None:
    """List the models of a namespace, with reward, KL, win rate and verdict.

    The figures come from the models' cards. The columns stage and recipe are left out if every model's name has them.

    \b
    Example:
      rlhf-zoo zoo --hub local --stage ppo --sort win_rate
      rlhf-zoo zoo --hub local --readme
    """
    check_namespace(namespace)
    with open_hub(hub) as connected_hub:
        from ..publishing.catalog.index import account_name, filter_entries, published_models, sort_entries

        account = namespace or ("local" if connected_hub.kind == "local" else account_name(connected_hub))
        all_entries = published_models(account, connected_hub)
        entries = sort_entries(
            filter_entries(all_entries, stage=stage, recipe=recipe, base=base), sort, reverse=reverse
        )
        if readme is not None:
            account_option = namespace or (None if connected_hub.kind == "local" else account)
            options = {"hub": connected_hub.label, "namespace": account_option, "stage": stage, "recipe": recipe,
                       "base": base, "sort": sort}  # fmt: skip
            _write_readme(readme, [entry for entry in entries if entry.commit], account, options, reverse=reverse)
        if collections:
            _make_collections(entries, account, connected_hub)
        if as_json:
            print_json([asdict(entry) for entry in entries])
        elif readme is None and not collections:
            _show(account, entries, requirement="matches the options" if all_entries else "has the tag rlhf-zoo")


def _write_readme(
    readme: Path, entries: list[Entry], account: str, options: dict[str, str | None], *, reverse: bool
) -> None:
    """Writes the benchmark table. Its caption is the command that makes it, with these options."""
    from ..publishing.catalog.index import benchmark_table, write_benchmark

    command = ["rlhf-zoo", "zoo"]
    command += [word for name, value in options.items() if value is not None for word in (f"--{name}", value)]
    command += [*(["--reverse"] if reverse else []), "--readme", *([] if str(readme) == _README else [str(readme)])]
    write_benchmark(readme, benchmark_table(entries, command=shlex.join(command), namespace=account))
    click.echo(f"{len(entries)} rows in {readme}", err=True)


def _show(namespace: str, entries: list[Entry], *, requirement: str) -> None:
    """Prints a table of the entries, or that no model meets the requirement."""
    if not entries:
        click.echo(f"No model of {namespace} {requirement}.", err=True)
        return
    names = [entry.repo.removeprefix(f"{namespace}/") for entry in entries]
    columns = {
        "model": names,
        "stage": [entry.stage or "" for entry in entries],
        "recipe": [entry.recipe or "" for entry in entries],
        "base": [(entry.base or "").removeprefix(f"{namespace}/") for entry in entries],
        "reward": [_format_figure(entry.reward) for entry in entries],
        "KL": [_format_figure(entry.kl) for entry in entries],
        "win rate": [
            f"acc. {_format_figure(entry.accuracy)}" if entry.accuracy else _format_figure(entry.win_rate)
            for entry in entries
        ],
        "verdict": [entry.verdict or "" for entry in entries],
        "date": [(entry.date or "")[:10] for entry in entries],
    }
    # If every name is RECIPE-STAGE, these columns add nothing, and could make the table wider than a terminal.
    if all(map(str.startswith, names, columns["recipe"])):
        del columns["recipe"]
    if all(map(str.endswith, names, columns["stage"])):
        del columns["stage"]
    print_table(namespace, [*columns], [list(row) for row in zip(*columns.values(), strict=True)])
    for entry in entries:
        if entry.note:
            print_text(f"{entry.repo}: {entry.note}", err=True)
    if any(figure and not figure.held_out for entry in entries for figure in (entry.reward, entry.kl)):
        click.echo("* the last value that training logged; the others are on held-out prompts", err=True)


def _format_figure(figure: CardEstimate | None) -> str:
    from ..publishing.cards.markdown import number

    return "" if figure is None else f"{number(figure.value)}{'' if figure.held_out else '*'}"


def _make_collections(entries: list[Entry], namespace: str, hub: Hub) -> None:
    """Makes a Collection for each recipe among the entries, with a Space whose front matter names the PPO model."""
    from ..hub.client.refusals import translate_hub_errors
    from ..publishing.collections import collect

    stages_by_recipe: dict[str, dict[str, str]] = {}  # recipe -> repository -> stage
    for entry in entries:
        if entry.recipe and entry.stage:
            stages_by_recipe.setdefault(entry.recipe, {})[entry.repo] = entry.stage
    for recipe, stages in stages_by_recipe.items():
        ppo_repos = [repo for repo, stage in stages.items() if stage == "ppo"]
        with translate_hub_errors(f"The Spaces of {namespace} cannot be listed on {hub.name}", "try again later."):
            spaces = [space.id for repo in ppo_repos for space in hub.api().list_spaces(author=namespace, models=repo)]
        slug = collect(recipe, namespace, stages, next(iter(spaces), None), hub=hub)
        print_text(f"Collection of {recipe}: {slug}", err=True)
