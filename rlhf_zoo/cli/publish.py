"""`rlhf-zoo card|push`: writes a run's cards, and sends the run to a Hub."""

from pathlib import Path
from typing import Any

import click

from ..errors import ZooError
from ..runs.registry import STAGES
from .common import loading
from .layout import Command
from .open_run import locked, run_context
from .options import NAMESPACE, OVERWRITE, PATIENCE, PRIVATE, PUBLISHING_HUB, TRUST_RUN, UserPath


@click.command(cls=Command)
@click.argument("run", type=UserPath())
@click.option("--step", type=int, help="Describe the state at this step.  [default: the last step]")
@TRUST_RUN
def card(run: Path, step: int | None) -> None:
    """Write the cards of a run again, from its directory alone.

    RUN is the directory of a run, or of one of its stages.

    \b
    Example:
      rlhf-zoo card runs/demo/ppo
    """
    from ..publishing.cards.card import make_card
    from ..runs.record import StageRecord

    for folder in _stage_directories(run):
        StageRecord(folder).check_own()
        # Training locks the directory of the run, which contains the directories of its stages.
        with locked(folder.absolute().parent if folder.name in STAGES else folder):
            click.echo(str(make_card(folder, step=step)))


@click.command(cls=Command)
@click.argument("run", type=UserPath())
@click.option("--resume", is_flag=True, help="Publish what training left unpublished, on the same Hub.")
@PUBLISHING_HUB
@NAMESPACE
@PRIVATE
@PATIENCE
@OVERWRITE
@TRUST_RUN
@click.option(
    "--base", help="NAMESPACE/NAME[@REVISION] of the base model of LoRA adapters, if training read it from a folder."
)
def push(
    run: Path,
    resume: bool,
    hub: str | None,
    namespace: str | None,
    private: bool,
    base: str | None,
    **options: Any,
) -> None:
    """Publish a run: send the checkpoints and cards that the Hub does not have yet.

    RUN is the directory of a run, or of one of its stages. Checkpoints are sent in the order in which they were saved.
    With --resume, the Hub, the namespace and the stages are those that were chosen for training.

    \b
    Example:
      rlhf-zoo push runs/demo --hub local
      rlhf-zoo push --resume runs/demo
    """
    folders = [folder for folder in _stage_directories(run) if folder.name in STAGES]
    if not folders:
        raise ZooError(f"{run} holds nothing to publish: give the directory of a run, or of its {' or '.join(STAGES)}.")
    # After the check of the path, because these imports take seconds.
    with loading("loading the publisher"):
        from ..hub.client.run_signature import TRUST_RUN_FLAG
        from ..pipeline.experiments.runner import variant_fields
        from ..runs.recipe import Recipe
        from ..runs.record import StageRecord
        from ..runs.rounds import round_fields

    documents = [StageRecord(folder).read() for folder in folders]
    if resume:
        destination = next((document["publish"] for document in documents if document.get("publish")), None)
        if destination is None:
            raise ZooError(f"{run} was trained without publishing: leave --resume out, and name a Hub with --hub.")
        is_address = "://" in str(destination["hub"])  # a forged address would receive the user's token
        if is_address and not all(StageRecord(folder).is_own() for folder in folders):
            raise ZooError(
                f"{run} was not written by your rlhf-zoo, or was changed since, and names {destination['hub']} as the "
                f"Hub to send to: leave --resume out and name a Hub with --hub, or add {TRUST_RUN_FLAG} if you trust "
                "this run."
            )
        if hub not in (None, destination["hub"]) or namespace not in (None, destination["namespace"]):
            raise ZooError(
                f"--resume sends {run} to {destination['namespace']} on {destination['hub']}, where training was to "
                "publish it: leave --resume out to publish the run elsewhere."
            )
        hub, namespace, private = destination["hub"], destination["namespace"], private or destination["private"]
    root = folders[0].parent
    with run_context(
        Recipe(documents[0]["recipe"], root, {}, {}),  # only its name is used: nothing is trained
        {},
        output_dir=root,
        hub=hub,
        push_to_hub=True,
        namespace=namespace,
        private=private,
        stages=None if resume else tuple(folder.name for folder in folders),
        resend_cards=not resume,
        **(variant_fields(root) or round_fields(root)),
        **options,
    ) as (context, publisher):
        assert publisher is not None
        if base is not None:
            from ..publishing.adapters import record_base_repository

            record_base_repository(context, [folder.name for folder in folders], base)
        publisher.drain()
        for folder in folders:
            repo = StageRecord(folder).read().get("repo") or {}
            if repo.get("id") == context.repo(folder.name):
                click.echo(f"{repo['id']}: {', '.join(repo['tags']) or 'nothing to send'}")


def _stage_directories(run: Path) -> list[Path]:
    """Returns the stage directories of a run; the directory of a stage is returned alone."""
    if (run / "run.json").is_file():
        return [run]
    directories = [run / stage for stage in STAGES if (run / stage / "run.json").is_file()]
    if not directories:
        raise ZooError(f"There is no run in {run}: pass a run directory, such as runs/tiny-world.")
    return directories
