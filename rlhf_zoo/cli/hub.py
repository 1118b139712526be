"""`rlhf-zoo hub serve|status|token|env|add|export|extension`: the embedded Hub."""

import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click

from ..errors import ZooError
from ..fileio import home
from ..hub.server.cli import hub as embedded
from .common import check_repo, loading, quiet_hub
from .extension import extension
from .layout import Command, Group
from .open_run import open_hub
from .options import UserPath, json_option
from .tables import print_json, print_table


@click.command(cls=Command)
@click.argument("source", metavar="REPOSITORY")
@click.option("--repo", "target", required=True, help="Name of the repository on the other Hub, USER/NAME.")
@click.option(
    "--to", "--hub", "address", help="Address of the other Hub.  [default: HF_ENDPOINT, or the Hugging Face Hub]"
)
@click.option(
    "--repo_type",
    "--repo-type",
    type=click.Choice(["model", "dataset", "space"]),
    default="model",
    show_default=True,
    help="Type of the repository.",
)
@click.option(
    "--private/--public", default=None, help="Visibility on the other Hub.  [default: as on the embedded Hub]"
)
@click.option("--root", type=UserPath(), help="Folder of the embedded Hub.  [default: $RLHF_ZOO_HOME/hub]")
@json_option()
def export(
    source: str,
    target: str,
    address: str | None,
    repo_type: str,
    private: bool | None,
    root: Path | None,
    as_json: bool,
) -> None:
    """Upload a repository of the embedded Hub to another Hub, with its history of commits, branches and tags.

    Commits get new ids and dates there, and the description of each names the original commit. Files do not change:
    rlhf_card.json and README.md still name parents as on the embedded Hub. Run the command again to resume after an
    interruption, or to send new commits. If the repository there holds something else, it is left unchanged.

    \b
    Example:
      rlhf-zoo hub export local/tiny-world-ppo --repo USER/tiny-world-ppo
      rlhf-zoo hub export local/tiny-world-data --repo_type dataset \\
        --repo USER/data --to https://hub.example.org
    """
    from ..hub.client.connect import HF_URL
    from ..hub.client.export import export as export_repository
    from ..hub.client.export import open_source

    check_repo(target, "USER/NAME")
    with (
        open_source(root or home() / "hub", source, repo_type) as source_repository,
        open_hub(address or os.environ.get("HF_ENDPOINT") or HF_URL, push_to_hub=True) as hub,
    ):
        from ..hub.client.publish import resolve_namespace

        quiet_hub(keep_progress_bars=sys.stderr.isatty())
        resolve_namespace(None, hub=hub)
        report = partial(click.echo, err=True)
        result = export_repository(source_repository, target, private=private, report=report, hub=hub)
    url = f"{hub.endpoint}/{'' if repo_type == 'model' else f'{repo_type}s/'}{target}"
    if as_json:
        print_json({"repo": target, "url": url, **asdict(result)})
        return
    refs_by_commit: dict[str, list[str]] = {}
    for name, commit in [*result.branches.items(), *result.tags.items()]:
        refs_by_commit.setdefault(commit, []).append(name)
    rows = [[original, new, " ".join(refs_by_commit.get(new, []))] for original, new in result.commits.items()]
    print_table("", [f"commit of {source}", f"of {target}", "branches and tags"], rows)
    commits = "1 new commit was" if result.sent == 1 else f"{result.sent} new commits were"
    click.echo(f"{url} holds {source}: {commits} sent, and the files of all tags were checked.")
    if result.skipped_tags:
        click.echo(f"Left out, because no branch leads to their commits: the tags {', '.join(result.skipped_tags)}.")
    click.echo(
        "Its cards and rlhf_card.json still name parents and commits of the embedded Hub: the table above, and each "
        "commit's line Exported-From, show the original of each new commit."
    )


@click.command(cls=Command)
@click.argument("path")
@click.argument("repository", metavar="NAMESPACE/NAME")
@click.option(
    "--license",
    "license_name",
    help="License id as on the Hub, such as mit or apache-2.0.  [default: the license in the card or the GGUF file]",
)
@click.option("--source", help="Where the model comes from, for its card.")
@json_option()
def add(path: str, repository: str, license_name: str | None, source: str | None, as_json: bool) -> None:
    """Put a model on the embedded Hub, from a folder or a GGUF file.

    The model may be a language model, a reward model, or a sentence embedder for `relevance`. Recipes then name it by
    NAMESPACE/NAME, as on the Hugging Face Hub, and adapters and cards name it as their base. A GGUF file is unpacked
    into float32 safetensors.

    \b
    Example:
      rlhf-zoo hub add models/SmolLM2-135M-Instruct.Q4_1.gguf \\
        HuggingFaceTB/SmolLM2-135M-Instruct
      rlhf-zoo hub add ./my-model local/my-model --license mit \\
        --source "trained by hand"
    """
    check_repo(repository, "NAMESPACE/NAME", subject="The name")
    if not Path(path).expanduser().exists():  # before imports that take seconds
        raise ZooError(f"There is no {path}: pass a model's folder or GGUF file.")
    with open_hub("local", push_to_hub=True) as hub:
        with loading("loading the publisher"):
            from ..publishing.add_model import add_model

        quiet_hub(keep_progress_bars=sys.stderr.isatty())
        result = add_model(path, repository, license=license_name, source=source, hub=hub)
    if as_json:
        print_json(asdict(result))
        return
    holds = "now holds" if result.is_new else "already holds"
    click.echo(f"{repository} {holds} the model of {path} (commit {result.commit[:12]}).")
    if result.license is None:
        click.echo(
            "Its card names no license: give --license, because models trained from it inherit the license.", err=True
        )


# A second group, because these commands need the client, which the embedded Hub's own group may not import.
hub = Group(
    "hub",
    commands={**embedded.commands, "add": add, "export": export, "extension": extension},
    help=embedded.help,
)
