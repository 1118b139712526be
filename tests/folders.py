"""Folders of files: a data set as its repository would hold it, and what says that nothing has changed."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml


def tree(folder: Path) -> dict[str, str]:
    """Every file's sha256, and every folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


def write_data_set(folder: Path, configurations: Mapping[str, Mapping[str, Iterable[Mapping[str, Any]]]]) -> Path:
    """configurations: the rows of each split of each."""
    front = []
    for name, splits in configurations.items():
        (folder / name).mkdir(parents=True)
        for split, rows in splits.items():
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = [{"split": split, "path": f"{name}/{split}.jsonl"} for split in splits]
        front.append({"config_name": name, "data_files": files})
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': front})}---\n")
    return folder
