"""`rlhf-zoo hub serve|status|token|env`, and `token list|revoke`."""

import json
import logging
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from ...errors import ZooError
from ...fileio import folder_bytes, home
from .names import KINDS
from .process import NO_TELEMETRY, running_server, serve
from .tokens import ROLES, create_token, list_tokens, revoke_tokens

_ROOT_HELP = "Folder of the Hub.  [default: $RLHF_ZOO_HOME/hub]"


class _Command(click.Command):
    """A command that prints a ZooError as one sentence and exits with code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ZooError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(2)


class _Group(_Command, click.Group):
    """A command with subcommands."""


class _Duration(click.ParamType):
    """A duration such as 30m, 12h or 90d, converted to seconds; None for never."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value is None or value == "never":
            return None
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"([1-9][0-9]{0,3})([mhd])", value)
        if not match:
            self.fail(
                f"{value!r} is not a duration: give minutes, hours or days, such as 30m, 12h or 90d, or never.",
                param,
                ctx,
            )
        return int(match[1]) * {"m": 60, "h": 3600, "d": 86400}[match[2]]


def client_environment(url: str, token: str, client_home: str | os.PathLike[str]) -> dict[str, str]:
    """Returns the environment variables that make a process use this Hub and no other.

    Args:
        url: Address of the Hub.
        token: Access token for it.
        client_home: The client's HF_HOME. Hubs must not share it, because the cache in it is keyed by repository only.
    """
    return {
        "HF_ENDPOINT": url,
        "HF_TOKEN": token,
        "HF_HOME": str(client_home),
        "HF_HUB_DISABLE_XET": "1",
        **NO_TELEMETRY,
    }


@click.group()
def hub() -> None:
    """The embedded Hub: a Hugging Face Hub of your own, on this machine.

    \b
    Example:
      rlhf-zoo hub serve &
      eval "$(rlhf-zoo hub env)"
      hf upload local/my-model ./folder
    """


@click.command(cls=_Command)
@click.option("--root", type=click.Path(path_type=Path), help=_ROOT_HELP)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; loopback by default.")
@click.option("--port", default=0, show_default=True, help="Port to listen on; 0 takes a free one.")
@click.option(
    "--ready_file",
    "--ready-file",
    type=click.Path(path_type=Path),
    help="Write {url, pid} here as JSON once the server listens.",
)
@click.option("--parent", type=int, help="Stop when the process with this id ends (for commands that start a Hub).")
@click.option("-v", "--verbose", is_flag=True, help="Log each request on stderr.")
def serve_command(
    root: Path | None, host: str, port: int, ready_file: Path | None, parent: int | None, verbose: bool
) -> None:
    """Serve the embedded Hub until Ctrl-C or SIGTERM.

    \b
    Example:
      rlhf-zoo hub serve --root ./hub --port 8080
    """
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(message)s", stream=sys.stderr)
    folder = root or home() / "hub"

    # Two servers may share a root, but only one can be on record for `hub status` and `hub env`.
    other_server = running_server(folder.expanduser().absolute()) if parent is None and folder.is_dir() else None

    def announce(url: str) -> None:
        if other_server is not None:
            click.echo(
                f"Another Hub serves {folder} at {other_server['url']}; `hub status` and `hub env` show that one.",
                err=True,
            )
        option = f" --root {shlex.quote(str(root))}" if root is not None else ""
        click.echo(f"Embedded Hub at {url}, folder {folder}; stop it with Ctrl-C.", err=True)
        click.echo(f"`rlhf-zoo hub env{option}` shows how to use it.", err=True)

    serve(
        folder,
        host,
        port,
        ready_file,
        parent_pid=parent,
        is_second=other_server is not None,
        on_ready=None if parent else announce,
    )


