"""From a stage's directory to the Hub: pending checkpoints with the card of their step, and the final card."""

from __future__ import annotations

import logging
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ZooError
from ..hub.card import make_card
from ..hub.publish import (
    PUBLISHED,
    RECIPE_FILE,
    drop_tags,
    publish_checkpoint,
    publish_folder,
    published_recipe,
    published_tags,
    tag_name,
    tag_revision,
    unpublished,
)
from ..hub.refusals import client_errors, is_disk_full, reason, refusals_as
from ..record import StageRecord, checkpoint_step, fingerprint, first_difference, read_json, write_json
from .context import RunContext

__all__ = ["check_repository", "release_best", "send_pending"]

log = logging.getLogger(__name__)


def check_repository(context: RunContext, stage: str, resolved: Mapping[str, Any]) -> None:
    """Raises ZooError where the stage's repository holds a run of other settings: one would overwrite the other.

    --restart says that it may: the other run's tags go.
    """
    repo = context.repo(stage)
    with refusals_as(f"{repo} cannot be looked at on {context.hub.described}", "try again when the Hub answers."):
        there = published_recipe(repo)
        if there is None or fingerprint(there) == fingerprint(resolved):
            return
        if context.overwrite:
            drop_tags(repo)
            return
    key = first_difference(there, resolved)
    raise ZooError(
        f"{repo} on {context.hub.label} holds another run (its {key} differs), which this one would overwrite: publish "
        "under another --namespace, or give --restart to replace it."
    )


def send_pending(context: RunContext, stage: str) -> list[Path]:
    """Sends the complete checkpoints that the Hub has not, oldest first. Returns those that could not be sent.

    An unreachable Hub does not stop training: what is left is sent with the next checkpoint, at the end of the stage,
    or by `rlhf-zoo push`.
    """
    record = context.record(stage)
    pending = unpublished(record, context.repo(stage), hub=context.hub.label)
    while pending:
        try:
            _send(context, record, pending[0])
        except client_errors() as error:
            if is_disk_full(error):
                raise
            log.warning("%s was not sent (%s); it will be sent later.", pending[0], reason(error))
            break
        pending.pop(0)
    return pending


def _send(context: RunContext, record: StageRecord, checkpoint: Path) -> None:
    stage, step = record.path.name, checkpoint_step(checkpoint)
    repo, hub = context.repo(stage), context.hub.label
    tags = published_tags(record, repo, hub=hub)
    record.write(hub=hub, repo={"id": repo, "commit": next(reversed(tags.values()), None), "tags": tags})
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_card(record.path, out=folder, step=step)
        partial = StageRecord(folder)
        if record.metrics_file.exists():
            shutil.copy(record.metrics_file, partial.metrics_file)
            partial.truncate_metrics(step)
        write_json(folder / RECIPE_FILE, record.read()["resolved"])
        beside = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
        message = f"{context.recipe.name} {stage}: step {step}"
        published = publish_checkpoint(
            checkpoint, repo, hub=hub, beside=beside, message=message, private=context.private
        )
    tags[published["tag"]] = published["commit"]
    record.write(repo={"id": repo, "commit": published["commit"], "tags": tags})


def release_best(context: RunContext, stage: str) -> None:
    """Sends what is pending, then the card of the finished stage, and tags that commit `best`.

    `best` is the last checkpoint. Raises ZooError when something could not be sent.
    """
    record, repo, hub = context.record(stage), context.repo(stage), context.hub
    what, mend = f"The checkpoints of {stage} cannot be sent to {hub.described}", _mend(context)
    if not context.overwrite:
        check_repository(context, stage, record.read()["resolved"])
    with refusals_as(what, mend):
        _forget_lost(record, repo, hub.label)
    if left := send_pending(context, stage):
        raise ZooError(f"{len(left)} of {what[0].lower()}{what[1:]}: {mend}")
    last = record.last_checkpoint()
    assert last is not None
    tags = published_tags(record, repo, hub=hub.label)
    # The card names the tag `best`, which is to point at the commit that holds the card.
    before = (record.read().get("repo") or {}).get("tags", {}).get("best", tags[tag_name(checkpoint_step(last))])
    record.write(hub=hub.label, repo={"id": repo, "commit": before, "tags": {**tags, "best": before}})
    with tempfile.TemporaryDirectory() as scratch, refusals_as(what, mend):
        make_card(record.path, out=scratch)
        commit = publish_folder(
            Path(scratch),
            repo,
            repo_type="model",
            message=f"{context.recipe.name} {stage}: card of {tag_name(checkpoint_step(last))}",
            private=context.private,
        )
        tag_revision(repo, "best", commit, "the last checkpoint, with the card of the finished run")
    record.write(hub=hub.label, repo={"id": repo, "commit": commit, "tags": {**tags, "best": commit}})
    write_json(last / PUBLISHED, {**read_json(last / PUBLISHED), "best": commit})


def _mend(context: RunContext) -> str:
    command = f"rlhf-zoo push {shlex.quote(str(context.directory))} --hub {context.hub.label}"
    return f"when it answers, `{command}` sends them."


def _forget_lost(record: StageRecord, repo: str, hub: str) -> None:
    """Counts nothing as sent to a Hub that has lost it: the embedded one's folder may be emptied at any time."""
    from huggingface_hub import HfApi

    sent = published_tags(record, repo, hub=hub)
    if sent and not HfApi().revision_exists(repo, next(reversed(sent.values()))):
        for checkpoint in record.checkpoints():
            (checkpoint / PUBLISHED).unlink(missing_ok=True)
