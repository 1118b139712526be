"""Reads held-out prompts from the data of the user's own run, or else from the data set that a card names."""

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import ZooError
from ...fileio import get_nested, parse_json
from ...hub.client.connect import DEFAULT_HUB, Hub
from ...hub.client.refusals import reason, translate_hub_errors
from ...modeling.chat import display_text
from ...modeling.chat_template import is_conversation
from ...publishing.catalog.card import Card
from ...publishing.catalog.lineage import Lineage
from ...runs.data.columns import fill_placeholders, has_placeholders
from ...runs.data.turns import messages_of
from ...runs.record import StageRecord
from ...runs.settings.key_classes import check_repository

log = logging.getLogger(__name__)

DEFAULT_CONFIGURATION = "prompts"
#: Splits to try, in order. Validation comes before test, because votes may become training data.
SPLITS = ("validation", "test")
MAX_PROMPTS = 1000
#: Largest number of rows of a split that `read_held_out_columns` reads.
MAX_ROWS = 10_000


def read_held_out_prompts(lineage: Lineage, check: Callable[[str], object], hub: Hub = DEFAULT_HUB) -> list[str]:
    """Reads distinct held-out prompts.

    They come from the data of the user's own run directory, or else from the data set that the checkpoint's card names,
    at the commit in the card, or else from the prompts in the card itself.

    Args:
        lineage: The checkpoint and its card.
        check: Raises ZooError for a prompt that the models cannot process.
        hub: The Hub with the data set.

    Returns:
        Up to `MAX_PROMPTS` prompts.
    """
    prompts: list[str] = []
    for prompt in dict.fromkeys(_read_dataset_prompts(lineage, hub) or lineage.prompts):
        if len(prompts) == MAX_PROMPTS:
            break
        with contextlib.suppress(ZooError):
            check(prompt)
            prompts.append(prompt)
    return prompts


def read_held_out_columns(lineage: Lineage, hub: Hub = DEFAULT_HUB) -> dict[str, dict[str, Any]]:
    """Reads the other columns of held-out prompts, such as right answers and instructions, which rules need.

    Args:
        lineage: The checkpoint and its card.
        hub: The Hub with the data set.

    Returns:
        Prompt as the page shows it, without surrounding white space -> its row, under the column names that rewards
        get; {} if no data can be read.
    """
    configuration, column, _ = lineage.prompts_location
    column_names = get_nested(lineage.card, "settings", "columns")  # name that rewards get -> name in the data set
    renames = list(column_names.items()) if isinstance(column_names, dict) else []
    columns_by_prompt: dict[str, dict[str, Any]] = {}
    for location, load in _iterate_sources(lineage, hub, all_columns=True):
        for split in _list_splits(lineage):
            try:
                rows = list(itertools.islice(load(configuration, split), MAX_ROWS))
                for prompt, row in _iterate_prompts(rows, column, location):
                    renamed_columns = {key: row[name] for key, name in renames if isinstance(name, str) and name in row}
                    columns_by_prompt.setdefault(prompt.strip(), {**row, **renamed_columns})
            except (ValueError, OSError, ZooError) as error:
                log.info("Cannot read rows of the split %s of %s (%s).", split, location, reason(error))
        if columns_by_prompt:
            break
    return columns_by_prompt


def find_stage_folder(folder: Path) -> Path | None:
    """Returns the folder, or else its parent, if that is a stage directory; otherwise None.

    Args:
        folder: Any folder, such as a checkpoint.
    """
    folders = (folder, folder.parent) if folder.is_dir() else ()
    return next((candidate for candidate in folders if StageRecord(candidate).run_file.is_file()), None)


def _read_dataset_prompts(lineage: Lineage, hub: Hub) -> list[str]:
    """Returns held-out prompts; [] if there are none. Logs why a split cannot be read."""
    configuration, column, _ = lineage.prompts_location
    for location, load in _iterate_sources(lineage, hub):
        for split in _list_splits(lineage):
            try:
                texts = [prompt for prompt, _ in _iterate_prompts(load(configuration, split), column, location)]
            except (ValueError, OSError, ZooError) as error:
                log.info("Cannot read held-out prompts of the split %s of %s (%s).", split, location, reason(error))
                continue
            if texts:
                return texts
    return []


