"""Reads corpora that do not ship with this package, from a folder of ``SPLIT.jsonl[.gz]`` files or from the Hub."""

import gzip
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ...errors import ZooError, first_line
from ...hub.client.checked_data import open_checked
from ...hub.client.data_card import leads_out

Rows = list[dict[str, Any]]
_Item = TypeVar("_Item")
#: Split -> its share of a corpus's texts. The sha1 of a text decides its split.
SHARES = {"train": 0.50, "judge": 0.38, "validation": 0.04, "test": 0.08}
SPLITS = tuple(SHARES)

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def read_splits(source: str, splits: Sequence[str], columns: Sequence[str], *, fix: str) -> dict[str, Rows]:
    """Reads the rows of each split.

    Args:
        source: A folder, or the id of a data set on the Hub.
        splits: Names of the splits.
        columns: Columns that each row must have.
        fix: How to get the corpus, for the end of error messages.

    Returns:
        Split -> rows.

    Raises:
        ZooError: The source cannot be read, a split is missing or empty, or a row lacks a column.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        rows_by_split: dict[str, Iterable[dict[str, Any]]] = {split: read_jsonl(path, split) for split in splits}
    elif path.exists() or source.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(source):
        raise ZooError(f"There is no data set at {source}: {fix}.")
    else:
        rows_by_split = _read_hub(source, splits, fix)
    return {split: _check_rows(rows, columns, f"{source}, split {split},") for split, rows in rows_by_split.items()}


def read_jsonl(folder: Path, split: str) -> Iterator[dict[str, Any]]:
    """Reads the rows of ``SPLIT.jsonl`` or ``SPLIT.jsonl.gz``.

    Args:
        folder: The folder of all splits.
        split: Name of the split.

    Yields:
        The rows.

    Raises:
        ZooError: The file cannot be read.
    """
    path = next((path for path in (folder / f"{split}.jsonl", folder / f"{split}.jsonl.gz") if path.is_file()), None)
    if path is None:
        raise ZooError(f"{folder} has no {split}.jsonl or {split}.jsonl.gz: add the file.")
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ZooError(f"{path}, line {number}, is not a JSON object: write one object per line.")
                    yield row
    except (OSError, EOFError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ZooError(f"{path} cannot be read ({error}): fetch it again.") from error


def unit_hash(text: str) -> float:
    """Hashes a text to a number in [0, 1), by its sha1.

    Args:
        text: Any text.
    """
    return int(hashlib.sha1(text.encode()).hexdigest()[:12], 16) / 16**12


def split_by_hash(items: Mapping[str, _Item], *, subject: str) -> dict[str, list[_Item]]:
    """Splits a corpus into `SPLITS`.

    Args:
        items: Text -> item.
        subject: What to call the corpus, at the start of a sentence.

    Raises:
        ZooError: No text falls into one of the splits.
    """
    splits: dict[str, list[_Item]] = {split: [] for split in SPLITS}
    bounds = [*itertools.accumulate([*SHARES.values()][:-1]), 1.0]
    for text, item in items.items():
        position = unit_hash(text)
        split = next(split for split, bound in zip(SPLITS, bounds, strict=True) if position < bound)
        splits[split].append(item)
    for split, rows in splits.items():
        if not rows:
            raise ZooError(f"{subject} is too small: no text falls into the split {split}; use the full corpus.")
    return splits


def _check_rows(rows: Iterable[dict[str, Any]], columns: Sequence[str], subject: str) -> Rows:
    all_rows = list(rows)
    for number, row in enumerate(all_rows, 1):
        for column in columns:
            if column not in row:
                existing_names = ", ".join(sorted(row)) or "none"
                raise ZooError(
                    f"{subject} has no column {column!r} in row {number} (it has {existing_names}): rename the column."
                )
    if not all_rows:
        raise ZooError(f"{subject} is empty: add rows.")
    return all_rows


def _read_hub(source: str, splits: Sequence[str], fix: str) -> dict[str, Iterable[dict[str, Any]]]:
    """Reads a Hub data set: splits that `load_dataset` finds, and splits that only file names identify."""
    import datasets
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    try:
        with open_checked(source) as data:
            rows_by_split = dict(data.load())
            missing_splits = [split for split in splits if split not in rows_by_split]
            if missing_splits:
                files = HfApi().list_repo_files(source, repo_type="dataset", revision=data.revision)
                local_files = [file for file in files if not leads_out(file)]
                files_by_split = {
                    split: [file for file in local_files if Path(file).name.split(".")[0] == split]
                    for split in missing_splits
                }
                for split, split_files in files_by_split.items():
                    if not split_files:
                        existing_names = ", ".join(sorted(rows_by_split)) or "none"
                        raise ZooError(
                            f"The data set {source} has no split {split} (it has {existing_names}): add {split}.jsonl."
                        )
                rows_by_split |= data.load(data_files=files_by_split)
    except (HTTPError, datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise ZooError(
            f"The data set {source} cannot be loaded ({first_line(error)}): check its id, or {fix}."
        ) from error
    return {split: rows_by_split[split] for split in splits}
