"""Cells of a sweep on the Hub: the chosen checkpoint and card of each, as a tag of the recipe's PPO repository."""

import tempfile
from pathlib import Path

from ..errors import ZooError
from ..hub.client.claims import all_tags
from ..hub.client.publish import publish_on_branch
from ..hub.client.refusals import refusals_as
from ..modeling.integrity import check_integrity
from ..runs.context import RunContext
from .adapters import sent_instead
from .cards.card import make_card
from .sender import put_beside

#: The branch that the cells are commits of; `main` is the recipe's own run.
BRANCH = "sweep"


def send_cell(context: RunContext, cell: RunContext, tag: str) -> str | None:
    """Sends the chosen PPO checkpoint of a finished cell, unless the tag exists already.

    Args:
        context: The recipe's own run, which holds the repository.
        cell: The run of the cell.
        tag: The tag.

    Returns:
        The new commit; None where the tag existed.

    Raises:
        ZooError: The Hub refuses, or the checkpoint is gone.
    """
    record, repo, hub = cell.record("ppo"), context.repo("ppo"), context.hub
    what = f"The tag {tag} cannot be sent to {repo} on {hub.described}"
    with refusals_as(what, "the same command sends it and trains nothing again."):
        recorded = record.read().get("repo") or {}
        is_tagged = recorded.get("id") == repo and all_tags(repo, hub=hub).get(tag) == recorded["commit"]
        if is_tagged and record.read().get("hub") == hub.label:
            return None
        chosen = record.chosen_checkpoint()
        if chosen is None:
            raise ZooError(f"{record.path} is finished and its chosen checkpoint is gone: give --restart.")
        check_integrity(chosen)
        record.write(cell=tag, hub=hub.label, repo={"id": repo, "commit": None, "tags": {}})
        with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as altered:
            put_beside(record, Path(scratch), "ppo", step=None)
            commit = publish_on_branch(
                chosen,
                repo,
                run=context.run_id("ppo"),
                extra_files=Path(scratch),
                message=f"{context.recipe.name} ppo: {tag}",
                tag=tag,
                branch=BRANCH,
                overrides=sent_instead(cell, record, chosen, Path(altered)),
                hub=hub,
            )
        record.write(repo={"id": repo, "commit": commit, "tags": {tag: commit}})
        make_card(record.path)
        return commit
