"""Reads tables whose columns change their type; `datasets` assumes the types of a file's first block."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets.packaged_modules.csv.csv import Csv
from datasets.packaged_modules.json.json import Json
from datasets.packaged_modules.parquet.parquet import Parquet

#: The errors that Arrow raises for values that do not fit one type.
_MIXED_TYPE_ERRORS = (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError)


def dataset_of(columns: Mapping[str, Sequence[Any]]) -> datasets.Dataset:
    """Makes a data set from columns. A column of mixed types holds its values as JSON.

    Args:
        columns: The values of each column, all of the same length.

    Returns:
        The data set, in memory.
    """
    one_column_sets = []
    for name, values in columns.items():
        try:
            column = datasets.Dataset.from_dict({name: values})
        except _MIXED_TYPE_ERRORS:
            column = datasets.Dataset.from_dict({name: values}, on_mixed_types="use_json")
        one_column_sets.append(column)
    return datasets.concatenate_datasets(one_column_sets, axis=1) if one_column_sets else datasets.Dataset.from_dict({})


def read_all_rows(
    builder: datasets.DatasetBuilder, split: str, *, cache: str | None, token: str | bool | None
) -> datasets.Dataset | None:
    """Reads a split for which `load_dataset` fails, because column types change after the first rows.

    All files are read into memory, so use this only for data sets that cannot be loaded otherwise.

    Args:
        builder: The builder that `load_dataset` would use.
        split: Name of the split.
        cache: The folder of downloaded files; None for the client's default.
        token: The token for the data set's Hub.

    Returns:
        The rows of all files; None if they are neither JSON, CSV nor Parquet.

    Raises:
        ValueError: A file cannot be read.
        RecursionError: A file holds JSON that is nested too deeply.
    """
    read = next((reader for kind, reader in _READERS.items() if isinstance(builder, kind)), None)
    files = (builder.config.data_files or {}).get(split)
    if read is None or not files:
        return None
    download = datasets.DownloadManager(
        base_path=builder.base_path, download_config=datasets.DownloadConfig(cache_dir=cache, token=token)
    )
    paths = list(download.iter_files(download.download_and_extract(list(files))))
    return read(paths, builder.config)


def _read_json(paths: Iterable[str], _: Any) -> datasets.Dataset:
    rows: list[Any] = []
    for path in paths:
        content = Path(path).read_text(encoding="utf-8-sig")
        if content.lstrip()[:1] == "[":
            rows += json.loads(content)
        else:
            rows += [json.loads(line) for line in content.split("\n") if line.strip()]
    rows = [{"text": row} if isinstance(row, str) else row for row in rows]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("not every row is a JSON object")
    names = dict.fromkeys(name for row in rows for name in row)
    return dataset_of({name: [row.get(name) for row in rows] for name in names})


def _read_csv(paths: Iterable[str], config: Any) -> datasets.Dataset:
    import pandas as pd

    options = {name: value for name, value in config.pd_read_csv_kwargs.items() if name != "chunksize"}
    # low_memory=False reads a file in one piece; otherwise each block would get its own types.
    frames = [pd.read_csv(path, **options, low_memory=False) for path in paths]
    return _concatenate([pa.Table.from_pandas(frame, preserve_index=False) for frame in frames])


def _read_parquet(paths: Iterable[str], _: Any) -> datasets.Dataset:
    from pyarrow import parquet

    return _concatenate([parquet.read_table(path) for path in paths])


def _concatenate(tables: Sequence[pa.Table]) -> datasets.Dataset:
    """Returns the rows of all tables, even if a column is missing, empty or of another type in some tables."""
    try:
        return datasets.Dataset(pa.concat_tables(tables, promote_options="permissive"))
    except _MIXED_TYPE_ERRORS:
        names = dict.fromkeys(name for table in tables for name in table.column_names)
        return dataset_of({name: [value for table in tables for value in _values(table, name)] for name in names})


def _values(table: pa.Table, name: str) -> list[Any]:
    return table.column(name).to_pylist() if name in table.column_names else [None] * len(table)


_READERS: Mapping[type, Callable[[Iterable[str], Any], datasets.Dataset]] = {
    Json: _read_json,
    Csv: _read_csv,
    Parquet: _read_parquet,
}
