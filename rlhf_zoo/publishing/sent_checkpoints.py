"""Lists the checkpoints of a stage that a Hub has or has not acknowledged, according to run.json and published.json."""

from pathlib import Path

from ..hub.client.publish import read_publication
from ..runs.record import COMPLETE, StageRecord, checkpoint_step


def unsent_checkpoints(record: StageRecord, repo_id: str, *, hub_label: str) -> list[Path]:
    """Returns the folders of the unsent checkpoints, oldest first.

    Without push_steps, all complete checkpoints are to be sent. With it, only those at its multiples are, and once the
    stage has finished, also the last and the chosen checkpoint.

    Args:
        record: The stage's directory.
        repo_id: NAMESPACE/NAME.
        hub_label: See `Hub.label`.
    """
    document = record.read()
    push_steps = (document.get("resolved") or {}).get("push_steps") or 1
    final_checkpoints: set[Path | None] = set()
    if document.get("status") == "finished":
        final_checkpoints = {record.last_checkpoint(), record.chosen_checkpoint()}
    unsent_paths = [
        path
        for path in record.checkpoints()
        if (checkpoint_step(path) % push_steps == 0 or path in final_checkpoints)
        and not _acknowledgment(path, repo_id, hub_label)
    ]
    # Another thread may have deleted a sent checkpoint meanwhile, and COMPLETE before its other files.
    return [path for path in unsent_paths if (path / COMPLETE).is_file()]


def published_tags(record: StageRecord, repo_id: str, *, hub_label: str) -> dict[str, str]:
    """Returns the tags that were sent to a repository, including tags of checkpoints that were deleted since.

    Args:
        record: The stage's directory.
        repo_id: NAMESPACE/NAME.
        hub_label: See `Hub.label`.

    Returns:
        Tag -> commit, with `best` last.
    """
    document = record.read()
    repo = document.get("repo") or {}
    tags_in_record = dict(repo.get("tags", {})) if (repo.get("id"), document.get("hub")) == (repo_id, hub_label) else {}
    acknowledgments = (_acknowledgment(path, repo_id, hub_label) for path in record.checkpoints())
    tags = tags_in_record | {entry["tag"]: entry["commit"] for entry in acknowledgments if entry}
    return {tag: tags[tag] for tag in sorted(tags, key=lambda tag: (tag == "best", tag))}


def _acknowledgment(checkpoint: Path, repo_id: str, hub_label: str) -> dict[str, str]:
    """Returns published.json if it names this repository on this Hub, else {}."""
    publication = read_publication(checkpoint)
    return publication if (publication.get("repo"), publication.get("hub")) == (repo_id, hub_label) else {}
