"""Corpora that do not come with this package: a folder of ``SPLIT.jsonl[.gz]`` files, or a data set on the Hub."""

import gzip
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...errors import ZooError
from ...hub.client.data_gate import gated, leads_out

Rows = list[dict[str, Any]]

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def read_splits(source: str, splits: Sequence[str], columns: Sequence[str], *, mend: str) -> dict[str, Rows]:
    """The rows of each split, of a folder or of a data set on the Hub.

    mend: how the corpus is had, the end of a sentence. Raises ZooError where the source cannot be read, for a split
    that is missing or has no rows, and for a row without one of the columns.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        found: dict[str, Iterable[dict[str, Any]]] = {split: read_jsonl(path, split) for split in splits}
    elif path.exists() or source.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(source):
        raise ZooError(f"There is no data set at {source}: {mend}.")
    else:
        found = _read_hub(source, splits, mend)
    return {split: _whole(rows, columns, f"{source}, split {split},") for split, rows in found.items()}


def read_jsonl(folder: Path, split: str) -> Iterator[dict[str, Any]]:
    """The rows of ``SPLIT.jsonl`` or ``SPLIT.jsonl.gz``. Raises ZooError where it cannot be read."""
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


def unit(text: str) -> float:
    """A number in [0, 1) that depends on the text alone, by its sha1."""
    return int(hashlib.sha1(text.encode()).hexdigest()[:12], 16) / 16**12


def _whole(rows: Iterable[dict[str, Any]], columns: Sequence[str], of: str) -> Rows:
    found = list(rows)
    for number, row in enumerate(found, 1):
        for column in columns:
            if column not in row:
                there = ", ".join(sorted(row)) or "none"
                raise ZooError(f"{of} has no column {column!r} in row {number} (found: {there}): rename it so.")
    if not found:
        raise ZooError(f"{of} is empty: give it rows.")
    return found


def _read_hub(source: str, splits: Sequence[str], mend: str) -> dict[str, Iterable[dict[str, Any]]]:
    """A Hub data set: its splits as `load_dataset` finds them, and those it does not know by their file names."""
    import datasets
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    try:
        with gated(source) as data:
            found = dict(data.load())
            if missing := [split for split in splits if split not in found]:
                files = HfApi().list_repo_files(source, repo_type="dataset", revision=data.commit)
                own = [file for file in files if not leads_out(file)]
                named = {split: [file for file in own if Path(file).name.split(".")[0] == split] for split in missing}
                for split in missing:
                    if not named[split]:
                        there = ", ".join(sorted(found)) or "none"
                        raise ZooError(
                            f"The data set {source} has no split {split} (found: {there}): add {split}.jsonl."
                        )
                found |= data.load(data_files=named)
    except (HTTPError, datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ZooError(f"The data set {source} cannot be loaded ({reason}): check its id, or {mend}.") from error
    return {split: found[split] for split in splits}
