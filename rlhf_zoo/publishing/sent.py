"""Which checkpoints of a stage a Hub has acknowledged, by run.json and by published.json in each checkpoint."""

from pathlib import Path

from ..fileio import read_json
from ..hub.client.publish import PUBLISHED
from ..runs.record import StageRecord, checkpoint_step


def unpublished(record: StageRecord, repo_id: str, *, hub: str) -> list[Path]:
    """Complete checkpoints to be sent that this Hub has not acknowledged under `repo_id` yet, oldest first.

    With push_steps those are its multiples and, of a finished stage, the last and the chosen one.
    """
    document = record.read()
    every = (document.get("resolved") or {}).get("push_steps") or 1
    ends: set[Path | None] = set()
    if document.get("status") == "finished":
        ends = {record.last_checkpoint(), record.chosen_checkpoint()}
    wanted = [path for path in record.checkpoints() if checkpoint_step(path) % every == 0 or path in ends]
    return [path for path in wanted if not _acknowledged(path, repo_id, hub)]


def published_tags(record: StageRecord, repo_id: str, *, hub: str) -> dict[str, str]:
    """Tag -> commit of what was sent to this Hub under `repo_id`; checkpoints deleted since then are among them."""
    document = record.read()
    repo = document.get("repo") or {}
    known = dict(repo.get("tags", {})) if (repo.get("id"), document.get("hub")) == (repo_id, hub) else {}
    found = (_acknowledged(path, repo_id, hub) for path in record.checkpoints())
    tags = known | {sent["tag"]: sent["commit"] for sent in found if sent}
    return {tag: tags[tag] for tag in sorted(tags, key=lambda tag: (tag == "best", tag))}


def _acknowledged(checkpoint: Path, repo_id: str, hub: str) -> dict[str, str]:
    """published.json if it speaks of this repository on this Hub, else {}."""
    path = checkpoint / PUBLISHED
    sent = read_json(path) if path.is_file() else {}
    return sent if (sent.get("repo"), sent.get("hub")) == (repo_id, hub) else {}
