"""Checks, before training, that every split of a run exists in a form that its stage can read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets

from ...errors import ZooError
from ...hub.client.connect import DEFAULT_HUB, Hub
from ...hub.client.refusals import reason
from ...modeling.chat_template import ChatSettings
from ..data.columns import keep_rows_above, row_value
from ..data.layout import Form, convert_rows, has_conversations
from ..data.sources import NoSuchPart, find_data
from ..data.tables import dataset_of
from ..dataset import FORMS, evaluation_split, text_column_of
from ..settings.evaluation import LabeledArguments
from ..settings.parse import RecipeConfig, StageSettings


def check_forms(
    shared: RecipeConfig, stages: Mapping[str, StageSettings], hub: Hub = DEFAULT_HUB, *, every_row: bool = False
) -> dict[str, str]:
    """Checks that stages can read their data, as far as possible without downloading whole data sets.

    Args:
        shared: The keys of recipe.yaml, which all stages share.
        stages: Stage -> settings.
        hub: Where Hub ids are looked up. If it does not answer, the stage itself checks later.
        every_row: Whether to check every row of local files, rather than only the first row.

    Returns:
        Data set -> why it could not be checked.

    Raises:
        ZooError: A stage cannot read a split, a column or a row.
    """
    loader = _RowLoader(shared, hub, every_row=every_row)
    for stage, settings in stages.items():
        if stage == "reward" and settings.data.simulated_pairs is not None:
            continue
        label, data, text_column = f"the stage {stage}", settings.data, text_column_of(settings)
        rows = loader.rows(data, data.dataset_train_split, FORMS[stage], subject=label, text_column=text_column)
        for split in ("dataset_test_split", "dataset_validation_split"):
            if getattr(data, split, None) is not None:
                loader.rows(data, getattr(data, split), FORMS[stage], subject=label, text_column=text_column)
        if stage == "ppo":
            loader.rows(data, evaluation_split(shared, data)[0], "prompts", subject="the evaluation")
        if rows is not None and shared.chat != ChatSettings() and not has_conversations(rows):
            raise ZooError(
                f"The data set {settings.data.dataset_name or shared.dataset_name} of {label} has plain texts, but "
                "recipe.yaml configures how conversations are rendered: set conversational to true, or remove "
                "system_prompt, chat_template_kwargs and strip_thoughts."
            )
    return loader.unchecked_reasons


def local_rows(
    shared: RecipeConfig, settings: StageSettings, hub: Hub = DEFAULT_HUB, split: str | None = None
) -> datasets.Dataset | None:
    """Loads a split of a stage's data, in the stage's form, if it is on this machine.

    Args:
        shared: The keys of recipe.yaml, which all stages share.
        settings: Settings of the stage.
        hub: The Hub.
        split: The split; None for the training split.

    Returns:
        The rows; None if they are not on this machine.

    Raises:
        ZooError: The stage cannot read the rows.
    """
    data = settings.data
    name = data.dataset_name or (shared.dataset_name if shared.corpus is None else None)
    if name is None or not Path(name).exists():
        return None
    loader = _RowLoader(shared, hub, every_row=True)
    label, form, text_column = f"the stage {settings.stage}", FORMS[settings.stage], text_column_of(settings)
    return loader.rows(data, split or data.dataset_train_split, form, subject=label, text_column=text_column)


def check_judge_data(
    shared: RecipeConfig, data: LabeledArguments, form: Form, hub: Hub, *, subject: str
) -> dict[str, str]:
    """Checks the rows that a judge learns from or is measured on, in the same way as `check_forms`.

    Args:
        shared: The keys of recipe.yaml, which all stages share.
        data: The keys that name the data set, its split and its columns.
        form: The form of the rows.
        hub: Where Hub ids are looked up.
        subject: The reader of the rows, such as a judge, for messages.

    Returns:
        Data set -> why it could not be checked.

    Raises:
        ZooError: The rows do not have the form.
    """
    loader = _RowLoader(shared, hub)
    loader.rows(data, data.dataset_train_split, form, subject=subject)
    return loader.unchecked_reasons


class _RowLoader:
    """Loads rows for checks, each split only once. `unchecked_reasons`: data set -> why it could not be checked."""

    def __init__(self, shared: RecipeConfig, hub: Hub, *, every_row: bool = False) -> None:
        self.shared, self.hub, self.every_row, self.unchecked_reasons = shared, hub, every_row, dict[str, str]()
        self._rows_by_split: dict[Any, datasets.Dataset | None] = {}

    def rows(
        self, data: Any, split: str, form: Form, *, subject: str, text_column: str = "text"
    ) -> datasets.Dataset | None:
        """Returns a split's first row in `form`, or all rows of local files if `every_row`.

        None if the corpus makes the data, the data set cannot be loaded from a Hub, or the split is empty.

        Raises:
            ZooError: A local file cannot be loaded, the split does not exist, or the rows cannot be read in that form.
        """
        shared = self.shared
        name = data.dataset_name or (shared.dataset_name if shared.corpus is None else None)
        revision = data.dataset_revision if data.dataset_name else shared.dataset_revision
        if name is None or name in self.unchecked_reasons:
            return None
        key = (name, revision, data.dataset_config, split)
        if key not in self._rows_by_split:
            self._rows_by_split[key] = self._load(*key, subject=subject)
        if (rows := self._rows_by_split[key]) is None:
            return None
        is_whole_split = self._loads_whole(name)
        split_text = f", split {split}," if is_whole_split else ""
        label = f"The data set {name}{split_text} of {subject}"
        if is_whole_split:
            rows = keep_rows_above(rows, data.keep_above, subject=label)
        else:  # `keep_above` may drop the first row of a data set that the stage can read
            for column in data.keep_above:
                row_value(rows[0], column, subject=label)
        return convert_rows(
            rows, form, columns=data.columns, as_chat=shared.conversational, subject=label, text_column=text_column
        )

    def _loads_whole(self, name: str) -> bool:
        """Whether whole splits of a data set are loaded, rather than only their first rows."""
        return self.every_row and Path(name).exists()

    def _load(
        self, name: str, revision: str | None, configuration: str | None, split: str, *, subject: str
    ) -> datasets.Dataset | None:
        source = find_data(name, revision, self.hub)
        try:
            if self._loads_whole(name):
                return source.load(configuration, split, columns=[])  # `convert_rows` checks the columns
            first_row = source.first_row(configuration, split)
        except NoSuchPart as error:
            raise NoSuchPart(f"{str(error).removesuffix('.')} of {subject}.") from error
        except ZooError as error:
            if Path(name).exists():
                raise
            self.unchecked_reasons[name] = source.outage or reason(error.__cause__ or error)
            return None
        return None if first_row is None else dataset_of({column: [value] for column, value in first_row.items()})
