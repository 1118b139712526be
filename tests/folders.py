"""Folders of files: digests that show whether anything has changed, and a data set in its repository's layout."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml


def file_digests(folder: Path) -> dict[str, str]:
    """Maps each file below `folder` to its SHA-256, and each folder to ''."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


def write_data_set(folder: Path, configurations: Mapping[str, Mapping[str, Iterable[Mapping[str, Any]]]]) -> Path:
    """Writes a data set with a README.md that lists its files. configurations: name -> split -> rows."""
    configs = []
    for name, splits in configurations.items():
        (folder / name).mkdir(parents=True)
        for split, rows in splits.items():
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = [{"split": split, "path": f"{name}/{split}.jsonl"} for split in splits]
        configs.append({"config_name": name, "data_files": files})
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
    return folder
