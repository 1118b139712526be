"""What commands share: the Hub, the run's context, flags, tables."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ZooError, printable
from ..modeling import distributed
from ..runs.registry import STAGES

if TYPE_CHECKING:
    from rich.console import Console

    from ..hub.client.connect import Hub
    from ..runs.context import Publisher, RunContext
    from ..runs.recipe import Recipe

# What a reader copies stays on one line.
COPIED = ("revision", "commit", "date", "key", "model", "repository", "step")
# Letters of a word that a table never breaks.
SHORT = 16
FLAGS = {"ignore_unknown_options": True, "allow_extra_args": True}


class UserPath(click.Path):
    """A path; not an empty one, as an unset variable of the shell leaves it, which would mean the folder one is in."""

    def __init__(self, **options: Any) -> None:
        super().__init__(path_type=Path, **options)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty", param, ctx)
        return super().convert(value, param, ctx)


OVERWRITE = click.option(
    "--overwrite_repo",
    "--overwrite-repo",
    is_flag=True,
    help="Publish also where a repository is another run's, which this one then replaces.",
)


#: In a command's context: the tasks that --lm_eval named, which is short for --evaluation.lm_eval.
TASKS = "rlhf_zoo.lm_eval"


def _note_tasks(ctx: click.Context, _: click.Parameter, tasks: str | None) -> None:
    ctx.meta[TASKS] = tasks


LM_EVAL = click.option(
    "--lm_eval",
    "--lm-eval",
    metavar="TASKS",
    expose_value=False,
    callback=_note_tasks,
    help="Measure SFT and PPO on tasks of lm-evaluation-harness too, where it is installed: TASK,TASK or YAML files.",
)
SOURCE_HUB = click.option(
    "--source_hub",
    "--source-hub",
    envvar="RLHF_ZOO_SOURCE_HUB",
    help="Where models and data come from that --hub has not: an address, 'local' or 'none'.  "
    "[default: HF_ENDPOINT, or the Hugging Face Hub]",
)


def _trust(ctx: click.Context, _: click.Parameter, said: bool) -> None:
    if said:
        from ..modeling.remote_code import trusting

        ctx.with_resource(trusting())  # until the command ends


TRUST = click.option(
    "--trust_remote_code",
    "--trust-remote-code",
    is_flag=True,
    expose_value=False,
    callback=_trust,
    help="Let models run the program code that they bring. Read it first: no recipe can say so for you.",
)


def _trust_run(ctx: click.Context, _: click.Parameter, said: bool) -> None:
    if said:
        from ..hub.client.run_signature import trusting

        ctx.with_resource(trusting())  # until the command ends


TRUST_RUN = click.option(
    "--trust_run",
    "--trust-run",
    is_flag=True,
    expose_value=False,
    callback=_trust_run,
    help="Obey the code and addresses that the run directory names, though your rlhf-zoo on this machine did not write "
    "it.",
)


def command_line() -> str:
    """The command line that the user typed, for records and for other commands that wait."""
    return shlex.join(["rlhf-zoo", *sys.argv[1:]])


def print_json(document: Any, *, ascii_only: bool = False) -> None:
    """Prints a document as JSON.

    Args:
        document: Of JSON's types.
        ascii_only: Whether to escape all other characters, so that a stranger's text brings no control character to
            the terminal.
    """
    click.echo(json.dumps(document, indent=2, ensure_ascii=ascii_only))


def console_of(width: int) -> Console:
    """The terminal; a file or a pipe, which has no width of its own, gets at least `width` columns.

    Args:
        width: In columns.
    """
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, width))


def interval(estimate: Mapping[str, Any], *, digits: int = 2, sign: str = "") -> str:
    """Writes an estimate with its 95% interval.

    Args:
        estimate: `value` and `ci95`.
        digits: After the point.
        sign: "+" also writes the sign of a positive value.
    """
    low, high = estimate["ci95"]
    return f"{estimate['value']:{sign}.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def check_namespace(namespace: str | None) -> None:
    """Checks the option --namespace.

    Args:
        namespace: Its value.

    Raises:
        ZooError: No Hub could have a user or an organization of this name.
    """
    from ..runs.recipe import is_repository_name

    if namespace is not None and not is_repository_name(namespace):
        raise ZooError(f"--namespace is {namespace!r}, which no Hub accepts: give the name of a user or organization.")


def check_repo(repo: str, form: str) -> None:
    """Checks the option --repo.

    Args:
        repo: Its value.
        form: How it is written, for the error.

    Raises:
        ZooError: No Hub could have a repository of this name.
    """
    from ..runs.recipe import is_repository_name

    if repo.count("/") != 1 or not all(map(is_repository_name, repo.split("/"))):
        raise ZooError(f"--repo is {repo!r}, which no Hub accepts: write {form}.")


def quiet_hub(*, bars: bool = False) -> None:
    """Turns off huggingface_hub's warnings of commits that change nothing, and its progress bars.

    Args:
        bars: Whether progress bars stay.
    """
    from huggingface_hub.utils import logging
    from huggingface_hub.utils.tqdm import disable_progress_bars

    logging.set_verbosity_error()
    if not bars:
        disable_progress_bars()


def run_options(command: Callable) -> Callable:
    """Adds the options of a command that works on a recipe's run.

    Args:
        command: A function under `@click.command`.
    """
    options = [
        click.option("--output_dir", "--output-dir", type=UserPath(), help="Run directory.  [default: runs/RECIPE]"),
        click.option("--hub", help="'local' (the embedded Hub) or an address."),
        SOURCE_HUB,
        click.option("--push_to_hub", "--push-to-hub", is_flag=True, help="Publish; --hub local always gets all."),
        click.option(
            "--namespace", help="Publish under this name.  [default: the run's, else local, or the token's owner]"
        ),
        click.option("--private", is_flag=True, help="Make repositories private."),
        click.option(
            "--patience",
            type=click.FloatRange(min=0),
            help="At the end, wait so many seconds for a Hub that fails.  [default: 180]",
        ),
        click.option(
            "--resume",
            type=click.Choice(["auto"]),
            help="auto, as without the flag: go on from the newest whole checkpoint, or start where there is none.",
        ),
        click.option("--restart", is_flag=True, help="Forget what was done before and begin again."),
        OVERWRITE,
        TRUST,
        TRUST_RUN,
    ]
    for option in reversed(options):
        command = option(command)
    return command


def stage_directories(run: Path) -> list[Path]:
    """Finds the stages of a run.

    Args:
        run: A run directory, or a stage's directory.

    Returns:
        The stage's directory itself, or those of the run's stages.

    Raises:
        ZooError: It is neither.
    """
    if (run / "run.json").is_file():
        return [run]
    directories = [run / stage for stage in STAGES if (run / stage / "run.json").is_file()]
    if not directories:
        raise ZooError(f"{run} is no run directory: it holds no run.json and no stage that does; give runs/RECIPE.")
    return directories


def columns_of(given: Any, *, example: str) -> dict[str, str]:
    """Reads the option --columns.

    Args:
        given: Its value.
        example: How it is written, for the error.

    Raises:
        ZooError: It is no mapping of names.
    """
    from ..runs.settings.values import coerce

    try:
        mapping: dict[str, str] = coerce(given, dict[str, str])
    except ValueError as error:
        raise ZooError(f"--columns is {given!r}, and it takes {error}: write '{example}'.") from error
    return mapping


def run_flags(
    ctx: click.Context, recipe: str, *, stage: str | None = None, names: bool = True
) -> dict[str, dict[str, Any]]:
    """Reads the command's flags for a recipe, and checks them and the recipe's files without importing what trains.

    Args:
        ctx: The command's.
        recipe: A name or a folder.
        stage: Of a command that runs one stage: a bare key is that stage's.
        names: Whether to check the names of judges and rewards.

    Returns:
        Flags by stage, with those of recipe.yaml under 'recipe'.

    Raises:
        ZooError: There is a mistake in flags or files.
    """
    from ..plugins import REWARDS, check_word
    from ..runs.recipe import load_recipe
    from ..runs.settings.declared import declared_keys, refused_keys
    from ..runs.settings.evaluation import check_harness
    from ..runs.settings.judge_names import check_judge_name
    from ..runs.settings.parse import parse_flags, recipe_config, recipe_flags, recipe_keys
    from ..runs.settings.values import checked_keys, coerce

    if recipe.startswith("-"):
        raise ZooError(f"{recipe} stands before the recipe: write `{ctx.command_path} RECIPE {recipe} ...`.")
    tasks = ctx.meta.get(TASKS)
    flags = parse_flags([*ctx.args, *(["--evaluation.lm_eval", tasks] if tasks is not None else [])])
    bare = flags.pop("")
    shared = recipe_keys()
    flags["recipe"] = {key: value for key, value in bare.items() if key in shared or stage in (None, "eval")}
    if stage not in (None, "eval"):
        flags[stage] = {**flags[stage], **{key: value for key, value in bare.items() if key not in shared}}
    recipe_flags(flags["recipe"])
    loaded = load_recipe(recipe)
    evaluation = recipe_config(loaded, flags["recipe"]).evaluation
    for name in STAGES:
        hints = {key: declared.hint for key, declared in declared_keys(name).items()}
        of, refused = f"the stage {name}", refused_keys(name)
        own = "" if name == stage else f"{name}."
        checked_keys(flags[name], hints, "the command's flags", of=of, refused=refused, flag=f"--{own}")
        if name in loaded.stages and stage in (None, "eval", name):
            checked_keys(loaded.stages[name], hints, str(loaded.source(name)), of=of, refused=refused)
    if names and "ppo" in loaded.stages and stage in (None, "eval", "ppo"):
        for judge in filter(None, [evaluation.judge, *evaluation.judges]):
            check_judge_name(judge)
        if evaluation.lm_eval:
            check_harness()
        rewards = {**loaded.stages["ppo"], **flags["ppo"]}.get("reward_funcs")
        with contextlib.suppress(ValueError):  # what is no list is told with its key
            for reward in coerce(rewards, list[str] | None) or ():
                check_word(reward, group=REWARDS)
    return flags


@contextlib.contextmanager
def settle_hub(
    flag: str | None, *, push_to_hub: bool, source: str | None = "none", option: str = "--hub"
) -> Iterator[Hub]:
    """Connects to the Hub of a command, says which it is, and disconnects at the end.

    Args:
        flag: The value of --hub.
        push_to_hub: Whether the command publishes.
        source: The value of --source_hub; 'none' for a command that only reads and writes on one Hub.
        option: The option that gave `flag`.
    """
    from ..hub.client.connect import choose, choose_source, connect

    target = choose(flag, push_to_hub=push_to_hub, option=option)
    with connect(target, choose_source(source, target)) as hub:
        named = source not in (None, "none") and hub.source is not None
        also = f"; models and data that it has not: {hub.source.described}" if named and hub.source else ""
        click.echo(f"Hub: {hub.described}{also}", err=True)
        yield hub


@contextlib.contextmanager
def run_context(
    recipe: str | Recipe,
    flags: Mapping[str, Mapping[str, Any]],
    *,
    output_dir: Path | None,
    hub: str | None,
    source_hub: str | None = None,
    push_to_hub: bool = False,
    namespace: str | None = None,
    writes: bool = True,
    **options: Any,
) -> Iterator[tuple[RunContext, Publisher | None]]:
    """Opens a run as `open_run` does, with the recipe, the Hub and the lock that a command needs.

    Of several processes the first one opens them; the others take the result from it, and send nothing.

    Args:
        recipe: A name, a folder or a loaded recipe.
        flags: By stage, as `run_flags` returns them.
        output_dir: The run directory; None for runs/RECIPE.
        hub: The value of --hub.
        source_hub: The value of --source_hub.
        push_to_hub: Whether the command publishes.
        namespace: The value of --namespace.
        writes: Whether the command writes into the run directory: then no other command may meanwhile.
        **options: Of `open_run`.
    """
    if not distributed.first():
        from ..hub.client.connect import point_clients

        context, environment = distributed.from_first(dict)
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        quiet_hub()
        point_clients()
        yield replace(context, publish=False), None
        return
    before = dict(os.environ)
    loaded, directory = settle_run(recipe, output_dir=output_dir, namespace=namespace)
    touched = [folder for folder in (options.get("base"), directory) if writes and folder is not None]
    with (
        writing(*touched),
        settle_hub(hub, push_to_hub=push_to_hub, source=source_hub) as connected,
        open_run(
            loaded,
            directory,
            flags,
            connected,
            push_to_hub=push_to_hub,
            namespace=namespace,
            asked=push_to_hub or hub is not None,
            **options,
        ) as run,
    ):
        names = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
        changed = {name: os.environ.get(name) for name in names}
        distributed.from_first(lambda: (replace(run[0]), changed))
        yield run


@contextlib.contextmanager
def writing(*directories: Path) -> Iterator[None]:
    """Locks run directories while this command writes into them.

    Args:
        *directories: To lock.

    Raises:
        ZooError: Another command writes into one of them.
    """
    from ..runs.lock import sole_writer

    with contextlib.ExitStack() as held:
        for directory in directories:
            held.enter_context(sole_writer(directory, command=command_line()))
        yield


def settle_run(recipe: str | Recipe, *, output_dir: Path | None, namespace: str | None) -> tuple[Recipe, Path]:
    """Loads a recipe and finds the directory of its run.

    Args:
        recipe: A name, a folder or a loaded recipe.
        output_dir: The run directory; None for runs/RECIPE.
        namespace: The value of --namespace, to check.

    Raises:
        ZooError: There is no such recipe, the directory cannot be one, or no Hub accepts the namespace.
    """
    from ..runs.recipe import load_recipe

    loaded = load_recipe(recipe) if isinstance(recipe, str) else recipe
    check_namespace(namespace)
    directory = output_dir or Path("runs") / loaded.name
    for folder in (directory, *directory.parents):
        if folder.exists() and not folder.is_dir():
            raise ZooError(f"{folder} is a file, so no run can be kept in it: give another --output_dir.")
    return loaded, directory


@contextlib.contextmanager
def open_run(
    found: Recipe,
    directory: Path,
    flags: Mapping[str, Mapping[str, Any]],
    connected: Hub,
    *,
    push_to_hub: bool,
    namespace: str | None = None,
    private: bool = False,
    restart: bool = False,
    resume: str | None = None,
    overwrite_repo: bool = False,
    patience: float | None = None,
    read_only: bool = False,
    stages: tuple[str, ...] | None = None,
    again: bool = False,
    base: Path | None = None,
    variant: str | None = None,
    own: tuple[str, ...] | None = None,
    asked: bool = True,
) -> Iterator[tuple[RunContext, Publisher | None]]:
    """Opens a run, and its outbox where it publishes; sends what is left at the end.

    Args:
        found: The recipe.
        directory: The run directory.
        flags: By stage, as `run_flags` returns them.
        connected: The Hub.
        push_to_hub: Whether the user asked to publish.
        namespace: To publish under; None for the run's own, else that of the token.
        private: Whether repositories are private.
        restart: Whether to forget what was done before.
        resume: The value of --resume, to check.
        overwrite_repo: Whether another run's repository may be overwritten.
        patience: Seconds to wait at the end for a Hub that fails.
        read_only: Publish nothing, whatever the flags say.
        stages: See `Sender`.
        again: See `Sender`.
        base: See `RunContext`.
        variant: See `RunContext`.
        own: See `RunContext`.
        asked: Whether the user said where to publish; the embedded Hub that nobody named gets no adapter without its
            base.

    Raises:
        ZooError: The flags contradict each other, nobody may publish there, or the directory is another recipe's.
    """
    from ..hub.client.publish import check_access
    from ..publishing.adapters import kept_here
    from ..runs.context import OWN, RunContext

    if resume is not None and restart:
        raise ZooError("--resume auto goes on with what lies in the run directory, and --restart forgets it: keep one.")
    quiet_hub()  # uploads go on behind the training's own bar
    publish = push_to_hub or connected.kind == "local"
    if publish:
        namespace = namespace or _namespace_before(directory, base, connected)
        namespace = check_access(namespace or ("local" if connected.kind == "local" else None), hub=connected)
        publish = not read_only
    context = RunContext(
        recipe=found,
        directory=directory,
        hub=connected,
        namespace=namespace or "local",
        publish=publish,
        restart=restart,
        fresh=restart,
        overwrite=overwrite_repo,
        command=command_line(),
        flags=flags,
        private=private,
        base=base,
        own=own or OWN,
        variant=variant,
    )
    kept = kept_here(context) if publish and not asked else None
    if kept is not None:
        context = replace(context, publish=False)
        click.echo(f"Nothing is published: {kept}", err=True)
    elif publish:
        click.echo(f"Publishing to {namespace}/{found.name}-{f'{variant}-' if variant else ''}*", err=True)
    else:
        click.echo(f"Nothing is published{'.' if read_only else ': --push_to_hub would.'}", err=True)
    if not restart:  # before anything is sent under this recipe's names
        context.check_recipe(["data", *STAGES, "eval"])
    with publishing(context, patience=patience, stages=stages, again=again) as publisher:
        yield context, publisher


@contextlib.contextmanager
def publishing(
    context: RunContext, *, patience: float | None, stages: tuple[str, ...] | None = None, again: bool = False
) -> Iterator[Publisher | None]:
    """Opens the outbox of a run; sends what is left at the end.

    Args:
        context: The run.
        patience: Seconds to wait at the end for a Hub that fails.
        stages: See `Sender`.
        again: See `Sender`.

    Yields:
        The outbox; None for a run that publishes nothing.
    """
    from ..publishing.outbox import PATIENCE, Outbox
    from ..publishing.sender import Sender, resume_command

    if not context.publish:
        yield None
        return
    sender = Sender(context, stages=stages, again=again)
    waits = PATIENCE if patience is None else patience
    with Outbox(sender, hub=context.hub.described, mend=resume_command(context), patience=waits) as outbox:
        yield outbox


def _namespace_before(directory: Path, base: Path | None, hub: Hub) -> str | None:
    """The namespace that the run's earlier stages were published under on this Hub."""
    from ..runs.record import StageRecord

    for folder in (directory, *([base] if base else [])):
        for stage in STAGES:
            publication = StageRecord(folder / stage).read().get("publish") or {}
            if publication.get("hub") == hub.label:
                return publication["namespace"]
    return None


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Prints a table that breaks lines between words alone: where it is too wide for the screen, closer together.

    Args:
        title: Above the table; "" for none.
        columns: Their headings.
        rows: Cells as text.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    rows = [[printable(cell) for cell in row] for row in rows]
    cells = [*zip(columns, *rows, strict=True)]
    whole = [max(cell_len(line) for cell in column for line in cell.splitlines() or [""]) for column in cells]
    words = [
        most if column[0] in COPIED else max(cell_len(word) for cell in column for word in cell.split() or [""])
        for most, column in zip(whole, cells, strict=True)
    ]
    console, apart = console_of(120), 3 * len(columns) + 1
    close = console.is_terminal and sum(words) + apart > console.width
    around = len(columns) - 1 if close else apart
    breakable = [place for place, column in enumerate(columns) if column not in COPIED]
    while close and breakable and sum(words) + around > console.width:  # long names alone are broken
        longest = max(breakable, key=words.__getitem__)
        if words[longest] <= SHORT:
            break
        words[longest] -= 1
    room = max(console.width - around - sum(words), 0)
    table = Table(title=title or None, box=box.SIMPLE_HEAD, padding=0 if close else (0, 1), show_edge=not close)
    widths = dict(enumerate(words))
    for left, place in enumerate(
        sorted(widths, key=lambda place: whole[place] - words[place])
    ):  # who needs least first
        more = min(whole[place] - words[place], room // (len(columns) - left))
        widths[place] += more
        room -= more
    for place, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=column in COPIED, width=widths[place])
    for row in rows:
        table.add_row(*map(escape, row))
    Console(width=max(console.width, around + sum(widths.values()))).print(table)
