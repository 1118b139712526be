"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from .layout import RunOption


def with_options(*options: Callable) -> Callable:
    """Combines several decorators into one, for a group of options.

    Args:
        *options: The decorators, in the order of `--help`.
    """

    def decorate(command: Callable) -> Callable:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _complete_recipe(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from ..runs.recipe import list_recipes

    return [name for name in list_recipes() if name.startswith(incomplete)]


#: The argument RECIPE, a name or a folder.
RECIPE = click.argument("recipe", shell_complete=_complete_recipe)


class UserPath(click.Path):
    """A path that is not empty. An unset shell variable expands to "", which would mean the current folder."""

    def __init__(self, **options: Any) -> None:
        super().__init__(path_type=Path, **options)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty", param, ctx)
        return super().convert(value, param, ctx)


OVERWRITE = click.option(
    "--overwrite_repo",
    "--overwrite-repo",
    cls=RunOption,
    is_flag=True,
    help="Publish even if a repository belongs to another run, and replace its content.",
)

#: The key in a click context's `meta` for the value of --lm_eval, which is short for --evaluation.lm_eval.
LM_EVAL_TASKS = "rlhf_zoo.lm_eval"


def _store_tasks(ctx: click.Context, _: click.Parameter, tasks: str | None) -> None:
    ctx.meta[LM_EVAL_TASKS] = tasks


LM_EVAL = click.option(
    "--lm_eval",
    "--lm-eval",
    metavar="TASKS",
    expose_value=False,
    callback=_store_tasks,
    help="Also measure SFT and PPO on tasks of lm-evaluation-harness (if installed): TASK,TASK or YAML files.",
)


def _source_hub(title: str) -> Callable:
    return click.option(
        "--source_hub",
        "--source-hub",
        cls=RunOption,
        envvar="RLHF_ZOO_SOURCE_HUB",
        help=f"{title}: an address, 'local' or 'none'.  [default: HF_ENDPOINT, else the Hugging Face Hub]",
    )


SOURCE_HUB = _source_hub("Hub for models and data that --hub does not have")
#: For a command that reads from this Hub alone, and therefore has no --hub.
ONLY_SOURCE_HUB = _source_hub("Hub of models and data")


def _enter_if_set(module: str, name: str) -> Callable[[click.Context, click.Parameter, bool], None]:
    """Makes the callback of a flag: if the flag is set, a module's context manager is open until the command ends."""

    def enter(ctx: click.Context, _: click.Parameter, is_set: bool) -> None:
        if is_set:
            ctx.with_resource(getattr(import_module(module, __package__), name)())

    return enter


TRUST = click.option(
    "--trust_remote_code",
    "--trust-remote-code",
    cls=RunOption,
    is_flag=True,
    expose_value=False,
    callback=_enter_if_set("..modeling.remote_code", "allow_remote_code"),
    help="Let models run the code in their repositories. Read that code first. No recipe can set this for you.",
)
TRUST_RUN = click.option(
    "--trust_run",
    "--trust-run",
    cls=RunOption,
    is_flag=True,
    expose_value=False,
    callback=_enter_if_set("..hub.client.run_signature", "trust_all_runs"),
    help="Use the code and addresses in a run directory that your rlhf-zoo did not write.",
)


def _hub_option(default: str) -> Callable:
    text = f"The Hub: 'local' (the embedded Hub) or an address.  [default: {default}]"
    return click.option("--hub", cls=RunOption, help=text)


HUB = _hub_option("HF_ENDPOINT, else local")
#: For a command that publishes whenever it runs.
PUBLISHING_HUB = _hub_option("HF_ENDPOINT, else the Hugging Face Hub (given a token), else local")
OUTPUT_DIR = click.option(
    "--output_dir",
    "--output-dir",
    cls=RunOption,
    type=UserPath(),
    help="Run directory.  [default: runs/RECIPE]",
)
PRIVATE = click.option("--private", cls=RunOption, is_flag=True, help="Make new repositories private.")
PATIENCE = click.option(
    "--patience",
    cls=RunOption,
    type=click.FloatRange(min=0),
    help="Seconds to keep trying at the end if the Hub fails.  [default: 180]",
)

#: The other runs that the comparison page shows.
ABLATION = click.option(
    "--ablation",
    "runs",
    metavar="REPO",
    multiple=True,
    help="Another run from the same SFT checkpoint; may be repeated. To show no other run, pass PPO again.  [default: "
    "the runs in PPO's namespace]",
)
#: Options that replace models of a PPO checkpoint's lineage.
lineage_options = with_options(
    click.option("--sft", help="The SFT model.  [default: the one in the PPO checkpoint's lineage]"),
    click.option("--reward", help="The reward model.  [default: the one in the PPO checkpoint's lineage]"),
)


def json_option(text: str = "Print JSON.") -> Callable:
    """Makes the option --json.

    Args:
        text: The help text.
    """
    return click.option("--json", "as_json", is_flag=True, help=text)


def namespace_option(text: str, *, default: str = "local, or the token's owner") -> Callable:
    """Makes the option --namespace.

    Args:
        text: The help text.
        default: The default, as the help describes it.
    """
    return click.option("--namespace", cls=RunOption, help=f"{text}  [default: {default}]")


NAMESPACE = namespace_option(
    "User or organization to publish under.", default="the run's namespace, else local, or the token's owner"
)
#: Options of a command that trains or checks a recipe's run, and may publish it.
run_options = with_options(
    OUTPUT_DIR,
    _hub_option("HF_ENDPOINT, else the Hugging Face Hub (given a token and --push_to_hub), else local"),
    SOURCE_HUB,
    click.option(
        "--push_to_hub",
        "--push-to-hub",
        cls=RunOption,
        is_flag=True,
        help="Publish the run. To the embedded Hub, a run is always published.",
    ),
    NAMESPACE,
    PRIVATE,
    PATIENCE,
    click.option(
        "--resume",
        cls=RunOption,
        type=click.Choice(["auto"]),
        help="auto, the default: resume from the newest complete checkpoint, else start at step 0.",
    ),
    click.option(
        "--restart", cls=RunOption, is_flag=True, help="Discard what this command has made so far, and start again."
    ),
    OVERWRITE,
    TRUST,
    TRUST_RUN,
)


def unpublished_run_options(restart_help: str) -> Callable:
    """Makes the options of a command that trains beside a recipe's run and publishes nothing.

    Args:
        restart_help: The help text of --restart.
    """
    restart = click.option("--restart", cls=RunOption, is_flag=True, help=restart_help)
    return with_options(OUTPUT_DIR, HUB, SOURCE_HUB, TRUST, TRUST_RUN, restart)


def seeds_option(text: str, *, minimum: int = 1, default: int | None = 1) -> Callable:
    """Makes the option --seeds.

    Args:
        text: The help text.
        minimum: The smallest number of seeds.
        default: The default; None if the command chooses the default.
    """
    return click.option(
        "--seeds", type=click.IntRange(min=minimum), default=default, show_default=default is not None, help=text
    )
