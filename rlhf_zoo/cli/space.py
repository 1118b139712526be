"""`rlhf-zoo space deploy`: puts the comparison page into a Space of a Hub."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import click

from ..errors import ZooError
from ..runs.status_line import show_activity
from .common import check_repo, loading, quiet_hub
from .layout import Command, Group
from .open_run import open_hub
from .options import ABLATION, PUBLISHING_HUB, SOURCE_HUB, lineage_options

if TYPE_CHECKING:
    from ..app.space.deploy import Deployment
    from ..app.space.files import SpaceModels
    from ..hub.client.connect import Hub


@click.command(cls=Command)
@click.argument("ppo")
@click.option(
    "--repo",
    help="The Space, NAMESPACE/NAME.  [default: local/NAME-compare, or OWNER/NAME-compare for the token's owner]",
)
@lineage_options
@click.option("--votes", metavar="NAMESPACE/NAME", help="The data set for blind votes.  [default: no votes are kept]")
@ABLATION
@click.option(
    "--private/--public",
    default=None,
    help="Visibility of the Space.  [default: private if one of its models is private]",
)
@PUBLISHING_HUB
@SOURCE_HUB
def deploy(
    ppo: str,
    repo: str | None,
    runs: tuple[str, ...],
    private: bool | None,
    hub: str | None,
    source_hub: str | None,
    **options: Any,
) -> None:
    """Make or update a Space with the comparison page: SFT and PPO side by side, with rewards and KL.

    PPO is NAMESPACE/NAME[@TAG]. The Space is written in one commit, and pins each model to its current commit. If the
    account may not have Gradio Spaces, the Space becomes a static page of completions that this machine samples now.

    \b
    Example:
      rlhf-zoo space deploy local/tiny-world-ppo --hub local
      rlhf-zoo space deploy USER/NAME-ppo@best --repo USER/compare \\
        --votes USER/votes --hub https://huggingface.co
    """
    if repo is not None:
        check_repo(repo, "NAMESPACE/NAME")
    with open_hub(hub, push_to_hub=True, source=source_hub) as connected_hub:
        with loading("loading the page"):
            from ..app.space.deploy import deploy as deploy_space
            from ..app.space.files import add_runs, find_models
            from ..hub.client.publish import resolve_namespace

        quiet_hub()
        account = resolve_namespace("local" if connected_hub.kind == "local" else None, hub=connected_hub)
        with show_activity("finding the models"):
            models = find_models(ppo, **options)
            models, problem = add_runs(models, runs or None)
        if problem is not None:
            click.echo(problem, err=True)
        name = repo or f"{account}/{models.ppo.repo.rpartition('/')[2].removesuffix('-ppo')}-compare"

        from ..app.serve import render_static_page

        with show_activity("sending the Space"):
            deployment = deploy_space(
                name,
                models,
                render_page=functools.partial(render_static_page, models, connected_hub),
                private=private,
                builds_spaces=connected_hub.kind == "huggingface",
                hub=connected_hub,
            )
        _add_to_collection(models, name, connected_hub, private=deployment.private)
        _print_result(name, deployment, models, connected_hub)


def _print_result(name: str, deployment: Deployment, models: SpaceModels, hub: Hub) -> None:
    state = "created" if deployment.created else "updated" if deployment.changed else "unchanged"
    # The embedded Hub stops with this command, so nobody could use its address.
    location = f"{name} on the embedded Hub" if hub.kind == "local" else deployment.url
    kind = "a live page" if deployment.sdk == "gradio" else "a static page"
    click.echo(f"Space: {location} ({kind}, {state}, commit {deployment.commit[:10]})")
    if deployment.refusal is not None:
        click.echo(
            f"It is a static page, because this account may not have Gradio Spaces (402: {deployment.refusal}): it "
            "shows completions that were sampled now, and computes nothing."
        )
    elif deployment.sdk == "static":
        click.echo("It stays a static page: delete the Space and deploy it again for a live one.")
    if deployment.sdk == "static" and models.votes is not None:
        click.echo(f"A static page takes no votes, so nothing goes to {models.votes}.")
    if deployment.sdk == "gradio" and hub.kind == "huggingface":
        click.echo(f"It runs on {deployment.hardware} once it is built.")
        for repo in deployment.private_models:
            click.echo(f"{repo} is private: give the Space a secret HF_TOKEN that may read it.")
        if models.votes is not None:
            click.echo(f"Votes go to {models.votes}: give the Space a secret HF_TOKEN that may write to that data set.")
    else:
        if deployment.sdk == "gradio" and models.votes is None:
            click.echo("It keeps no votes; --votes NAMESPACE/NAME names a data set for them.")
        hub_option = f" --hub {hub.label}" if hub.kind != "huggingface" else ""
        click.echo(f"For a live page on this machine: rlhf-zoo compare {models.ppo.name}{hub_option}")


def _add_to_collection(models: SpaceModels, space: str, hub: Hub, *, private: bool) -> None:
    """Adds the Space to its recipe's Collection. Prints a message if the Hub or the token does not allow it."""
    from ..publishing.collections import collect

    if models.recipe is None:
        return
    repos = {model.repo: role for role, model in models.by_role.items()}
    try:
        collect(models.recipe, space.partition("/")[0], repos, space, private=private, hub=hub)
    except ZooError as error:
        click.echo(str(error), err=True)


space = Group(
    "space",
    commands={"deploy": deploy},
    help="Put the comparison page into a Space.\n\n"
    "\b\nExample:\n  rlhf-zoo space deploy local/tiny-world-ppo --hub local",
)
