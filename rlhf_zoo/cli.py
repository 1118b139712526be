"""The command line. Nothing heavy is imported before a command runs, and the Hub is settled before that."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import __version__
from .errors import ZooError

if TYPE_CHECKING:
    from .hub.connect import Hub
    from .recipes import Recipe
    from .stages.context import RunContext

__all__ = ["cli", "main"]

FLAGS = {"ignore_unknown_options": True, "allow_extra_args": True}


class Lazy(click.Group):
    """A group whose subgroup `hub` is imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), "hub"])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name == "hub":
            from .hub.server.cli import hub

            return hub
        return super().get_command(ctx, name)

    def resolve_command(self, ctx: click.Context, args: list[str]):
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            from .plugins import did_you_mean

            hint = did_you_mean(args[0], self.list_commands(ctx)) or "; `rlhf-zoo --help` lists the commands."
            raise ZooError(f"There is no command {args[0]!r}{hint}")
        return super().resolve_command(ctx, args)


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="rlhf-zoo")
def cli() -> None:
    """The RLHF model zoo: one recipe command a stage, every checkpoint on the Hub with its reward and KL.

    \b
    Example:
      rlhf-zoo run tiny-world
      rlhf-zoo pull local/tiny-world-ppo@best
    """


# Recipes


@cli.group()
def recipes() -> None:
    """List, show, copy and check recipes.

    \b
    Example:
      rlhf-zoo recipes list
    """


