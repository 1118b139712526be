"""`rlhf-zoo sft|reward|ppo|run|doctor`: training, and the checks before it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ZooError
from ..modeling import distributed
from ..runs.registry import STAGES, Stage
from ..runs.settings.judge_names import check_judge_name
from .common import run_flags
from .open_run import publishing, run_context
from .options import FLAGS, LM_EVAL, json_option, run_options
from .plan import print_plan_line
from .tables import interval, print_json, table

if TYPE_CHECKING:
    from ..runs.context import RunContext


#: Labelers of further rounds that are not names of judges.
LABELS = ("gold", "judge")


def run_one(
    recipe: str, stage: str, flags: Mapping[str, Mapping[str, Any]], quietly: bool = False, **options: Any
) -> Path:
    """Runs one stage of a recipe and prints its result. With several processes, only the first one prints.

    Args:
        recipe: A name or a folder.
        stage: The stage's name, or "eval".
        flags: The flags by stage.
        quietly: Whether to print to stderr, for a command that prints JSON.
        **options: Options of `run_context`.

    Returns:
        The stage's directory.
    """
    distributed.join()
    with run_context(recipe, flags, **options) as (context, publisher):
        from ..pipeline.run_recipe import renew_cards, run_stage, summary_line

        # --restart applies to this stage only.
        context.check_recipe([name for name in STAGES if name != stage])
        for each_stage in STAGES:
            if context.flags[each_stage]:
                context.settings(each_stage)  # checks the flags of other stages too
        if stage == "ppo" and distributed.first():
            print_plan_line(context.recipe, context.flags, stage=stage, hub=context.hub)
        ran = run_stage(context, stage, publisher)
        if not distributed.first():
            return context.directory / stage
        if not ran:
            click.echo(f"{stage} is already finished in {context.directory}; --restart runs it again.", err=quietly)
        if publisher is not None:
            publisher.drain()
        if ran:
            renew_cards(context, stage)
        click.echo(f"{summary_line(context, stage)}\nIn {context.directory / stage}", err=quietly)
        return context.directory / stage


def stage_command(stage: Stage) -> click.Command:
    """Makes the command that runs one stage of a recipe.

    Args:
        stage: The stage.
    """

    @click.command(
        stage.name,
        context_settings=FLAGS,
        help=f"{stage.does}\n\nAny key of `rlhf-zoo recipes keys {stage.name}` is a flag too.\n\n"
        f"\b\nExample:\n  {stage.example}",
    )
    @click.argument("recipe")
    @run_options
    @click.pass_context
    def command(ctx: click.Context, recipe: str, **options: Any) -> None:
        run_one(recipe, stage.name, run_flags(ctx, recipe, stage=stage.name), **options)

    return command


@click.command(context_settings=FLAGS)
@click.argument("recipe")
@run_options
@json_option()
@click.pass_context
def doctor(ctx: click.Context, recipe: str, as_json: bool, **options: Any) -> None:
    """Run the guards of a recipe's PPO stage that need no training. Exit code 2 where one fails.

    It takes the flags of `rlhf-zoo ppo`, writes nothing into the run directory and publishes nothing.

    \b
    Example:
      rlhf-zoo doctor tiny-world --num_ppo_epochs 4
    """
    flags = run_flags(ctx, recipe, stage="ppo", names=False)
    with run_context(recipe, flags, read_only=True, writes=False, **options) as (context, _):
        from ..pipeline.inspect.doctor import examine
        from ..pipeline.inspect.examination import FAILED, SKIPPED
        from ..publishing.adapters import kept_here

        is_explicit = options["push_to_hub"] or options["hub"] is not None
        publishes = options["push_to_hub"] or context.hub.kind == "local"
        findings = examine(context, publishes=publishes and (is_explicit or kept_here(context) is None))
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        skipped = [finding for finding in findings if finding.status == SKIPPED]
        rows = [finding for finding in findings if finding not in skipped]
        table("", ["check", "", "result"], [[finding.check, finding.status, finding.detail] for finding in rows])
        for reason in dict.fromkeys(finding.detail for finding in skipped):
            click.echo(f"Skipped ({reason}): {', '.join(each.check for each in skipped if each.detail == reason)}.")
    if any(finding.status == FAILED for finding in findings):
        raise click.exceptions.Exit(2)


@click.command(context_settings=FLAGS)
@click.argument("recipe")
@run_options
@LM_EVAL
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of rounds of reward-model training and PPO. Later rounds also learn from samples of the last policy.",
)
@click.option(
    "--labels",
    help="Labeler for the new pairs: gold (`preference` of the reward stage), judge (the evaluation's), "
    "votes:NAMESPACE/NAME, or a judge as in `rlhf-zoo eval`.  [default: gold where the recipe has it, else judge]",
)
@click.option(
    "--round_pairs",
    "--round-pairs",
    type=click.IntRange(min=1),
    help="New pairs in each round.  [default: simulated_pairs of the reward stage, else 1000]",
)
@json_option("Print summary.json, or rounds.json, instead of tables.")
@click.pass_context
def run(
    ctx: click.Context,
    recipe: str,
    rounds: int,
    labels: str | None,
    round_pairs: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Run every stage of a recipe that is not finished, and show the results.

    A key of a stage is a flag with the stage in front, --ppo.kl_coef; a key of recipe.yaml is a flag by itself.

    \b
    Example:
      rlhf-zoo run tiny-world --seed 2 --ppo.kl_coef 0.2
      rlhf-zoo run tiny-world --rounds 2 --labels gold
    """
    round_options = {"--labels": labels, "--round_pairs": round_pairs}
    option = next((name for name, value in round_options.items() if value is not None), None)
    if rounds == 1 and option is not None:
        raise ZooError(f"{option} is for further rounds, and --rounds is 1: give --rounds 2, or leave it out.")
    if labels not in (None, *LABELS):
        check_judge_name(str(labels), also=LABELS)
    flags = run_flags(ctx, recipe)
    distributed.join()
    if rounds > 1 and distributed.count() > 1:
        raise ZooError("Further rounds run in one process: leave out --rounds, or start it without a launcher.")
    with run_context(recipe, flags, **options) as (context, publisher):
        from rich.console import Console

        from ..pipeline import run_recipe as pipeline

        console = Console(stderr=as_json)
        if distributed.first():
            print_plan_line(context.recipe, context.flags, hub=context.hub)
        if rounds > 1:
            from ..pipeline.experiments import rounds as further

            labels = further.check_labels(context, labels)
        path = pipeline.run(context, console, publisher)
        if path is None:  # the first process prints the results
            return
        if rounds > 1:
            open_publishing = partial(publishing, patience=options["patience"])
            runs = further.run_rounds(
                context, console, open_publishing, rounds=rounds, labels=str(labels), pairs=round_pairs
            )
            path, document = further.write_rounds(runs)
            if as_json:
                click.echo(path.read_text(encoding="utf-8").rstrip())
                return
            _show_rounds(document)
            click.echo(f"The figures are in {path}.")
            return
        if "ppo" in context.recipe.stages:
            if context.publish:
                pipeline.show(context, console)
            pipeline.verdict(context, console)
        if as_json:
            click.echo(path.read_text(encoding="utf-8").rstrip())
            return
        click.echo(f"Everything is in {context.directory}; the figures are in {path}.\n\nTry next:")
        for line in _next_steps(context):
            click.echo(f"  {line}")


