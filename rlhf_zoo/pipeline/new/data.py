"""Inspects the splits and columns of a data set, and chooses the keys that each stage reads it with."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets

from ...errors import ZooError
from ...hub.client.checked_data import CheckedData, open_checked
from ...hub.client.connect import DEFAULT_HUB, SOURCE_FLAG
from ...hub.client.refusals import client_errors, reason, translate_lookup_errors
from ...modeling.chat_template import is_conversation
from ...modeling.prompt_keys import count_distinct_prompts
from ...runs.data.columns import has_placeholders, placeholder_columns
from ...runs.data.layout import Form, convert_rows
from ...runs.data.sources import file_problem
from ...runs.data.tables import dataset_of
from ...runs.data.turns import SHAREGPT_COLUMN, first_role

#: Maximum number of rows to count in a split whose size is not declared.
MAX_COUNTED = 5000
#: Number of rows to inspect in each split.
SAMPLE_ROWS = 200
#: Column of a stage -> usual names of this column in data sets, the likeliest first.
COLUMN_NAMES = {
    "prompt": ("prompt", "question", "instruction", "query", "problem", "input", "text"),
    "completion": ("completion", "answer", "output", "response", "solution"),
    "chosen": ("chosen", "chosen_response", "preferred"),
    "rejected": ("rejected", "rejected_response", "dispreferred"),
}
#: Form -> prefixes of training splits' names, the likeliest first.
TRAIN_SPLITS = {"texts": ("train_sft", "train"), "pairs": ("train_prefs", "train"), "prompts": ("train_gen", "train")}
#: Form -> prefixes of test splits' names, the likeliest first.
TEST_SPLITS = {
    "texts": ("validation", "test_sft", "test", "eval"), "pairs": ("test_prefs", "test", "validation", "eval"),
    "prompts": ("test_gen", "test"),
}  # fmt: skip


@dataclass(frozen=True)
class Subset:
    """A configuration of a data set.

    Attributes:
        configuration: Name of the configuration; None if the data set has only one.
        row_counts: Split -> number of rows; if the data set does not declare it, at most `MAX_COUNTED`.
        rows: Split -> its first `SAMPLE_ROWS` rows.
        read_split: A function that reads the first `MAX_COUNTED` rows of a split.
    """

    configuration: str | None
    row_counts: Mapping[str, int]
    rows: Mapping[str, Sequence[Mapping[str, Any]]]
    read_split: Callable[[str], Iterable[Mapping[str, Any]]]


@dataclass(frozen=True)
class InspectedData:
    """A data set whose first rows were read.

    Attributes:
        name: A repository, folder or file.
        revision: Commit of the repository; None for a folder or file.
        subsets: The configurations.
    """

    name: str
    revision: str | None
    subsets: Sequence[Subset]

    @property
    def title(self) -> str:
        """Name of the data set on cards, without the path of a folder or file."""
        return Path(self.name).name if Path(self.name).exists() else self.name


@dataclass(frozen=True)
class StageData:
    """How a stage reads a data set.

    Attributes:
        data_set: The data set.
        keys: Keys for the stage's YAML file.
        row_count: The number of rows to train on; a lower bound if it equals `MAX_COUNTED`.
        rows: The first rows, converted to the columns that the stage reads.
        prompt_count: For PPO the number of distinct prompts, among at most `MAX_COUNTED` rows if prompts repeat; for
            other stages the number of rows.
        test_prompt_count: The same count for PPO's test split; None for other stages, or without a test split.
    """

    data_set: InspectedData
    keys: Mapping[str, Any]
    row_count: int
    rows: Sequence[Mapping[str, Any]]
    prompt_count: int
    test_prompt_count: int | None = None

    @property
    def prompt_count_text(self) -> str:
        """The prompt count, as a lower bound unless all rows were read or none repeats a prompt."""
        return f"{'at least ' if self.prompt_count <= MAX_COUNTED <= self.row_count else ''}{self.prompt_count:,}"

    @property
    def is_plain_text(self) -> bool:
        """Whether the rows are texts rather than conversations."""
        return not any(
            is_conversation(self.rows[0].get(name)) for name in ("prompt", "messages", "completion", "chosen")
        )

    @property
    def has_prompt(self) -> bool:
        """Whether the prompt has its own column."""
        return "prompt" in self.rows[0]


def inspect_data(name: str) -> InspectedData:
    """Reads the splits of each configuration of a data set, and their first rows.

    Args:
        name: A folder, a file of JSON lines, or NAMESPACE/NAME[@REVISION].

    Raises:
        ZooError: The data set cannot be loaded.
    """
    is_local = Path(name).exists()
    repo, _, revision = (name, "", "") if is_local else name.partition("@")
    commit = None
    if not is_local:
        from huggingface_hub import HfApi

        source = replace(DEFAULT_HUB, flag=SOURCE_FLAG)
        advice = "check its name, folder or file, and --source_hub."
        with translate_lookup_errors(f"The data set {repo}", source, advice, repo=repo, repo_type="dataset"):
            commit = str(HfApi().dataset_info(repo, revision=revision or None).sha)
    try:
        with open_checked(repo, commit) as data:
            names = [""] if Path(name).is_file() else data.configurations()
            subsets = [_inspect_subset(data, configuration if len(names) > 1 else None) for configuration in names]
    except (ValueError, datasets.exceptions.DatasetsError, *client_errors()) as error:
        problem = file_problem(Path(repo)) or f"{reason(error)}; check its files"
        raise ZooError(f"The data set {name} cannot be loaded: {problem}.") from error
    return InspectedData(repo, commit, subsets)


def _inspect_subset(data: CheckedData, configuration: str | None) -> Subset:
    infos = data.make_builder(configuration).info.splits or {}
    row_counts, rows = {}, {}
    for split in data.splits(configuration):
        stream = data.stream(configuration, split)
        rows[split] = list(islice(stream, SAMPLE_ROWS))
        declared_count = infos[split].num_examples if split in infos else 0
        row_counts[split] = declared_count or (
            len(rows[split]) if len(rows[split]) < SAMPLE_ROWS else sum(1 for _ in islice(stream, MAX_COUNTED))
        )

    def read_split(split: str) -> Iterable[Mapping[str, Any]]:
        return islice(data.stream(configuration, split), MAX_COUNTED)

    return Subset(configuration, row_counts, rows, read_split)


def make_stage_data(data: InspectedData, form: Form, user_columns: Mapping[str, str] | None = None) -> StageData | None:
    """Chooses how a stage reads a data set, from the first configuration that has the stage's form.

    Args:
        data: The data set.
        form: The form that the stage reads.
        user_columns: Column of the stage -> column of the data set, from --columns.

    Returns:
        How the stage reads the data set; None if no configuration has columns of this form.

    Raises:
        ZooError: The columns exist, but their values do not have this form.
    """
    form_error = None
    for subset in data.subsets:
        train_split = _first_split(subset.rows, TRAIN_SPLITS[form])
        if train_split is None:
            continue
        column_names = dict.fromkeys(name for row in subset.rows[train_split] for name in row)
        rows = dataset_of({name: [row.get(name) for row in subset.rows[train_split]] for name in column_names})
        columns = _columns(rows, form, user_columns or {})
        if columns is None:
            continue
        try:
            stage_rows = convert_rows(rows, form, columns=columns, as_chat=False, subject=f"The data set {data.name}")
        except ZooError as error:
            form_error = error
            continue
        test_split = _first_split(subset.rows, TEST_SPLITS[form])
        keys: dict[str, Any] = {
            "dataset_config": subset.configuration,
            "dataset_train_split": train_split,
            "dataset_test_split": test_split,
            "columns": columns,
        }
        count = subset.row_counts[train_split]
        if form != "prompts":
            return StageData(data, keys, count, list(stage_rows), prompt_count=count)
        prompt_count = _count_prompts(subset, train_split, columns, data.name)
        test_prompt_count = None if test_split is None else _count_prompts(subset, test_split, columns, data.name)
        return StageData(data, keys, count, list(stage_rows), prompt_count, test_prompt_count)
    if form_error is not None:
        raise form_error
    return None


def _count_prompts(subset: Subset, split: str, columns: Mapping[str, str], name: str) -> int:
    """Counts the distinct prompts of a split. If no prompt repeats in the first rows, assumes that none repeats."""

    def count_distinct(rows: Sequence[Mapping[str, Any]]) -> int:
        if not rows:
            return 0
        table = dataset_of({column: [row.get(column) for row in rows] for column in dict.fromkeys(chain(*rows))})
        subject = f"The data set {name}, split {split},"
        return count_distinct_prompts(
            convert_rows(table, "prompts", columns=columns, as_chat=False, subject=subject)["prompt"]
        )

    sample = subset.rows[split]
    if count_distinct(sample) == len(sample):
        return subset.row_counts[split]
    return count_distinct(list(subset.read_split(split)))


def _first_split(rows: Mapping[str, Sequence[Any]], prefixes: Sequence[str]) -> str | None:
    """Tries the prefixes in order, and returns the alphabetically first split that has the prefix and rows, or None."""
    names = sorted(name for name in rows if rows[name])
    return next((name for prefix in prefixes for name in names if name.startswith(prefix)), None)


def _columns(rows: datasets.Dataset, form: Form, user_columns: Mapping[str, str]) -> dict[str, str] | None:
    """Returns the recipe's key `columns`: {} if no name differs; None if the data set lacks a column of the form."""
    names, first_row = rows.column_names, rows[0]
    data_columns = {}
    for stage_column, usual_names in COLUMN_NAMES.items():
        requested_name = user_columns.get(stage_column)
        # `_choose_stage_data` in `recipe` checked the placeholders.
        if requested_name is not None and has_placeholders(requested_name):
            data_column: str | None = requested_name if set(placeholder_columns(requested_name)) <= set(names) else None
        else:
            data_column = next((name for name in (requested_name, *usual_names) if name in names), None)
        if data_column is not None:
            data_columns[stage_column] = data_column

    def mapping(*stage_columns: str) -> dict[str, str]:
        return {
            stage_column: data_columns[stage_column]
            for stage_column in stage_columns
            if data_columns[stage_column] != stage_column
        }

    has_pairs = "chosen" in data_columns and "rejected" in data_columns
    has_prompt = data_columns.get("prompt") not in (None, "text")
    # ShareGPT's conversations contain the prompts, so a column such as `input` does not hold them.
    if SHAREGPT_COLUMN in names and "prompt" not in (*names, *user_columns):
        has_prompt = False
    if form == "pairs":
        return mapping("chosen", "rejected", *(["prompt"] if has_prompt else [])) if has_pairs else None
    if "messages" in names or (SHAREGPT_COLUMN in names and not has_pairs):
        return {}
    if form == "prompts":
        if has_pairs and not has_prompt:
            return mapping("chosen", "rejected")
        return mapping("prompt") if "prompt" in data_columns else None
    if has_prompt and "completion" in data_columns:
        return mapping("prompt", "completion")
    if has_pairs:
        chosen = data_columns["chosen"]
        if first_role(first_row[chosen]) not in (None, "assistant"):
            return {"messages": chosen}
        if SHAREGPT_COLUMN in names:
            return mapping("chosen", "rejected")
        return {**mapping("prompt"), "completion": chosen} if has_prompt else {"text": chosen}
    return {} if "text" in names else None
