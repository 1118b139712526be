"""`rlhf-zoo lineage|reproduce`: shows what a published model was made from, and trains it again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .common import command_line, loading, quiet_hub
from .layout import Command
from .open_run import open_hub
from .options import HUB, SOURCE_HUB, TRUST, TRUST_RUN, UserPath, json_option
from .tables import print_json, stdout_console

if TYPE_CHECKING:
    from rich.tree import Tree

    from ..publishing.catalog.family import Node


@click.command(cls=Command)
@click.argument("repository", metavar="REPO[@REV]|FOLDER")
@HUB
@SOURCE_HUB
@TRUST_RUN
@json_option("Print JSON: a node with its parents.")
def lineage(repository: str, hub: str | None, source_hub: str | None, as_json: bool) -> None:
    """Draw the tree of the models and data that a model was made from.

    The tree has the SFT policy, reward model, data and base models, each at its commit, with the stage, recipe, step
    and figures from its card. Repositories that no longer exist are marked.

    \b
    Example:
      rlhf-zoo lineage local/tiny-world-ppo@best
    """
    with open_hub(hub, source=source_hub) as connected_hub:
        from ..publishing.catalog.lineage import find_family

        root = find_family(repository, connected_hub)
        if as_json:
            print_json(root.to_json())
            return
        stdout_console(160).print(_tree(root))


def _tree(node: Node, branch: Tree | None = None) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    from ..publishing.catalog.family import node_lines

    first, *lines = node_lines(node)
    label = Text(first, style="bold" if branch is None else "")
    for line in lines:
        label.append(f"\n{line}", style="not bold dim")
    tree = Tree(label) if branch is None else branch.add(label)
    for parent in node.parents:
        _tree(parent, tree)
    return tree


@click.command(cls=Command)
@click.argument("repository", metavar="REPO[@REV]|FOLDER")
@click.option(
    "--output_dir",
    "--output-dir",
    type=UserPath(),
    help="Run directory.  [default: runs/reproduce/NAMESPACE--NAME@REV]",
)
@click.option(
    "--allow_import",
    "--allow-import",
    multiple=True,
    metavar="NAME",
    help="A corpus, preference function or reward function that REPO names and may import; may be repeated.",
)
@HUB
@SOURCE_HUB
@TRUST
@json_option("Print JSON: what was compared, and what differs.")
def reproduce(
    repository: str,
    output_dir: Path | None,
    allow_import: tuple[str, ...],
    hub: str | None,
    source_hub: str | None,
    as_json: bool,
) -> None:
    """Train a published checkpoint again, and compare weights and metrics.

    The recipe comes from the checkpoint's recipe.json. Only the stage that made the checkpoint runs, up to its step,
    from the published checkpoints of earlier stages. Nothing is published. Run the command again to resume an
    interrupted run, or to compare a finished run again.

    Exit code 0: weights and metrics are bit-equal. 1: they differ, and a table says where. 2: training could not run.

    \b
    Example:
      rlhf-zoo reproduce local/tiny-world-ppo@step-000010
    """
    with open_hub(hub, source=source_hub) as connected_hub:
        with loading("loading the trainer"):
            from ..pipeline.inspect import reproduce as reproducing

        quiet_hub()  # the stage has its own progress bars
        document = reproducing.reproduce(
            repository, hub=connected_hub, directory=output_dir, allowed_names=allow_import, command=command_line()
        )
        if as_json:
            print_json(document)
        else:
            reproducing.show(document, stdout_console(120))
    if not document["bit_equal"]:
        raise click.exceptions.Exit(1)
