"""From a stage's directory to the Hub: pending checkpoints with the card of their step, and the final card."""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path

from ..errors import ZooError
from ..hub.card import make_card
from ..hub.publish import (
    PUBLISHED,
    publish_checkpoint,
    publish_folder,
    published_tags,
    tag_name,
    tag_revision,
    unpublished,
)
from ..record import StageRecord, checkpoint_step, read_json, write_json
from .context import RunContext

__all__ = ["release_best", "send_pending"]

log = logging.getLogger(__name__)


def send_pending(context: RunContext, stage: str) -> list[Path]:
    """Sends the complete checkpoints that no Hub has, oldest first. Returns those that could not be sent.

    An unreachable Hub does not stop training: what is left is sent with the next checkpoint, at the end of the stage,
    or by `rlhf-zoo push`.
    """
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    record = context.record(stage)
    pending = unpublished(record)
    while pending:
        try:
            _send(context, record, pending[0])
        except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
            log.warning("%s was not sent (%s); it will be sent later.", pending[0], str(error).splitlines()[0])
            break
        pending.pop(0)
    return pending


def _send(context: RunContext, record: StageRecord, checkpoint: Path) -> None:
    stage, step = record.path.name, checkpoint_step(checkpoint)
    repo = context.repo(stage)
    tags = published_tags(record)
    record.write(repo={"id": repo, "commit": tags.get("best"), "tags": tags})
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_card(record.path, out=folder, step=step)
        partial = StageRecord(folder)
        if record.metrics_file.exists():
            shutil.copy(record.metrics_file, partial.metrics_file)
            partial.truncate_metrics(step)
        write_json(folder / "recipe.json", record.read()["resolved"])
        beside = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
        message = f"{context.recipe.name} {stage}: step {step}"
        published = publish_checkpoint(checkpoint, repo, beside=beside, message=message, private=context.private)
    tags[published["tag"]] = published["commit"]
    record.write(repo={"id": repo, "commit": published["commit"], "tags": tags})


def release_best(context: RunContext, stage: str, *, required: bool = True) -> None:
    """Sends what is pending, then the card of the finished stage, and tags that commit `best`.

    `best` is the last checkpoint. Raises ZooError when something could not be sent and `required`.
    """
    left = send_pending(context, stage)
    if left:
        if required:
            raise ZooError(
                f"{len(left)} checkpoints of {stage} could not be sent to {context.hub.described}: when it answers, "
                f"`rlhf-zoo push {context.directory}` sends them."
            )
        return
    record = context.record(stage)
    repo = context.repo(stage)
    last = record.last_checkpoint()
    assert last is not None
    with tempfile.TemporaryDirectory() as scratch:
        make_card(record.path, out=scratch)
        commit = publish_folder(
            Path(scratch),
            repo,
            repo_type="model",
            message=f"{context.recipe.name} {stage}: card of {tag_name(checkpoint_step(last))}",
        )
    tag_revision(repo, "best", commit, "the last checkpoint, with the card of the finished run")
    tags = {**published_tags(record), "best": commit}
    record.write(repo={"id": repo, "commit": commit, "tags": tags})
    write_json(last / PUBLISHED, {**read_json(last / PUBLISHED), "best": commit})
