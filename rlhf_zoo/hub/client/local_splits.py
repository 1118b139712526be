"""Checks which files of a local folder `datasets` would read as a split if no card lists them.

`datasets` takes every file and folder whose name contains the split's name as a word: `train-old/`, `train 2.jsonl` and
`test-train.jsonl` all count as `train`, and a folder of that name takes precedence over a file. Users expect it to read
only `train.jsonl`.
"""

import logging
import re
from collections.abc import Iterable
from pathlib import Path

from ...errors import ZooError

log = logging.getLogger(__name__)

#: The suffixes of data files that `datasets` reads. A compressed file has another suffix after them.
_ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
_COMPRESSION_ENDINGS = (".gz", ".bz2", ".xz", ".zst", ".lz4")
_SHARD = re.compile(r"-\d{5}-of-\d{5}")
_MAX_LISTED = 4  # file names in a message


def check_split(folder: Path, split: str, files: Iterable[Path]) -> None:
    """Checks that `datasets` reads only files with a split's own name, such as train.jsonl or its shards.

    If there are no such files, logs a warning that names the files read instead, unless they are shards of one file.

    Args:
        folder: The folder of the data set.
        split: Name of the split, such as train.
        files: The files that `datasets` would read.

    Raises:
        ZooError: There are files with the split's name, but they are not one file or its shards, or other files would
            be read in addition or instead.
    """
    root = folder.resolve()
    files_read = {file.resolve() for file in files}
    expected_files = {
        path.resolve()
        for data_folder in (root, root / "data")
        for path in (data_folder.iterdir() if data_folder.is_dir() else ())
        if path.is_file() and _split_and_ending(path)[0] == split
    }
    if expected_files and (files_read != expected_files or not _are_one_file(expected_files)):
        unexpected_files, missing_files = files_read - expected_files, expected_files - files_read
        instead_of = f" instead of {_format_paths(missing_files, root)}" if missing_files else ""
        shown_files = unexpected_files if missing_files and unexpected_files else files_read
        raise ZooError(
            f"The split {split} of the data set {folder} is ambiguous: `datasets` would read "
            f"{_format_paths(shown_files, root)}{instead_of}. Move the other "
            f"files out of {folder}, or list the files of each split under `configs` in a README.md there."
        )
    if not expected_files and not _are_one_file(files_read):
        log.warning("The split %s of the data set %s is made of %s.", split, folder, _format_paths(files_read, root))


def _are_one_file(paths: set[Path]) -> bool:
    """Whether paths are a single file or its shards."""
    return len({(path.parent, *_split_and_ending(path)) for path in paths}) <= 1


def _split_and_ending(path: Path) -> tuple[str, str]:
    """Returns (name without a shard's number, ending) of a data file; ("", "") for any other file."""
    name, compression = path.name, ""
    if path.suffix in _COMPRESSION_ENDINGS:
        name, compression = name.removesuffix(path.suffix), path.suffix
    ending = next((ending for ending in _ENDINGS if name.endswith(ending)), "")
    return (_SHARD.sub("", name.removesuffix(ending)), ending + compression) if ending else ("", "")


def _format_paths(files: Iterable[Path], root: Path) -> str:
    names = sorted(str(file.relative_to(root)) if file.is_relative_to(root) else str(file) for file in files)
    remainder = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + remainder
