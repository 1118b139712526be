"""`rlhf-zoo new`: a recipe for a model and data of one's own."""

import contextlib
import os
import shlex
from pathlib import Path
from typing import Any

import click

from .common import SOURCE_HUB, TRUST, UserPath, columns_of, quiet_hub
from .open_run import settle_hub


@click.command()
@click.argument("folder", metavar="DIR", type=UserPath())
@click.option("--model", required=True, help="The model to start from: a folder, or NAMESPACE/NAME[@REVISION].")
@click.option("--preferences", help="Data with chosen and rejected answers, for SFT and the reward model.")
@click.option("--prompts", help="Prompts for PPO.  [default: those of --preferences]")
@click.option("--texts", help="What SFT learns from.  [default: chosen answers, or those of --prompts]")
@click.option(
    "--reward",
    "rewards",
    multiple=True,
    help="A reward function, or another reward model in place of one's own; may be given several times.",
)
@click.option("--columns", help="What the data call their columns, as YAML: '{prompt: question, chosen: better}'.")
@click.option("--judge", help="Who compares PPO with SFT, as `rlhf-zoo eval --judge` takes it.")
@click.option(
    "--memory", type=click.FloatRange(min=0, min_open=True), help="Of the GPU, GiB.  [default: this one's, else 24]"
)
@SOURCE_HUB
@TRUST
def new(folder: Path, columns: str | None, memory: float | None, source_hub: str | None, **asked: Any) -> None:
    """Write a recipe for a model and data of your own, after a look at their files. Nothing is trained.

    It says what it took, and why. No weights are downloaded. Data are folders, files of JSON lines, or names of the Hub
    with or without @REVISION.

    \b
    Example:
      rlhf-zoo new mine --model Qwen/Qwen3-0.6B --preferences trl-lib/ultrafeedback_binarized
    """
    from ..pipeline.new.request import RecipeRequest, check_folder

    named = {} if columns is None else columns_of(columns, example="{chosen: better}")
    wish = RecipeRequest(**asked, gib=memory, columns=named)
    check_folder(folder)
    wish.check()  # before what takes seconds to import

    from ..modeling.remote_code import FLAG, is_trusted
    from ..pipeline.new.recipe import draft, write

    here = source_hub in (None, "none")
    quiet_hub()
    with contextlib.nullcontext() if here else settle_hub(source_hub, push_to_hub=False, option="--source_hub"):
        made = draft(wish, title=os.path.basename(os.path.abspath(folder)))
        write(made, folder)
    for what, taken, why in made.said:
        click.echo(f"{what}: {taken} ({why})")
    click.echo(made.plan.line)
    name = shlex.quote(str(folder)) + (f" --source_hub {shlex.quote(source_hub)}" if source_hub else "")
    name += f" {FLAG}" if is_trusted() else ""
    click.echo(f"\n{folder} holds {', '.join(made.files)}. Try next:\n  rlhf-zoo doctor {name}\n  rlhf-zoo run {name}")
