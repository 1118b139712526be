"""Opens and closes the Hub, the run directory and the outbox of a command."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import click

from ..errors import ZooError
from ..modeling import distributed
from ..runs.registry import STAGES
from .common import check_namespace, command_line, loading, quiet_hub

if TYPE_CHECKING:
    from ..hub.client.connect import Hub
    from ..runs.context import Publisher, RunContext
    from ..runs.recipe import Recipe


@contextlib.contextmanager
def open_hub(
    flag_value: str | None, *, push_to_hub: bool | None = None, source: str | None = "none", flag: str = "--hub"
) -> Iterator[Hub]:
    """Connects to the Hub of a command, prints its name, and disconnects at the end.

    Args:
        flag_value: The value of the flag.
        push_to_hub: Whether the command publishes; None if it never does.
        source: The value of --source_hub. None chooses the default source, whose name is not printed. 'none' uses no
            source.
        flag: The flag that names the Hub, for messages.
    """
    from ..hub.client.connect import choose_hub, choose_source, connect

    target = choose_hub(flag_value, push_to_hub=push_to_hub, flag=flag)
    with connect(target, choose_source(source, target)) as hub:
        named_source = None if source in (None, "none") else hub.source_hub
        note = "" if named_source is None else f"; models and data that it lacks come from {named_source.description}"
        click.echo(f"Hub: {hub.description}{note}", err=True)
        yield hub


class ContextOptions(TypedDict, total=False):
    """Options that `open_run` passes on to the context unchanged.

    `private` and `overwrite_repo` are options of `rlhf-zoo run`. With `never_publish`, nothing is published. `base`,
    `variant` and `own_stages` are fields of `RunContext`; if `own_stages` is None, the default is used.
    """

    private: bool
    overwrite_repo: bool
    never_publish: bool
    base: Path | None
    variant: str | None
    own_stages: tuple[str, ...] | None


class RunOptions(ContextOptions, total=False):
    """Options of `open_run` that every command may set. `open_run` documents them."""

    restart: bool
    resume: str | None
    patience: float | None
    stages: tuple[str, ...] | None
    resend_cards: bool


@contextlib.contextmanager
def run_context(
    recipe: str | Recipe,
    flags: Mapping[str, Mapping[str, Any]],
    *,
    output_dir: Path | None,
    hub: str | None,
    source_hub: str | None = None,
    push_to_hub: bool | None = None,
    namespace: str | None = None,
    writes: bool = True,
    **options: Unpack[RunOptions],
) -> Iterator[tuple[RunContext, Publisher | None]]:
    """Loads the recipe, locks the run directory, connects to the Hub, and opens the run as `open_run` does.

    With several processes, only the main one does this. The others receive the context from it and publish nothing.

    Args:
        recipe: A name, a folder or a loaded recipe.
        flags: The flags by stage, as `read_flags` returns them.
        output_dir: The run directory; None for runs/RECIPE.
        hub: The value of --hub.
        source_hub: The value of --source_hub.
        push_to_hub: Whether the command publishes; None if it never does.
        namespace: The value of --namespace.
        writes: Whether the command writes into the run directory. If so, it locks other commands out of it.
        **options: See `RunOptions`.
    """
    if not distributed.is_main_process():
        from ..hub.client.connect import reload_clients

        # This call receives the context that the main process sends below. `dict` is a placeholder and is not called.
        context, environment_changes = distributed.call_on_main_process(dict)
        # Clients of the Hub, other libraries included, read its address and token from the environment.
        for name, value in environment_changes.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        quiet_hub()
        reload_clients()
        yield replace(context, publish=False), None
        return
    old_environment = dict(os.environ)
    loaded_recipe, directory = resolve_run(recipe, output_dir=output_dir, namespace=namespace)
    locked_folders = [folder for folder in (options.get("base"), directory) if writes and folder is not None]
    with (
        locked(*locked_folders),
        open_hub(hub, push_to_hub=push_to_hub, source=source_hub) as connected_hub,
        open_run(
            loaded_recipe,
            directory,
            flags,
            connected_hub,
            push_to_hub=bool(push_to_hub),
            namespace=namespace,
            user_chose_hub=bool(push_to_hub) or hub is not None,
            **options,
        ) as run,
    ):
        names = old_environment.keys() | os.environ.keys()
        new_values = {name: os.environ.get(name) for name in names}  # None: the variable was removed
        changes = {name: value for name, value in new_values.items() if value != old_environment.get(name)}
        context, _ = run
        # `replace` makes a copy without the settings that this process has cached.
        distributed.call_on_main_process(lambda: (replace(context), changes))
        yield run


@contextlib.contextmanager
def locked(*directories: Path) -> Iterator[None]:
    """Locks run directories while this command writes into them.

    Args:
        *directories: The run directories to lock.

    Raises:
        ZooError: Another command writes into one of them.
    """
    from ..runs.lock import sole_writer

    with contextlib.ExitStack() as locks:
        for directory in directories:
            locks.enter_context(sole_writer(directory, command=command_line()))
        yield


def resolve_run(recipe: str | Recipe, *, output_dir: Path | None, namespace: str | None) -> tuple[Recipe, Path]:
    """Loads a recipe, and determines the directory of its run.

    Args:
        recipe: A name, a folder or a loaded recipe.
        output_dir: The run directory; None for runs/RECIPE.
        namespace: The value of --namespace, to check.

    Raises:
        ZooError: There is no such recipe, the path cannot be a directory, or no Hub accepts the namespace.
    """
    from ..runs.recipe import load_recipe

    loaded_recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    check_namespace(namespace)
    directory = output_dir or Path("runs") / loaded_recipe.name
    for folder in (directory, *directory.parents):
        if folder.exists() and not folder.is_dir():
            raise ZooError(f"{folder} is a file, so no run can be kept in it: give another --output_dir.")
    return loaded_recipe, directory


@contextlib.contextmanager
def open_run(
    recipe: Recipe,
    directory: Path,
    flags: Mapping[str, Mapping[str, Any]],
    hub: Hub,
    *,
    push_to_hub: bool,
    namespace: str | None = None,
    user_chose_hub: bool = True,
    restart: bool = False,
    resume: str | None = None,
    patience: float | None = None,
    stages: tuple[str, ...] | None = None,
    resend_cards: bool = False,
    **options: Unpack[ContextOptions],
) -> Iterator[tuple[RunContext, Publisher | None]]:
    """Opens a run, and its outbox if the run publishes; sends the remaining files at the end.

    Args:
        recipe: The recipe.
        directory: The run directory.
        flags: The flags by stage, as `read_flags` returns them.
        hub: The Hub, connected.
        push_to_hub: Whether the command publishes.
        namespace: The value of --namespace.
        user_chose_hub: Whether the user named a Hub or passed --push_to_hub.
        restart: Whether to discard the run so far.
        resume: The value of --resume, to check.
        patience: Seconds to wait at the end for a Hub that fails; None for the default.
        stages: The stages to publish; None for those whose run.json names this Hub and namespace.
        resend_cards: Whether to publish the final cards again.
        **options: See `ContextOptions`.

    Raises:
        ZooError: The flags contradict each other, the token may not publish to the namespace, or the directory belongs
            to another recipe.
    """
    if resume is not None and restart:
        raise ZooError("--resume auto resumes the run and --restart discards it: pass only one.")
    quiet_hub()  # uploads run while training shows its own progress bar
    context = _make_context(
        recipe,
        directory,
        flags,
        hub,
        push_to_hub=push_to_hub,
        namespace=namespace,
        user_chose_hub=user_chose_hub,
        restart=restart,
        **options,
    )
    if not restart:  # check before publishing under this recipe's names
        context.check_recipe(["data", *STAGES, "eval"])
    with publishing(context, patience=patience, stages=stages, resend_cards=resend_cards) as publisher:
        yield context, publisher


def _make_context(
    recipe: Recipe,
    directory: Path,
    flags: Mapping[str, Mapping[str, Any]],
    hub: Hub,
    *,
    push_to_hub: bool,
    restart: bool,
    namespace: str | None = None,
    private: bool = False,
    overwrite_repo: bool = False,
    never_publish: bool = False,
    base: Path | None = None,
    variant: str | None = None,
    own_stages: tuple[str, ...] | None = None,
    user_chose_hub: bool = True,
) -> RunContext:
    """Makes the context of a run, and prints where it publishes.

    If `user_chose_hub` is False, an adapter whose base model no Hub has is not sent to the embedded Hub.
    """
    from ..hub.client.publish import resolve_namespace
    from ..publishing.adapters import reason_not_to_publish
    from ..runs.context import VARIANT_STAGES, RunContext

    publish = push_to_hub or hub.kind == "local"
    if publish:
        namespace = namespace or _earlier_namespace(directory, base, hub)
        namespace = resolve_namespace(namespace or ("local" if hub.kind == "local" else None), hub=hub)
    context = RunContext(
        recipe=recipe,
        directory=directory,
        hub=hub,
        namespace=namespace or "local",
        publish=publish and not never_publish,
        restart=restart,
        drop_old_tags=restart,
        overwrite=overwrite_repo,
        command=command_line(),
        flags=flags,
        private=private,
        base=base,
        own_stages=own_stages or VARIANT_STAGES,
        variant=variant,
    )
    reason = reason_not_to_publish(context) if context.publish and not user_chose_hub else None
    if reason is not None:
        click.echo(f"Not publishing: {reason}", err=True)
        return replace(context, publish=False)
    if context.publish:
        click.echo(f"Publishing to {namespace}/{recipe.name}-{f'{variant}-' if variant else ''}*", err=True)
    else:
        click.echo(f"Not publishing.{'' if never_publish else ' Pass --push_to_hub to publish.'}", err=True)
    return context


@contextlib.contextmanager
def publishing(
    context: RunContext, *, patience: float | None, stages: tuple[str, ...] | None = None, resend_cards: bool = False
) -> Iterator[Publisher | None]:
    """Opens the outbox of a run; sends the remaining files at the end.

    Args:
        context: The run.
        patience: Seconds to wait at the end for a Hub that fails; None for the default.
        stages: The stages to publish; None for those whose run.json names this Hub and namespace.
        resend_cards: Whether to publish the final cards again.

    Yields:
        The outbox; None for a run that publishes nothing.
    """
    if not context.publish:
        yield None
        return
    with loading("loading the publisher"):
        from ..publishing.outbox import PATIENCE, Outbox
        from ..publishing.sender import Sender, resume_command

    sender = Sender(context, stages=stages, resend_cards=resend_cards)
    seconds = PATIENCE if patience is None else patience
    with Outbox(
        sender, hub_name=context.hub.description, resume_command=resume_command(context), patience=seconds
    ) as outbox:
        yield outbox


def _earlier_namespace(directory: Path, base: Path | None, hub: Hub) -> str | None:
    """Returns the namespace to which the run was published on this Hub earlier; None if it was not."""
    from ..runs.record import StageRecord

    for folder in (directory, *([base] if base else [])):
        for stage in STAGES:
            publication = StageRecord(folder / stage).read().get("publish") or {}
            if publication.get("hub") == hub.label:
                return publication["namespace"]
    return None