@hub.command(cls=_Command)
@click.option("--root", type=click.Path(path_type=Path), help=_ROOT_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(root: Path | None, as_json: bool) -> None:
    """Show where the embedded Hub is, whether it runs, what it holds, and which repositories are damaged.

    \b
    Example:
      rlhf-zoo hub status --json
    """
    folder = (root or home() / "hub").expanduser().absolute()
    server_record = running_server(folder)
    # Count without `Storage`, which would create the folders of a Hub that does not exist yet.
    repo_counts = {plural: len(list((folder / "repos" / plural).glob("*/*.git"))) for plural in KINDS.values()}
    size = folder_bytes(folder / "repos")
    damaged_repos = _list_damaged(folder) if sum(repo_counts.values()) else []
    report = {
        "running": server_record is not None,
        "url": server_record["url"] if server_record else None,
        "pid": server_record["pid"] if server_record else None,
        "root": str(folder),
        "repositories": repo_counts,
        "bytes": size,
        "damaged": damaged_repos,
    }
    if as_json:
        click.echo(json.dumps(report))
        return
    address = (
        f"{report['url']} (pid {report['pid']})" if server_record else "not running; start it with `rlhf-zoo hub serve`"
    )
    click.echo(f"url           {address}")
    click.echo(f"root          {folder}")
    click.echo(f"repositories  {', '.join(f'{count} {plural}' for plural, count in repo_counts.items())}")
    click.echo(f"size          {size / 1e6:,.1f} MB")
    for entry in damaged_repos:
        click.echo(f"damaged       {entry['type']} {entry['id']}: {entry['reason']}; see {entry['folder']}")


@hub.group(cls=_Group, invoke_without_command=True)
@click.option("--root", type=click.Path(path_type=Path), help=_ROOT_HELP)
@click.option("--role", type=click.Choice(ROLES), default="write", show_default=True, help="What the token may do.")
@click.option("--name", help="The token's purpose, as `hub token list` shows it.")
@click.option("--expires", type=_Duration(), default="never", show_default=True, help="When the token expires.")
@click.pass_context
def token(ctx: click.Context, root: Path | None, role: str, name: str | None, expires: int | None) -> None:
    """Make an access token and print it once; or list and revoke existing tokens.

    \b
    Example:
      HF_TOKEN=$(rlhf-zoo hub token --role read --expires 30d)
    """
    options = [key for key in ctx.params if ctx.get_parameter_source(key) != click.core.ParameterSource.DEFAULT]
    if ctx.invoked_subcommand is None:
        click.echo(create_token(root or home() / "hub", role, name=name, seconds=expires))
    elif options:  # otherwise they would be ignored silently
        raise click.UsageError(
            f"--{options[0]} here is for a new token: put the options of '{ctx.invoked_subcommand}' after its name."
        )


@token.command("list", cls=_Command)
@click.option("--root", type=click.Path(path_type=Path), help=_ROOT_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def token_list(root: Path | None, as_json: bool) -> None:
    """Show the existing tokens: id, role, dates and purpose. The tokens themselves cannot be shown.

    \b
    Example:
      rlhf-zoo hub token list
    """
    records = list_tokens(root or home() / "hub")
    if as_json:
        keys = ("id", "role", "created", "expires", "expired", "name")
        click.echo(json.dumps([{key: getattr(record, key) for key in keys} for record in records]))
        return
    for record in records:
        expiry = f"{'expired' if record.expired else 'until'} {record.expires}" if record.expires else "never expires"
        click.echo(f"{record.id}  {record.role:5}  {record.created}  {expiry:31}  {record.name or ''}".rstrip())


@token.command(cls=_Command)
@click.argument("ids_or_tokens", nargs=-1, required=True, metavar="ID...")
@click.option("--root", type=click.Path(path_type=Path), help=_ROOT_HELP)
def revoke(ids_or_tokens: tuple[str, ...], root: Path | None) -> None:
    """Revoke tokens; a running Hub refuses them at once.

    Give the id of each token, or the token itself.

    \b
    Example:
      rlhf-zoo hub token revoke 1a2b3c4d5e6f
    """
    for record in revoke_tokens(root or home() / "hub", ids_or_tokens):
        click.echo(f"Revoked {record.id} ({record.role}{f', {record.name}' if record.name else ''}).", err=True)


@hub.command(cls=_Command)
@click.option("--root", type=click.Path(path_type=Path), help=_ROOT_HELP)
@click.option("--role", type=click.Choice(ROLES), default="write", show_default=True, help="What the new token may do.")
@click.option("--expires", type=_Duration(), default="30d", show_default=True, help="When the token expires.")
def env(root: Path | None, role: str, expires: int | None) -> None:
    """Print the exports that point Hugging Face clients at the running Hub, with a new token.

    \b
    Example:
      eval "$(rlhf-zoo hub env)"
    """
    folder = (root or home() / "hub").expanduser().absolute()
    server_record = running_server(folder)
    if server_record is None:
        raise ZooError(f"No embedded Hub serves {folder}: start one with `rlhf-zoo hub serve --root {folder}`.")
    token = create_token(folder, role, name="hub env", seconds=expires)
    variables = client_environment(server_record["url"], token, folder / "client")
    for name, value in variables.items():
        click.echo(f"export {name}={shlex.quote(value)}")


def _list_damaged(root: Path) -> list[dict[str, str]]:
    """Lists the damaged repositories, each with the reason and its folder."""
    from .describe import find_damage
    from .storage import Storage

    storage = Storage(root)
    entries = []
    for repo in storage.repositories():
        reason = find_damage(storage, repo)
        if reason is not None:
            # A reason quotes names that somebody pushed. Control characters must not reach the terminal.
            printable = "".join(char if char.isprintable() else "�" for char in reason)
            entries.append({"id": str(repo), "type": repo.kind, "reason": printable, "folder": str(storage.path(repo))})
    return entries


hub.add_command(serve_command, "serve")
