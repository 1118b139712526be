"""`rlhf-zoo sweep|ablate`: trains a recipe's PPO under several settings and seeds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ZooError
from ..runs.registry import STAGES
from .common import loading, read_flags
from .layout import RecipeCommand
from .open_run import locked, open_hub, open_run, resolve_run, run_context
from .options import LM_EVAL, RECIPE, json_option, run_options, seeds_option
from .tables import interval, number_or_range, print_table, print_text, verdict_cell

if TYPE_CHECKING:
    from rich.console import Console

    from ..evaluation.stats import Spread
    from ..pipeline.experiments.runner import Outcome, Variant
    from ..runs.context import Publisher, RunContext
    from ..runs.recipe import Recipe

#: Columns of the table of figures. More would not fit into 80 columns of text.
COLUMNS = {"reward": "reward", "judge": "judge", "kl": "KL", "length": "tokens", "distinct_2": "distinct-2"}


@click.command(cls=RecipeCommand)
@RECIPE
@click.option(
    "--grid",
    multiple=True,
    required=True,
    metavar="KEY=LIST",
    help="Values of a key of PPO, as in kl_coef=0.02,0.05,0.1. Repeat the option to combine several keys.",
)
@seeds_option("Number of PPO runs of each combination.")
@run_options
@LM_EVAL
@json_option("Print overview.json at the end instead of a table.")
@click.pass_context
def sweep(ctx: click.Context, recipe: str, grid: tuple[str, ...], seeds: int, as_json: bool, **options: Any) -> None:
    """Train PPO under every combination of values and seeds, and compare the runs.

    All runs share the recipe's SFT policy and reward model. The chosen checkpoint of each run becomes a tag of
    RECIPE-ppo, such as kl-coef-0.05-seed-2, for `rlhf-zoo pull` and `compare`. After Ctrl-C, run the same command to
    resume; finished runs are not trained again. Figures are means over PPO's seeds with their range; with five seeds or
    more, with the 95% interval of the mean. Other keys are flags as for `rlhf-zoo run`.

    \b
    Example:
      rlhf-zoo sweep tiny-world --grid kl_coef=0.02,0.05,0.1 --seeds 3
    """
    from ..runs.recipe import load_recipe

    flags = read_flags(ctx, recipe)
    loaded_recipe = load_recipe(recipe)
    _check_has_ppo(loaded_recipe, "sweep")
    values_by_key = read_grid(grid, flags=flags["ppo"])
    with loading("loading the trainer"):
        from ..pipeline.experiments.runner import make_variants, recipe_seed
        from ..pipeline.experiments.sweep import SWEEP, train, write_overview

    with run_context(recipe, flags, **options) as (context, publisher):
        from rich.console import Console

        directory = context.directory
        first_seed = recipe_seed(context.recipe, flags, directory) if seeds > 1 else 1
        variants = make_variants(values_by_key, folder=SWEEP, seed_count=seeds, first_seed=first_seed)
        outcomes, tag_error = train(context, publisher, variants, flags, Console(stderr=True))
        path = write_overview(directory, loaded_recipe.name, outcomes, values_by_key)
        if as_json:
            click.echo(path.read_text(encoding="utf-8").rstrip())
        else:
            _show_figures("Held-out prompts, by setting; KL in nats per completion", outcomes)
            if context.publish:
                tag = f"{context.repo('ppo')}@{outcomes[0].variant.name}"
                click.echo(f"Each run is a tag, as in `rlhf-zoo pull {tag} --hub {context.hub.label}`.")
            click.echo(f"The figures are in {path}.")
        if tag_error is not None:  # the Hub refused a tag, but every run is trained and in the table
            raise tag_error


@click.command(cls=RecipeCommand)
@RECIPE
@click.option("--kl_coef", "--kl-coef", "kl_coef", required=True, metavar="LIST", help="Values of β, as in 0,0.1,0.5.")
@seeds_option("Number of PPO runs of each value.")
@run_options
@json_option("Print overview.json at the end instead of a table.")
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
    """Train PPO under several KL penalties and compare the runs.

    Each run is published as RECIPE-kl-coef-VALUE-ppo, and `rlhf-zoo compare` shows all runs if you name one of them.
    They share the recipe's SFT policy and reward model; finished models are not trained again. Other keys are flags as
    for `rlhf-zoo run`. With --seeds, figures are as for `rlhf-zoo sweep`. Runs are compared at their last step; with
    --ppo.release recommended, at the steps that their verdicts recommend. If the recipe's own run is finished and its
    other settings are the same, it is the last row, at its own step.

    \b
    Example:
      rlhf-zoo ablate tiny-world --kl_coef 0,0.02,0.1,0.5
    """
    flags = read_flags(ctx, recipe)
    loaded_recipe, directory = resolve_run(recipe, output_dir=output_dir, namespace=options["namespace"])
    _check_has_ppo(loaded_recipe, "ablate")
    values_by_key = read_penalties(kl_coef, flags=flags["ppo"])
    with loading("loading the trainer"):
        from ..pipeline.experiments.runner import make_variants, read_own_outcome, recipe_seed, run_variants, with_keys
        from ..pipeline.experiments.sweep import ABLATION, write_overview

    # The last step shows what a penalty does: a recommended step may come before the reward is hacked.
    flags = with_keys(flags, "ppo", {"release": flags["ppo"].get("release", "last")})
    with locked(directory), open_hub(hub, push_to_hub=options["push_to_hub"], source=source_hub) as connected_hub:
        from rich.console import Console

        first_seed = recipe_seed(loaded_recipe, flags, directory) if seeds > 1 else 1
        variants = make_variants(values_by_key, folder=ABLATION, seed_count=seeds, first_seed=first_seed)
        contexts = []

        @contextlib.contextmanager
        def open_variant(variant: Variant) -> Iterator[tuple[RunContext, Publisher | None]]:
            context_fields = variant.context_fields(directory, flags)
            with (
                locked(context_fields["directory"]),
                open_run(loaded_recipe, hub=connected_hub, **context_fields, **options) as (variant_context, publisher),
            ):
                contexts.append(variant_context)
                yield variant_context, publisher

        outcomes = run_variants(directory, variants, open_variant, Console(stderr=True))
        path = write_overview(directory, loaded_recipe.name, outcomes)
        if as_json:
            click.echo(path.read_text(encoding="utf-8").rstrip())
            return
        own_run = read_own_outcome(directory, variants[0])  # this variant has the run's seed
        _show_figures("Held-out prompts, by β; KL in nats per completion", outcomes, own_run)
        _show_samples(Console(), outcomes)
        click.echo(f"The figures are in {path}, the curves in {path.with_suffix('.png')}.")
        if contexts[-1].publish:
            click.echo(f"\nTry next:\n  rlhf-zoo compare {outcomes[0].repo} --hub {connected_hub.label}")


def read_grid(options: Sequence[str], *, flags: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Parses the values of --grid.

    Args:
        options: The values of the option, such as ["kl_coef=0.02,0.05"].
        flags: The other flags of PPO.

    Returns:
        The values of each key, without repetitions.

    Raises:
        ZooError: A key is not a key of PPO, has a wrong value, or is given twice.
    """
    texts = dict(_split_grid_option(option) for option in options)
    if len(texts) < len(options):
        raise ZooError("--grid lists one key twice: write its values as one list.")
    for key in texts:
        _check_key(key, flags)
    from ..runs.settings.declared import refused_keys
    from ..runs.settings.values import coerce, convert_keys

    types, refused = _key_types(texts), refused_keys("ppo")
    grid: dict[str, list[Any]] = {key: [] for key in texts}
    for key, text in texts.items():
        for item in coerce(text, list[str]):
            value = convert_keys(
                {key: item.strip()}, types, "--grid", subject="the stage ppo", refused_names=refused, flag="--grid "
            )[key]
            if value not in grid[key]:
                grid[key].append(value)
    return grid