def _list_splits(lineage: Lineage) -> Iterable[str]:
    """Returns the splits that may have held-out prompts, starting with the split that the card names."""
    return dict.fromkeys(split for split in (lineage.prompts_location.split, *SPLITS) if split)


def _iterate_sources(
    lineage: Lineage, hub: Hub, *, all_columns: bool = False
) -> Iterator[tuple[str, Callable[[str | None, str], Iterable[object]]]]:
    """Yields (location, function that loads a configuration and split) of local data, then of published data sets."""
    stage_folder = find_stage_folder(Path(lineage.ppo.name))
    if stage_folder is not None and StageRecord(stage_folder).is_own():
        yield str(stage_folder.parent / "data"), partial(_read_local_rows, stage_folder.parent / "data")
    for parent in Card(lineage.card).parents:
        if parent.role == "data" and parent.repo is not None and parent.commit is not None:
            yield (
                parent.repo,
                partial(_read_published_rows, lineage, stage_folder, parent.repo, parent.commit, hub, all_columns),
            )


def _read_local_rows(folder: Path, configuration: str | None, split: str) -> list[object]:
    """Reads rows of a run directory's data. Raises ZooError if a name from the card leads out of that folder."""
    path = folder / (configuration or DEFAULT_CONFIGURATION) / f"{split}.jsonl"
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ZooError(f"The card names the split {split!r:.80} of {configuration!r:.80}, which is outside {folder}.")
    return [parse_json(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _read_published_rows(
    lineage: Lineage,
    stage_folder: Path | None,
    repo: str,
    commit: str,
    hub: Hub,
    all_columns: bool,
    configuration: str | None,
    split: str,
) -> Iterator[object]:
    """Reads rows of a data set that a card names.

    The page shows prompts to visitors and publishes them with votes, but its token may read more than visitors may. So
    a card that is not the user's own may name a private or gated data set only if the model is private too.

    Raises:
        ZooError: The data set cannot be read or may not be shown, or a local folder has the same name.
    """
    from ...runs.data.sources import find_data

    check_repository(repo, key="parents.data", where=f"The card of {lineage.ppo.name}")
    is_own = stage_folder is not None and StageRecord(stage_folder).is_own()
    if not is_own and not _may_show(lineage.ppo.repo, repo, hub):
        raise ZooError(f"{repo} is not public, so its prompts are not shown on the page of a public model.")
    rows = find_data(repo, commit, hub).load(configuration, split, columns=[])
    column = lineage.prompts_location.column
    # Other columns are not decoded unless the column is a template that reads them.
    if not all_columns and not has_placeholders(column):
        rows = rows.select_columns([column] if column in rows.column_names else [])
    return iter(rows)


def _may_show(model: str | None, dataset: str, hub: Hub) -> bool:
    """Whether a data set is public, or the model is private too. `model` is None for a local folder."""
    with translate_hub_errors(f"Cannot look up {dataset} on {hub.name}", "check --hub and the token."):
        info = hub.api().dataset_info(dataset)
        if not info.private and not info.gated:
            return True
        return model is not None and bool(hub.api().model_info(model).private)


def _iterate_prompts(rows: Iterable[object], column: str, location: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (prompt, row) for each prompt that is plain text or a conversation of a single message."""
    is_template, subject = has_placeholders(column), f"The data set {location}"
    for index, row in enumerate(row for row in rows if isinstance(row, dict)):
        prompt = (
            fill_placeholders(column, row, subject=subject, index=index)
            if is_template
            else messages_of(row.get(column), subject=subject)
        )
        if isinstance(prompt, str) or (prompt and is_conversation(prompt) and len(prompt) == 1):
            yield display_text(prompt), row