@recipes.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def recipes_list(as_json: bool) -> None:
    """The recipes that come with the package.

    \b
    Example:
      rlhf-zoo recipes list --json
    """
    from .recipes import list_recipes, load_recipe

    found = [load_recipe(name) for name in list_recipes()]
    rows: list[dict[str, Any]] = [
        {
            "name": recipe.name,
            "stages": list(recipe.stages),
            "simulated": bool(recipe.shared.get("simulated")),
            "description": str(recipe.shared.get("description", "")),
        }
        for recipe in found
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    _table("", ["recipe", "stages", "data", "description"], [
        [row["name"], " ".join(row["stages"]), "simulated" if row["simulated"] else "real", row["description"]]
        for row in rows
    ])  # fmt: skip


@recipes.command("show")
@click.argument("recipe")
def recipes_show(recipe: str) -> None:
    """Print a recipe's files.

    \b
    Example:
      rlhf-zoo recipes show tiny-world
    """
    from .recipes import load_recipe

    found = load_recipe(recipe)
    for name in ("recipe", *found.stages):
        path = found.source(name)
        click.echo(f"# {path.name}\n{path.read_text(encoding='utf-8').rstrip()}\n")


@recipes.command("copy")
@click.argument("recipe")
@click.argument("target", type=click.Path(path_type=Path))
def recipes_copy(recipe: str, target: Path) -> None:
    """Copy a recipe, to edit it.

    \b
    Example:
      rlhf-zoo recipes copy tiny-world my-recipe
    """
    from .recipes import copy_recipe

    click.echo(f"{copy_recipe(recipe, target)} is yours: edit it, then `rlhf-zoo run {shlex.quote(str(target))}`.")


@recipes.command("validate", context_settings=FLAGS)
@click.argument("recipe")
@click.pass_context
def recipes_validate(ctx: click.Context, recipe: str) -> None:
    """Check every key of a recipe, flags and the names of reward functions, without training.

    \b
    Example:
      rlhf-zoo recipes validate tiny-world --ppo.kl_coef 0.2
    """
    from .recipes import load_recipe
    from .stages.settings import recipe_config, stage_settings

    found = load_recipe(recipe)
    flags = _run_flags(ctx, recipe)
    recipe_config(found, flags["recipe"])
    for stage in found.stages:
        settings = stage_settings(found, stage, flags[stage], shared_flags=flags["recipe"], output_dir=Path("runs"))
        if stage == "ppo":
            from .stages.ppo import reward_functions

            reward_functions(settings)
    click.echo(f"{found.name} is valid: {', '.join(found.stages)}.")


@recipes.command("keys")
@click.argument("stage", type=click.Choice(["recipe", "sft", "reward", "ppo"]))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def recipes_keys(stage: str, as_json: bool) -> None:
    """Every key that a stage takes, in its YAML or as a flag.

    \b
    Example:
      rlhf-zoo recipes keys ppo
    """
    from .stages.settings import recipe_keys, stage_keys

    keys = recipe_keys() if stage == "recipe" else stage_keys(stage)
    rows = [
        [name, str(getattr(hint, "__name__", hint)), str(default), " ".join(help_text.split())]
        for name, (hint, default, help_text) in sorted(keys.items())
    ]
    if as_json:
        click.echo(
            json.dumps([dict(zip(("key", "type", "default", "help"), row, strict=True)) for row in rows], indent=2)
        )
        return
    _table(f"Keys of {stage}", ["key", "type", "default", "meaning"], rows)


# Training


def _run_options(command: Callable) -> Callable:
    options = [
        click.option(
            "--output_dir",
            "--output-dir",
            type=click.Path(path_type=Path),
            help="Run directory.  [default: runs/RECIPE]",
        ),
        click.option("--hub", help="'local' (the embedded Hub) or an address."),
        click.option("--push_to_hub", "--push-to-hub", is_flag=True, help="Publish; --hub local always gets all."),
        click.option("--namespace", help="Publish under this name.  [default: local, or the token's owner]"),
        click.option("--private", is_flag=True, help="Make repositories private."),
        click.option("--restart", is_flag=True, help="Forget what was done before and begin again."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _stage_command(stage: str, does: str, example: str) -> None:
    keys = "recipe" if stage == "eval" else stage

    @cli.command(
        stage,
        context_settings=FLAGS,
        help=f"{does}\n\nAny key of `rlhf-zoo recipes keys {keys}` is a flag too.\n\n\b\nExample:\n  {example}",
    )
    @click.argument("recipe")
    @_run_options
    @click.pass_context
    def command(ctx: click.Context, recipe: str, **options: Any) -> None:
        with _context(recipe, _run_flags(ctx, recipe, stage=stage), **options) as context:
            from .recipes import STAGES
            from .stages.pipeline import run_stage, said

            for named in STAGES:
                if context.flags[named]:
                    context.settings(named)  # a mistake in another stage's flags is one too
            if not run_stage(context, stage):
                click.echo(f"{stage} was finished before in {context.directory}; --restart does it again.")
            click.echo(f"{said(context, stage)}\nIn {context.directory / stage}")


_stage_command("sft", "Train the SFT policy of a recipe.", "rlhf-zoo sft tiny-world --num_train_epochs 2")
_stage_command("reward", "Train the reward model of a recipe.", "rlhf-zoo reward tiny-world --learning_rate 5e-4")
_stage_command("ppo", "Train the SFT policy of a recipe with PPO.", "rlhf-zoo ppo tiny-world --kl_coef 0.2")
_stage_command("eval", "Compare PPO with SFT on held-out prompts.", "rlhf-zoo eval tiny-world --evaluation.samples 2")


@cli.command(context_settings=FLAGS)
@click.argument("recipe")
@_run_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(ctx: click.Context, recipe: str, as_json: bool, **options: Any) -> None:
    """Run the guards of a recipe's PPO stage that need no training. Exit code 2 where one fails.

    It takes the flags of `rlhf-zoo ppo`, writes nothing into the run directory and publishes nothing.

    \b
    Example:
      rlhf-zoo doctor tiny-world --num_ppo_epochs 4
    """
    with _context(recipe, _run_flags(ctx, recipe, stage="ppo"), looking=True, **options) as context:
        from .stages.doctor import FAILED, examine

        findings = examine(context)
    if as_json:
        rows = [{"check": one.check, "status": one.status, "said": one.said} for one in findings]
        click.echo(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        _table("", ["check", "", "what was found"], [[one.check, one.status, one.said] for one in findings])
    if any(one.status == FAILED for one in findings):
        raise click.exceptions.Exit(2)


@cli.command("run", context_settings=FLAGS)
@click.argument("recipe")
@_run_options
@click.option("--json", "as_json", is_flag=True, help="Print summary.json at the end instead of tables.")
@click.pass_context
def run_command(ctx: click.Context, recipe: str, as_json: bool, **options: Any) -> None:
    """Run every stage of a recipe that is not finished, and show what came of it.

    A key of a stage is a flag with the stage before it; keys of recipe.yaml stand alone.

    \b
    Example:
      rlhf-zoo run tiny-world --seed 2 --ppo.kl_coef 0.2
    """
    with _context(recipe, _run_flags(ctx, recipe), **options) as context:
        from rich.console import Console

        from .stages import pipeline

        console = Console(stderr=as_json)
        path = pipeline.run(context, console)
        if "ppo" in context.recipe.stages:
            if context.publish:
                pipeline.show(context, console)
            pipeline.verdict(context, console)
        if as_json:
            click.echo(path.read_text().rstrip())
            return
        click.echo(f"Everything is in {context.directory}; the figures are in {path}.\n\nTry next:")
        for line in _next_steps(context):
            click.echo(f"  {line}")


def _next_steps(context: RunContext) -> list[str]:
    # Where make has installed it, the program is not on the PATH.
    program = Path(sys.argv[0])
    hidden = program.name == "rlhf-zoo" and shutil.which(program.name) is None
    zoo = shlex.quote(os.path.relpath(program)) if hidden else "rlhf-zoo"
    hub = f" --hub {context.hub.label}"
    last = list(context.recipe.stages)[-1]
    card = f"{zoo} card {shlex.quote(str(context.directory / last))}"
    if not context.publish:
        return [card, f"{zoo} push {shlex.quote(str(context.directory))}{hub}"]
    repo = context.repo(last)
    compare = [f"{zoo} compare {repo}{hub}"] if last == "ppo" else []
    return [*compare, f"{zoo} pull {repo}@best{hub}", card]


# Checkpoints


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="Describe the state at this step.  [default: the end]")
def card(run: Path, step: int | None) -> None:
    """Write the card of a stage's directory, or of each stage of a run, from that directory alone.

    \b
    Example:
      rlhf-zoo card runs/demo/ppo
    """
    from .hub.card import make_card

    for stage in _stage_directories(run):
        click.echo(str(make_card(stage, step=step)))


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--hub", help="'local' or an address.  [default: as for the training commands]")
@click.option("--namespace", help="Publish under this name.  [default: local, or the token's owner]")
@click.option("--private", is_flag=True, help="Make repositories private.")
def push(run: Path, hub: str | None, namespace: str | None, private: bool) -> None:
    """Send what a run saved and no Hub has yet, with its cards.

    \b
    Example:
      rlhf-zoo push runs/demo --hub local
    """
    stages = [stage for stage in _stage_directories(run) if stage.name in ("sft", "reward", "ppo")]
    from .record import StageRecord

    document = StageRecord(stages[0]).read()
    root = stages[0].parent
    from .recipes import Recipe

    with _context(
        Recipe(document["recipe"], root, {}, {}),
        {},
        output_dir=root,
        hub=hub,
        push_to_hub=True,
        namespace=namespace,
        private=private,
        restart=False,
    ) as context:
        from .stages.release import release_best, send_pending

        for stage in stages:
            finished = StageRecord(stage).read().get("status") == "finished"
            if finished:
                release_best(context, stage.name)
            elif left := send_pending(context, stage.name):
                raise ZooError(f"{len(left)} checkpoints of {stage} could not be sent: try again when the Hub answers.")
            repo = StageRecord(stage).read().get("repo") or {}
            click.echo(f"{context.repo(stage.name)}: {', '.join(repo.get('tags', {})) or 'nothing to send'}")


@cli.command()
@click.argument("repository")
@click.option("--output_dir", "--output-dir", type=click.Path(path_type=Path), help="Put the files here.")
@click.option("--hub", help="'local' or an address.")
def pull(repository: str, output_dir: Path | None, hub: str | None) -> None:
    """Fetch a checkpoint, REPOSITORY[@TAG], and print where it lies.

    \b
    Example:
      rlhf-zoo pull local/tiny-world-ppo@step-000040 --hub local
    """
    with _hub(hub, push_to_hub=False):
        from .hub.pull import pull as fetch

        click.echo(str(fetch(repository, output_dir)))


@cli.command()
@click.argument("ppo")
@click.option("--sft", help="The SFT model.  [default: from the PPO checkpoint's lineage]")
@click.option("--reward", help="The reward model.  [default: from the lineage]")
@click.option("--hub", help="'local' or an address.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Listen here.")
@click.option("--port", type=int, default=7860, show_default=True, help="Listen on this port; 0 takes a free one.")
def compare(ppo: str, sft: str | None, reward: str | None, hub: str | None, host: str, port: int) -> None:
    """Open the comparison page: SFT and PPO side by side, with rewards and KL.

    \b
    Example:
      rlhf-zoo compare local/tiny-world-ppo --hub local
    """
    with _hub(hub, push_to_hub=False):
        from .stages.compare import launch

        try:
            launch(ppo, sft=sft, reward=reward, host=host, port=port)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(130) from None  # how a page ends: nothing is left to go on with


@cli.command()
@click.argument("run", metavar="RUN|REPO")
@click.option("--prompt", required=True, help="The text that the completion goes on from.")
@click.option("--stage", type=click.Choice(["ppo", "sft"]), default="ppo", help="'sft' is --step 0.")
@click.option("--step", type=click.IntRange(min=0), help="The checkpoint; 0 is where PPO began.  [default: the last]")
@click.option("--revision", help="The tag or commit of a repository; REPO@TAG says the same.")
@click.option("--old", help="What ratios are against: a step, folder or repository.  [default: the checkpoint before]")
@click.option("--sft", help="The reference.  [default: the run's SFT model]")
@click.option("--reward", help="The reward model.  [default: the run's]")
@click.option("--reward_funcs", "--reward-funcs", multiple=True, help="Import this reward function that REPO names.")
@click.option("--columns", help='The prompt\'s other columns for reward functions, as JSON: \'{"answer": "4"}\'.')
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Of the random stream.")
@click.option("--temperature", type=float, help="[default: the run's]")
@click.option("--max_new_tokens", "--max-new-tokens", type=click.IntRange(min=1), help="[default: the run's]")
@click.option("--hub", help="'local' or an address.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the tokens, and totals.")
def trace(
    run: str,
    prompt: str,
    stage: str,
    step: int | None,
    columns: str | None,
    hub: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Sample one completion of a PPO checkpoint, and show what PPO makes of each token.

    log π, log π_ref, KL, reward, value, δ and advantage (before whitening), and the ratio to the checkpoint before.

    \b
    Example:
      rlhf-zoo trace runs/demo --prompt "the battery" --step 20
    """
    if stage == "sft":
        if step:
            raise ZooError(f"--stage sft is step 0, and --step {step} is given too: give one of them.")
        step = 0
    others = _columns(columns)
    found_by = {name: given.pop(name) for name in ("revision", "old", "sft", "reward")}
    with _hub(hub, push_to_hub=False):
        from .stages import trace as tracing

        subject = tracing.find(run, step=step, **found_by)
        found = tracing.trace_checkpoint(subject, prompt, columns=others, **given)
        if as_json:
            click.echo(json.dumps(tracing.document(found, subject), indent=2, ensure_ascii=False))
            return
        from rich.console import Console

        console = Console()
        # A file or a pipe has no width of its own to keep.
        tracing.show(found, subject, console if console.is_terminal else Console(width=max(console.width, 120)))


def _columns(text: str | None) -> dict[str, Any]:
    try:
        columns = json.loads(text) if text is not None else {}
    except ValueError as error:
        raise ZooError(f"--columns is {text!r}, which is not JSON ({error}): write '{{\"name\": value}}'.") from error
    if not isinstance(columns, dict):
        raise ZooError(f"--columns is {text!r}, which is no JSON object: write '{{\"name\": value}}'.")
    return columns


# Machinery


def _stage_directories(run: Path) -> list[Path]:
    """RUN itself if it is a stage's directory, else those of its stages."""
    if (run / "run.json").is_file():
        return [run]
    found = [run / stage for stage in ("sft", "reward", "ppo") if (run / stage / "run.json").is_file()]
    if not found:
        raise ZooError(f"{run} is no run directory: it holds no run.json and no stage that does; give runs/RECIPE.")
    return found


def _run_flags(ctx: click.Context, recipe: str, *, stage: str | None = None) -> dict[str, dict[str, Any]]:
    """Flags by stage, with those of recipe.yaml under 'recipe'. For one stage's command a bare key is that stage's."""
    from .stages.settings import parse_flags, recipe_keys

    if recipe.startswith("-"):
        raise ZooError(f"{recipe} stands before the recipe: write `{ctx.command_path} RECIPE {recipe} ...`.")
    flags = parse_flags(ctx.args)
    bare = flags.pop("")
    shared = recipe_keys()
    flags["recipe"] = {key: value for key, value in bare.items() if key in shared or stage in (None, "eval")}
    if stage not in (None, "eval"):
        flags[stage] = {**flags[stage], **{key: value for key, value in bare.items() if key not in shared}}
    return flags


@contextlib.contextmanager
def _hub(flag: str | None, *, push_to_hub: bool) -> Iterator[Hub]:
    from .hub.connect import choose, connect

    with connect(choose(flag, push_to_hub=push_to_hub)) as hub:
        click.echo(f"Hub: {hub.described}", err=True)
        yield hub


@contextlib.contextmanager
def _context(
    recipe: str | Recipe,
    flags: Mapping[str, Mapping[str, Any]],
    *,
    output_dir: Path | None,
    hub: str | None,
    push_to_hub: bool,
    namespace: str | None,
    private: bool,
    restart: bool,
    looking: bool = False,
) -> Iterator[RunContext]:
    """looking: nothing is published, whatever the flags say."""
    from .recipes import is_repository_name, load_recipe

    found = load_recipe(recipe) if isinstance(recipe, str) else recipe
    if namespace is not None and not is_repository_name(namespace):
        raise ZooError(f"--namespace is {namespace!r}, and no Hub has such: give the name of a user or organization.")
    directory = output_dir or Path("runs") / found.name
    for folder in (directory, *directory.parents):
        if folder.exists() and not folder.is_dir():
            raise ZooError(f"{folder} is a file, so no run can be kept in it: give another --output_dir.")
    with _hub(hub, push_to_hub=push_to_hub) as connected:
        from huggingface_hub.utils import logging

        from .hub.publish import check_access
        from .stages.context import RunContext

        logging.set_verbosity_error()  # it warns of every commit that would change nothing
        publish = push_to_hub or connected.kind == "local"
        if publish:
            namespace = check_access(
                namespace or ("local" if connected.kind == "local" else None), token_from=connected.token_from
            )
            publish = not looking
        if publish:
            click.echo(f"Publishing to {namespace}/{found.name}-*", err=True)
        else:
            click.echo(f"Nothing is published{'.' if looking else ': --push_to_hub would.'}", err=True)
        yield RunContext(
            recipe=found,
            directory=directory,
            hub=connected,
            namespace=namespace or "local",
            publish=publish,
            restart=restart,
            overwrite=restart,
            command=shlex.join(["rlhf-zoo", *sys.argv[1:]]),
            flags=flags,
            private=private,
        )


def _table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title or None, box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)


def _sentence(error: click.ClickException) -> str:
    """What click says in one or two sentences, as one that names the mend."""
    first, _, rest = error.format_message().partition(". ")
    said = first + (f", {rest[0].lower()}{rest[1:]}" if rest else "")
    if said.endswith("?"):
        return said
    command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "rlhf-zoo"
    return f"{said.rstrip('.')}: see `{command} --help`."


def main() -> None:
    """Exit codes: 0; 2 the user's to mend; 1 a defect (with its traceback); 130 after Ctrl-C."""
    if not sys.warnoptions:
        # What libraries tell their developers, and that this machine has no accelerator, are no user's concern.
        for category, message in ((DeprecationWarning, ""), (FutureWarning, ""), (UserWarning, ".*pin_memory")):
            warnings.filterwarnings("ignore", message, category)
    try:
        code = cli.main(prog_name="rlhf-zoo", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except ZooError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        click.echo(f"Error: {_sentence(error)}", err=True)
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        click.echo("Interrupted; the same command goes on from what is saved.", err=True)
        sys.exit(130)
    except Exception as error:
        from .hub.refusals import is_disk_full

        if not is_disk_full(error):
            raise
        where = getattr(error, "filename", None) or "while writing"
        click.echo(f"Error: The disk is full ({where}): make room and run it again.", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