def _show_rounds(rounds: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for row in rounds:
        pairs, accuracy, gain = row["pairs"], row["reward_model"].get("accuracy"), row["judge_minus_previous"]
        rows.append(
            [
                str(row["round"]),
                "" if pairs is None else f"{pairs['new']} and {pairs['old']} older, by {row['labels']}",
                "" if accuracy is None else f"{accuracy:.3f}",
                *(interval(row["figures"][name]) for name in ("reward", "judge", "kl")),
                interval(row["win_rate"], digits=3),
                (row["verdict"] or "none").partition(" (")[0],
                "" if gain is None else interval(gain, sign="+"),
            ]
        )
    columns = ["round", "pairs", "accuracy", "reward", "judge", "KL", "win rate", "verdict", "judge − round before"]
    table("PPO of each round on held-out prompts; KL in nats per completion, 95% intervals", columns, rows)


def _next_steps(context: RunContext) -> list[str]:
    # If it was installed by make, the program is not on the PATH.
    program = Path(sys.argv[0])
    not_on_path = program.name == "rlhf-zoo" and shutil.which(program.name) is None
    zoo = shlex.quote(os.path.relpath(program)) if not_on_path else "rlhf-zoo"
    hub = f" --hub {context.hub.label}"
    last = list(context.recipe.stages)[-1]
    card = f"{zoo} card {shlex.quote(str(context.directory / last))}"
    if not context.publish:
        return [card, f"{zoo} push {shlex.quote(str(context.directory))}{hub}"]
    repo = context.repo(last)
    compare = [f"{zoo} compare {repo}{hub}"] if last == "ppo" else []
    # If no checkpoint is recommended, there is no tag `best`, and `main` is the last checkpoint.
    no_best = (context.record(last).read().get("chosen") or {}).get("none")
    return [*compare, f"{zoo} pull {repo}{'' if no_best else '@best'}{hub}", card]