def _key_types(keys: Iterable[str]) -> dict[str, Any]:
    """Returns the types of PPO's keys. Imports their dataclass, which is slow, only if its source lacks a type."""
    from ..runs.settings.declared import declared_keys

    types = {key: entry.type_hint for key, entry in declared_keys("ppo").items()}
    if all(types[key] is not None for key in keys if key in types):  # `convert_keys` refuses the other keys
        return types
    from ..runs.settings.parse import stage_keys

    return {key: hint for key, (hint, _, _) in stage_keys("ppo").items()}


def _split_grid_option(option: str) -> tuple[str, str]:
    key, _, text = option.partition("=")
    if not key.strip() or not text.strip():
        raise ZooError(f"--grid is {option!r}: write KEY=VALUE,VALUE, such as kl_coef=0.02,0.05,0.1.")
    return key.strip().removeprefix("ppo.").replace("-", "_"), text


def _check_key(key: str, flags: Mapping[str, Any]) -> None:
    from ..runs.data.layout import HELD_OUT_KEYS

    if key.partition(".")[0] in STAGES:
        raise ZooError(f"--grid lists {key}, but all runs share one SFT policy and reward model: list keys of PPO.")
    if key in HELD_OUT_KEYS:
        raise ZooError(
            f"--grid lists {key}, which can change the rows that SFT learns from: list keys of PPO's training."
        )
    if key == "seed":
        raise ZooError("--grid lists seeds: set their number with --seeds instead.")
    if key in flags:
        raise ZooError(f"--ppo.{key} is given and --grid lists values of it: leave --ppo.{key} out.")


