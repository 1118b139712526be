"""Publishes each cell (run) of a sweep as a tag of the recipe's PPO repository: its chosen checkpoint and card."""

import tempfile
from pathlib import Path

from ..errors import ZooError
from ..hub.client.claims import all_tags
from ..hub.client.publish import publish_on_branch
from ..hub.client.refusals import translate_hub_errors
from ..modeling.integrity import check_integrity
from ..runs.context import RunContext
from .adapters import file_overrides
from .cards.card import make_card
from .sender import write_extra_files

#: The branch for the commits of the cells, because `main` belongs to the recipe's own run.
BRANCH = "sweep"


def send_cell(context: RunContext, cell: RunContext, tag: str) -> str | None:
    """Sends the chosen PPO checkpoint of a finished cell, and moves the tag to it if the tag exists.

    Sends nothing if the tag already points to the commit that the cell's run.json records.

    Args:
        context: The recipe's own run, which claimed the repository.
        cell: The run of the cell.
        tag: The cell's name, which becomes the tag.

    Returns:
        The new commit; None if nothing was sent.

    Raises:
        ZooError: The Hub refuses, or the checkpoint is missing or damaged.
    """
    record, repo, hub = cell.record("ppo"), context.repo("ppo"), context.hub
    failure = f"Cannot send the tag {tag} to {repo} on {hub.description}"
    with translate_hub_errors(failure, "run the same command again; it does not train again."):
        document = record.read()
        sent = document.get("repo") or {}
        is_sent = (sent.get("id"), document.get("hub")) == (repo, hub.label)
        if is_sent and all_tags(repo, hub=hub).get(tag) == sent["commit"]:
            return None
        checkpoint = record.chosen_checkpoint()
        if checkpoint is None:
            raise ZooError(f"{record.path} is finished but its chosen checkpoint is missing: pass --restart.")
        check_integrity(checkpoint)
        record.write(cell=tag, hub=hub.label, repo={"id": repo, "commit": None, "tags": {}})
        with tempfile.TemporaryDirectory() as extra_folder, tempfile.TemporaryDirectory() as override_folder:
            write_extra_files(record, Path(extra_folder), "ppo", step=None)
            commit = publish_on_branch(
                checkpoint,
                repo,
                run_id=context.run_id("ppo"),
                extra_files=Path(extra_folder),
                message=f"{context.recipe.name} ppo: {tag}",
                tag=tag,
                branch=BRANCH,
                overrides=file_overrides(cell, record, checkpoint, Path(override_folder)),
                hub=hub,
            )
        record.write(repo={"id": repo, "commit": commit, "tags": {tag: commit}})
        make_card(record.path)
        return commit
