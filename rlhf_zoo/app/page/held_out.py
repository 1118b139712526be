"""Prompts that no policy was trained on, from the data set that a checkpoint names."""

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import ZooError
from ...fileio import parse_json
from ...hub.client.connect import CLIENT, Hub
from ...hub.client.refusals import reason, refusals_as
from ...modeling.chat import display_text
from ...modeling.chat_template import is_conversation
from ...publishing.catalog.card import Card
from ...publishing.catalog.lineage import Lineage
from ...runs.data.columns import filled, is_text
from ...runs.data.turns import messages_of
from ...runs.record import StageRecord
from ...runs.settings.key_classes import check_repository

log = logging.getLogger(__name__)

CONFIGURATION = "prompts"
#: The first that there is: votes may become training data, and test prompts must stay out of that.
SPLITS = ("validation", "test")
MOST = 1000  # prompts


def held_out_prompts(lineage: Lineage, refuses: Callable[[str], object], hub: Hub = CLIENT) -> list[str]:
    """Reads held-out prompts of the data set that the checkpoint's card names, at its commit, each once.

    Where the data set cannot be had, it takes those that the card itself holds.

    Args:
        lineage: The checkpoint, and its card.
        refuses: Raises ZooError for a prompt that the models cannot take.
        hub: Where the data set is.

    Returns:
        Up to `MOST` prompts.
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
    """Finds the stage directory that a folder is, or that its checkpoint lies in.

    Args:
        folder: Any folder.

    Returns:
        The directory; None for any other folder.
    """
    places = (folder, folder.parent) if folder.is_dir() else ()
    return next((place for place in places if StageRecord(place).run_file.is_file()), None)


def _of_data(lineage: Lineage, hub: Hub) -> list[str]:
    """[] where there are none, for whatever reason: the log has it."""
    configuration, column, named = lineage.prompts_at
    for location, load in _sources(lineage, configuration, hub):
        for split in dict.fromkeys(filter(None, (named, *SPLITS))):
            try:
                texts = _prompts_in(load(configuration, split), column, location)
            except (ValueError, OSError, ZooError) as error:
                log.info("%s has no held-out prompts in the split %s (%s).", location, split, reason(error))
                continue
            if texts:
                return texts
    return []


def _sources(
    lineage: Lineage, configuration: str | None, hub: Hub
) -> Iterator[tuple[str, Callable[[str | None, str], Iterable[Any]]]]:
    """(data set, what loads a configuration and split of it): beside a stage's folder, and on the Hub."""
    stage = stage_of(Path(lineage.ppo.name))
    if stage is not None and StageRecord(stage).is_own():
        yield str(stage.parent / "data"), partial(_rows_beside, stage.parent / "data")
    for parent in Card(lineage.card).parents:
        if parent.role == "data" and parent.repo is not None and parent.commit is not None:
            yield parent.repo, partial(_published_rows, lineage, stage, parent.repo, parent.commit, hub)


def _rows_beside(data: Path, configuration: str | None, split: str) -> list[Any]:
    """Rows of the data in a run directory. Raises ZooError for a name, which is a card's word, that leads out of it."""
    path = data / (configuration or CONFIGURATION) / f"{split}.jsonl"
    if not path.resolve().is_relative_to(data.resolve()):
        raise ZooError(f"Its card names the split {split!r:.80} of {configuration!r:.80}, which lies outside of it.")
    return [parse_json(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _published_rows(
    lineage: Lineage, stage: Path | None, repo: str, commit: str, hub: Hub, configuration: str | None, split: str
) -> Iterator[Any]:
    """Rows of a data set that a card names.

    A page shows prompts to its visitors and sends them with votes, and the token of who serves it may read more than
    they may. So the data set of a stranger's card is one that everybody may read, or that of a private model.

    Raises:
        ZooError: The Hub does not give it, something here has its name, or it is private or gated.
    """
    from ...runs.data.sources import find_data

    check_repository(repo, key="parents.data", where=f"The card of {lineage.ppo.name}")
    own = stage is not None and StageRecord(stage).is_own()
    if not own and not _is_readable(lineage.ppo.repo, repo, hub):
        raise ZooError(f"Not everybody may read {repo}, so its prompts are not shown on the page of a public model.")
    rows = find_data(repo, commit, hub).load(configuration, split, columns=[])
    column = lineage.prompts_at[1]
    if not is_text(column):  # the others need not be decoded
        rows = rows.select_columns([column] if column in rows.column_names else [])
    return iter(rows)


def _is_readable(model: str | None, data: str, hub: Hub) -> bool:
    """Whether everybody who may read a model (None: a folder's, which anybody may have made) may read a data set."""
    with refusals_as(f"{data} cannot be looked at on {hub.name}", "check --hub and the token."):
        info = hub.api().dataset_info(data)
        if not info.private and not info.gated:
            return True
        return model is not None and bool(hub.api().model_info(model).private)


def _prompts_in(rows: Iterable[Any], column: str, location: str) -> list[str]:
    """Texts of prompts, and of conversations that are one user's turn what that says."""
    made, of = is_text(column), f"The data set {location}"
    prompts = (
        filled(column, row, of=of, place=place) if made else messages_of(row.get(column), of=of)
        for place, row in enumerate(row for row in rows if isinstance(row, dict))
    )
    return [
        display_text(prompt)
        for prompt in prompts
        if isinstance(prompt, str) or (prompt and is_conversation(prompt) and len(prompt) == 1)
    ]
