"""`rlhf-zoo sft|reward|ppo|run|doctor`: trains the stages of a recipe, and checks them beforehand."""

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
from ..runs.status_line import show_activity
from .common import loading, read_flags
from .layout import RecipeCommand
from .open_run import publishing, run_context
from .options import LM_EVAL, RECIPE, json_option, run_options
from .plan import print_plan_line
from .tables import interval, print_json, print_table, verdict_cell

if TYPE_CHECKING:
    from ..runs.context import RunContext


#: Values of --labels that do not name a judge.
BUILTIN_LABELERS = ("gold", "judge")


def run_single_stage(
    recipe: str, stage: str, flags: Mapping[str, Mapping[str, Any]], to_stderr: bool = False, **options: Any
) -> Path:
    """Runs one stage of a recipe. The main process prints the result.

    Args:
        recipe: A name or a folder.
        stage: The stage's name, or "eval".
        flags: The flags by stage.
        to_stderr: Whether to print to stderr, for a command that prints JSON.
        **options: Options of `run_context`.

    Returns:
        The stage's directory.
    """
    distributed.join()
    with run_context(recipe, flags, **options) as (context, publisher):
        with loading("loading the trainer"):
            from ..pipeline.run_recipe import run_stage, summary_line, update_cards

        # --restart discards only this stage, so the other stages must belong to this recipe.
        context.check_recipe([name for name in STAGES if name != stage])
        for name in STAGES:
            if context.flags[name]:
                context.settings(name)  # raises ZooError for a wrong flag of any stage
        if stage == "ppo" and distributed.is_main_process():
            print_plan_line(context.recipe, context.flags, stage=stage, hub=context.hub)
        has_run = run_stage(context, stage, publisher)
        if not distributed.is_main_process():
            return context.directory / stage
        if not has_run:
            click.echo(f"{stage} is already finished in {context.directory}; --restart runs it again.", err=to_stderr)
        if publisher is not None:
            publisher.drain()
        if has_run:
            update_cards(context, stage)
        click.echo(f"{summary_line(context, stage)}\nRun directory: {context.directory / stage}", err=to_stderr)
        return context.directory / stage


def stage_command(stage: Stage) -> click.Command:
    """Makes the command that runs one stage of a recipe.

    Args:
        stage: The stage.
    """

    @click.command(
        stage.name,
        cls=RecipeCommand,
        help=f"{stage.summary}\n\nAny key that `rlhf-zoo recipes keys {stage.name}` lists is a flag too.\n\n"
        f"\b\nExample:\n  {stage.example}",
    )
    @RECIPE
    @run_options
    @click.pass_context
    def command(ctx: click.Context, recipe: str, **options: Any) -> None:
        run_single_stage(recipe, stage.name, read_flags(ctx, recipe, stage=stage.name), **options)

    return command


@click.command(cls=RecipeCommand)
@RECIPE
@run_options
@json_option()
@click.pass_context
def doctor(ctx: click.Context, recipe: str, as_json: bool, **options: Any) -> None:
    """Run every check of PPO that needs no training.

    The exit code is 2 if a check fails. This command takes the flags of `rlhf-zoo ppo`, writes nothing into the run
    directory and publishes nothing.

    \b
    Example:
      rlhf-zoo doctor tiny-world --num_ppo_epochs 4
    """
    flags = read_flags(ctx, recipe, stage="ppo", check_names=False)
    with run_context(recipe, flags, never_publish=True, writes=False, **options) as (context, _):
        with loading("loading the checks"):
            from ..pipeline.inspect.doctor import examine
            from ..pipeline.inspect.examination import FAILED, SKIPPED
            from ..publishing.adapters import reason_not_to_publish

        # Whether `rlhf-zoo ppo` with these flags would publish, by the rules of `open_run`.
        publishes = options["push_to_hub"] or context.hub.kind == "local"
        if not options["push_to_hub"] and options["hub"] is None:
            publishes = publishes and reason_not_to_publish(context) is None
        with show_activity(f"checking {context.recipe.name}"):
            findings = examine(context, publishes=publishes)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        skipped = [finding for finding in findings if finding.status == SKIPPED]
        rows = [[finding.check, finding.status, finding.detail] for finding in findings if finding not in skipped]
        print_table("", ["check", "", "result"], rows)
        for reason in dict.fromkeys(finding.detail for finding in skipped):
            click.echo(
                f"Skipped ({reason}): {', '.join(finding.check for finding in skipped if finding.detail == reason)}."
            )
    if any(finding.status == FAILED for finding in findings):
        raise click.exceptions.Exit(2)


