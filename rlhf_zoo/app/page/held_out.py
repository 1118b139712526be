"""Prompts that no policy was trained on, from the data set that a checkpoint names."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from ...errors import ZooError
from ...hub.client.connect import CLIENT, Hub
from ...hub.client.refusals import reason
from ...modeling.chat import display_text
from ...modeling.chat_template import is_conversation
from ...publishing.catalog.card import Card
from ...publishing.catalog.lineage import Lineage
from ...runs.data.columns import filled, is_text
from ...runs.data.turns import messages_of
from ...runs.record import StageRecord

log = logging.getLogger(__name__)

CONFIGURATION = "prompts"
#: The first that there is: votes may become training data, and test prompts must stay out of that.
SPLITS = ("validation", "test")
MOST = 1000  # prompts


def held_out_prompts(lineage: Lineage, refuses: Callable[[str], object], hub: Hub = CLIENT) -> list[str]:
    """Up to `MOST` held-out prompts of the data set that the checkpoint's card names, at its commit, each once.

    refuses(prompt) raises ZooError for those that the models cannot take. Where the data set cannot be had, those that
    the card itself holds.
    """
    prompts: list[str] = []
    for prompt in dict.fromkeys(_of_data(lineage, hub) or lineage.prompts):
        if len(prompts) == MOST:
            break
        try:
            refuses(prompt)
        except ZooError:
            continue
        prompts.append(prompt)
    return prompts


def stage_of(folder: Path) -> Path | None:
    """The stage directory that a folder is, or that its checkpoint lies in; None for any other."""
    places = (folder, folder.parent) if folder.is_dir() else ()
    return next((place for place in places if StageRecord(place).run_file.is_file()), None)


def _of_data(lineage: Lineage, hub: Hub) -> list[str]:
    """[] where there are none, for whatever reason: the log has it."""
    configuration, column, named = lineage.prompts_at
    for location, revision in _places(lineage, configuration):
        for split in dict.fromkeys(filter(None, (named, *SPLITS))):
            try:
                found = _loaded(location, revision, configuration, split, column, hub)
            except (ValueError, OSError, ZooError) as error:
                log.info("%s has no held-out prompts in the split %s (%s).", location, split, reason(error))
                continue
            if found:
                return found
    return []


def _places(lineage: Lineage, configuration: str | None) -> Iterator[tuple[str, str | None]]:
    """(data set, revision): beside a stage's folder, and on the Hub."""
    stage = stage_of(Path(lineage.ppo.name))
    if stage is not None and (stage.parent / "data" / (configuration or CONFIGURATION)).is_dir():
        yield str(stage.parent / "data"), None
    for parent in Card(lineage.card).parents:
        if parent.role == "data" and parent.repo is not None and parent.commit is not None:
            yield parent.repo, parent.commit


def _loaded(
    location: str, revision: str | None, configuration: str | None, split: str, column: str, hub: Hub
) -> list[str]:
    """Texts of prompts, and of conversations that are one user's turn what that says."""
    made = is_text(column)
    if Path(location).is_dir():
        import json

        path = Path(location) / (configuration or CONFIGURATION) / f"{split}.jsonl"
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        rows = [row for row in rows if isinstance(row, dict)]
    else:
        from ...runs.data.sources import find_data

        rows = find_data(location, revision, hub).load(configuration, split, columns=[])
        if not made:
            rows = rows.select_columns([column]) if column in rows.column_names else []
    of = f"The data set {location}"
    prompts = (
        filled(column, row, of=of, place=place) if made else messages_of(row.get(column), of=of)
        for place, row in enumerate(rows)
    )
    return [
        display_text(one) for one in prompts if isinstance(one, str) or (one and is_conversation(one) and len(one) == 1)
    ]
