"""`rlhf-zoo new`: writes a recipe for a model and data of your own."""

import contextlib
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ..errors import printable
from ..runs.status_line import show_activity
from .common import loading, parse_columns, quiet_hub
from .layout import Command
from .open_run import open_hub
from .options import ONLY_SOURCE_HUB, TRUST, UserPath


@click.command(cls=Command)
@click.argument("folder", metavar="DIR", type=UserPath())
@click.option(
    "--model", required=True, help="The model to start from: a folder, a GGUF file, or NAMESPACE/NAME[@REVISION]."
)
@click.option("--preferences", help="Data with chosen and rejected answers, for SFT and the reward model.")
@click.option("--prompts", help="Prompts for PPO.  [default: the prompts of --preferences]")
@click.option(
    "--texts",
    help="Texts that SFT learns from.  [default: the chosen answers, or the answers of --prompts; without answers, "
    "PPO starts from a chat model]",
)
@click.option(
    "--reward",
    "rewards",
    multiple=True,
    help="A reward function, or a reward model to use instead of training one; may be repeated.",
)
@click.option(
    "--columns",
    help="Names of the data's columns, as YAML: '{prompt: question, chosen: better}'. The name \"{text:8 words}\" is "
    "the first 8 words of the column text.",
)
@click.option("--judge", help="Judge that compares PPO with SFT, as for `rlhf-zoo eval --judge`.")
@click.option(
    "--memory",
    type=click.FloatRange(min=0, min_open=True),
    help="Memory of the GPU in GiB.  [default: the memory of this machine's GPU, or of the machine if it has none]",
)
@ONLY_SOURCE_HUB
@TRUST
def new(folder: Path, columns: str | None, memory: float | None, source_hub: str | None, **options: Any) -> None:
    """Write a recipe for a model and data of your own.

    The command reads the files of the model and the data, and prints each choice with its reason. It trains nothing
    and downloads no weights. Data are folders, files of JSON lines, or repositories NAMESPACE/NAME[@REVISION].

    \b
    Example:
      rlhf-zoo new mine --model Qwen/Qwen3-0.6B \\
        --preferences trl-lib/ultrafeedback_binarized
      rlhf-zoo new mine --model chat.gguf --prompts q.jsonl --reward numeric_match
    """
    from ..pipeline.new.request import RecipeRequest, check_folder

    column_names = {} if columns is None else parse_columns(columns, example="{chosen: better}")
    request = RecipeRequest(**options, gib=memory, columns=column_names)
    check_folder(folder)
    request.check()  # before imports that take seconds

    from ..hub.client.connect import DEFAULT_HUB, SOURCE_FLAG
    from ..hub.client.refusals import check_reachable
    from ..modeling.remote_code import TRUST_CODE_FLAG, is_code_trusted

    is_default = source_hub in (None, "none")  # then the model and the data come from huggingface_hub's own Hub
    quiet_hub()
    with contextlib.nullcontext() if is_default else open_hub(source_hub, flag=SOURCE_FLAG):
        if request.first_hub_name is not None:
            check_reachable(replace(DEFAULT_HUB, flag=SOURCE_FLAG), request.first_hub_name)
        with loading("loading the planner"):
            from ..pipeline.new.recipe import make_recipe, write
        with show_activity("reading the model and the data"):
            recipe = make_recipe(request, title=os.path.basename(os.path.abspath(folder)))
        write(recipe, folder)
    for setting, value, reason in recipe.decisions:
        # Values come from the data and the tokenizer, so a value with a newline must not look like another setting.
        click.echo(printable(" ".join(f"{setting}: {value} ({reason})".split("\n"))))
    click.echo(recipe.plan.line)
    arguments = shlex.quote(str(folder))
    arguments += f" {SOURCE_FLAG} {shlex.quote(source_hub)}" if source_hub else ""
    arguments += f" {TRUST_CODE_FLAG}" if is_code_trusted() else ""
    gpu = "" if memory is None else f" --gpu {memory:g}gb"
    click.echo(
        f"\n{folder} holds {', '.join(recipe.files)}. Try next:\n"
        f"  rlhf-zoo plan {arguments}{gpu}  # the memory of each stage, and the time if it is known\n"
        f"  rlhf-zoo doctor {arguments}\n"
        f"  rlhf-zoo run {arguments}"
    )
