"""Which files of a local folder a split is made of, where no card lists them.

`datasets` takes every file and folder whose name contains the split's name: `train-old/`, `train 2.jsonl` and
`test-train.jsonl` all count as `train`, and a folder of that name goes before a file. A user means `train.jsonl`.
"""

import logging
import re
from collections.abc import Iterable
from pathlib import Path

from ...errors import ZooError

log = logging.getLogger(__name__)

#: The endings of data files that `datasets` reads, without that of a compression.
_ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4")
_SHARD = re.compile(r"-\d{5}-of-\d{5}")
_NAMED = 4  # files in a message


def check_split(folder: Path, split: str, files: Iterable[Path]) -> None:
    """Checks that a split is made of the files that its name stands for, and names them if that is not clear.

    Args:
        folder: The folder.
        split: Name of the split.
        files: The files that `datasets` would read.

    Raises:
        ZooError: There is a file of the split's name, such as train.jsonl or its shards, and other files would be read
            too, or in its place.
    """
    root = folder.resolve()
    taken = {Path(file).resolve() for file in files}
    expected = {
        path.resolve()
        for place in (root, root / "data")
        for path in (place.iterdir() if place.is_dir() else ())
        if path.is_file() and _kind(path)[0] == split
    }
    kinds = {(path.parent, *_kind(path)) for path in expected}
    if expected and (taken != expected or len(kinds) > 1):
        extra, missing = taken - expected, expected - taken
        replaced = f" instead of {_listed(missing, root)}" if missing else ""
        raise ZooError(
            f"The split {split} of the data set {folder} is ambiguous: `datasets` would read "
            f"{_listed(extra if missing and extra else taken, root)}{replaced}. Move what does not belong to it "
            f"out of {folder}, or list the files of each split under `configs` in a README.md there."
        )
    if not expected and len({(path.parent, *_kind(path)) for path in taken}) > 1:
        log.warning("The split %s of the data set %s is made of %s.", split, folder, _listed(taken, root))


def _kind(path: Path) -> tuple[str, str]:
    """Returns (name without the number of a shard, ending) of a data file; ("", "") for any other file."""
    name, compression = path.name, ""
    if path.suffix in _COMPRESSED:
        name, compression = name.removesuffix(path.suffix), path.suffix
    ending = next((ending for ending in _ENDINGS if name.endswith(ending)), "")
    return (_SHARD.sub("", name.removesuffix(ending)), ending + compression) if ending else ("", "")


def _listed(files: Iterable[Path], root: Path) -> str:
    names = sorted(str(file.relative_to(root)) if file.is_relative_to(root) else str(file) for file in files)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