@click.command(cls=RecipeCommand)
@RECIPE
@run_options
@LM_EVAL
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of rounds of reward-model training and PPO. From round 2 on, the reward model also trains on labeled "
    "pairs sampled from the previous round's policy.",
)
@click.option(
    "--labels",
    "labeler",
    help="Labeler of the new pairs: gold (`preference` of the reward stage), judge (the judge of the evaluation), "
    "votes:NAMESPACE/NAME, or a judge as in `rlhf-zoo eval`.  [default: gold if the recipe has it, else judge]",
)
@click.option(
    "--round_pairs",
    "--round-pairs",
    type=click.IntRange(min=1),
    help="Number of new pairs in each round.  [default: simulated_pairs of the reward stage, else 1000]",
)
@json_option("Print summary.json, or rounds.json, instead of tables.")
@click.pass_context
def run(
    ctx: click.Context,
    recipe: str,
    rounds: int,
    labeler: str | None,
    round_pairs: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Run every unfinished stage of a recipe, and show the results.

    Override any key of a stage with --STAGE.KEY VALUE (--ppo.kl_coef 0.2), and any key of recipe.yaml with --KEY VALUE.

    \b
    Example:
      rlhf-zoo run tiny-world --seed 2 --ppo.kl_coef 0.2
      rlhf-zoo run tiny-world --rounds 2 --labels gold
    """
    for option, value in {"--labels": labeler, "--round_pairs": round_pairs}.items():
        if rounds == 1 and value is not None:
            raise ZooError(f"{option} needs --rounds 2 or more: set --rounds, or leave {option} out.")
    if labeler is not None and labeler not in BUILTIN_LABELERS:
        check_judge_name(labeler, words=BUILTIN_LABELERS)
    flags = read_flags(ctx, recipe)
    distributed.join()
    if rounds > 1 and distributed.process_count() > 1:
        raise ZooError(
            "--rounds above 1 runs in one process only: leave it out, or run without accelerate launch or torchrun."
        )
    with run_context(recipe, flags, **options) as (context, publisher):
        from rich.console import Console

        with loading("loading the trainer"):
            from ..pipeline import run_recipe

        console = Console(stderr=as_json)
        if distributed.is_main_process():
            print_plan_line(context.recipe, context.flags, hub=context.hub)
        if rounds > 1:
            from ..pipeline.experiments.rounds import check_labeler, run_rounds, write_rounds

            labeler = check_labeler(context, labeler)
        summary_path = run_recipe.run(context, console, publisher)
        if summary_path is None:  # only the main process prints the results
            return
        if rounds > 1:
            open_publishing = partial(publishing, patience=options["patience"])
            runs = run_rounds(
                context, console, open_publishing, round_count=rounds, labeler=str(labeler), pair_count=round_pairs
            )
            rounds_file, rounds_results = write_rounds(runs)
            if as_json:
                click.echo(rounds_file.read_text(encoding="utf-8").rstrip())
                return
            _show_rounds(rounds_results)
            click.echo(f"The metrics are in {rounds_file}.")
            return
        if "ppo" in context.recipe.stages:
            if context.publish:
                run_recipe.show_published(context, console)
            run_recipe.print_headline(context, console)
        if as_json:
            click.echo(summary_path.read_text(encoding="utf-8").rstrip())
            return
        click.echo(f"Everything is in {context.directory}; the metrics are in {summary_path}.\n\nTry next:")
        for line in _next_steps(context):
            click.echo(f"  {line}")


def _show_rounds(rounds: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for result in rounds:
        pairs, accuracy, gain = result["pairs"], result["reward_model"].get("accuracy"), result["judge_minus_previous"]
        rows.append(
            [
                str(result["round"]),
                "" if pairs is None else f"{pairs['new']} and {pairs['old']} older,\nby {result['labels']}",
                "" if accuracy is None else f"{accuracy:.3f}",
                str(result["step"]),
                *(interval(result["figures"][name]) for name in ("reward", "judge", "kl")),
                interval(result["win_rate"], digits=3),
                verdict_cell([result]),
                "" if gain is None else interval(gain, sign="+"),
            ]
        )
    headings = ["round", "pairs", "accuracy", "step", "reward", "judge", "KL", "win rate", "verdict"]
    title = "PPO of each round on held-out prompts; KL in nats per completion, 95% intervals"
    print_table(title, [*headings, "Δ judge vs. round before"], rows)


def _next_steps(context: RunContext) -> list[str]:
    from ..runs.checkpoint_choice import chosen_is_best

    # In an environment that `make` built, rlhf-zoo may not be on the PATH.
    script = Path(sys.argv[0])
    is_off_path = script.name == "rlhf-zoo" and shutil.which(script.name) is None
    program = shlex.quote(os.path.relpath(script)) if is_off_path else "rlhf-zoo"
    hub = f" --hub {context.hub.label}"
    last_stage = list(context.recipe.stages)[-1]
    card = f"{program} card {shlex.quote(str(context.directory / last_stage))}"
    if not context.publish:
        return [card, f"{program} push {shlex.quote(str(context.directory))}{hub}"]
    repo = context.repo(last_stage)
    compare = [f"{program} compare {repo}{hub}"] if last_stage == "ppo" else []
    revision = "@best" if chosen_is_best(context.record(last_stage)) else ""
    return [*compare, f"{program} pull {repo}{revision}{hub}", card]