def read_penalties(text: str, *, flags: Mapping[str, Any]) -> dict[str, list[float]]:
    """Parses the value of --kl_coef, as a grid with this one key.

    Args:
        text: The value, such as "0,0.02,0.1".
        flags: The other flags of PPO.

    Raises:
        ZooError: An item is not a number, or is negative; or `flags` has kl_coef too.
    """
    from ..runs.settings.values import parse_numbers

    if "kl_coef" in flags:
        raise ZooError("--ppo.kl_coef is given and --kl_coef lists values: leave --ppo.kl_coef out.")
    return {"kl_coef": parse_numbers("--kl_coef", text, example="0,0.02,0.1")}


def _check_has_ppo(recipe: Recipe, verb: str) -> None:
    if "ppo" not in recipe.stages:
        raise ZooError(f"The recipe {recipe.name} has no stage ppo, so there is nothing to {verb}: give it a ppo.yaml.")


def _show_figures(title: str, outcomes: Sequence[Outcome], own_run: Outcome | None = None) -> None:
    """Prints a table of figures and verdicts, one row per setting, and then the probes that fire.

    Args:
        title: Title of the table.
        outcomes: The variants.
        own_run: The recipe's own run, for the last row.
    """
    from ..pipeline.experiments.runner import group_by_setting

    groups = group_by_setting(outcomes)
    if own_run is not None:
        [(setting, figures, group)] = group_by_setting([own_run])
        groups.append((f"{setting} *", figures, group))
    rows = []
    for setting, figures, group in groups:
        judgments = [outcome.judgment for outcome in group]
        win_rate = figures["win_rate"]
        rows.append(
            [
                setting.replace(", ", ",\n"),
                number_or_range(judgment["step"] for judgment in judgments),
                *(_over_seeds(figures[name]) for name in COLUMNS),
                interval(group[0].win_rate, digits=3) if len(group) == 1 else _over_seeds(win_rate, digits=3),
                verdict_cell(judgments),
            ]
        )
    print_table(title, ["setting", "step", *COLUMNS.values(), "win rate", "verdict"], rows)
    if own_run is not None:
        print_text("* The recipe's own run.")
    for outcome in outcomes:
        for judgment in filter(None, (outcome.judgment, outcome.judgment["at_last"])):
            if judgment["fired"]:
                families = ", ".join(judgment["fired"])
                print_text(f"{outcome.variant.label}, step {judgment['step']}: probes fire for {families}.")


def _show_samples(console: Console, outcomes: Sequence[Outcome]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="The same prompts and random numbers under each β", show_lines=True)
    for heading in ("prompt", *(outcome.variant.label for outcome in outcomes)):
        table.add_column(heading)
    for samples in zip(*(outcome.samples for outcome in outcomes), strict=True):  # of one prompt
        cells = [
            f"{escape(text)}\n[dim]reward {reward:.2f}, judge {judge:.2f}[/]" for _, text, reward, judge in samples
        ]
        table.add_row(escape(samples[0][0]), *cells)
    console.print(table)


def _over_seeds(figure: Spread, *, digits: int = 2) -> str:
    """Formats a mean over seeds with its 95% interval, or with the range of the seeds if they are few."""
    if figure.n == 1:
        return f"{figure.mean:.{digits}f}"
    low, high = (f"{end:.{digits}f}" for end in figure.ci95 or figure.range)
    return f"{figure.mean:.{digits}f} " + (f"[{low}, {high}]" if figure.ci95 else f"({low} to {high})")
