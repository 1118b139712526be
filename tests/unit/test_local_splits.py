"""A split of a local folder reads only the files that match its name."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.checked_data import open_checked


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        rows = [{"text": f"{text} {row}"} for row in range(3)]
        lines = ["text", *(row["text"] for row in rows)] if ".csv" in name else map(json.dumps, rows)
        (folder / name).write_text("\n".join(lines) + "\n")


def load(folder: Path, split: str = "train") -> list[str]:
    with open_checked(str(folder)) as data:
        return [row["text"] for row in data.load(None, split, cache_dir=str(folder.parent / "cache"))]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["train.jsonl", "train-old/a.jsonl"], "would read train-old/a.jsonl instead of train.jsonl"),
        (["train.jsonl", "train/a.jsonl"], "would read train/a.jsonl instead of train.jsonl"),
        (["train.jsonl", "train 2.jsonl"], "would read train 2.jsonl, train.jsonl"),
        (["train.jsonl", "train-extra.jsonl"], "would read train-extra.jsonl, train.jsonl"),
        (["train.jsonl", "sub/train.jsonl"], "would read sub/train.jsonl, train.jsonl"),
        (["train.jsonl", "test-train.jsonl", "backup/2024-train.jsonl"], "backup/2024-train.jsonl"),
        (["train.jsonl", "train.csv"], "instead of train.csv"),
        (["train.jsonl", "data/train.jsonl"], "would read data/train.jsonl"),
        (["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "train-more.jsonl"], "train-more.jsonl"),
        (["train.jsonl", "test.jsonl", "test/b.jsonl"], "The split test of the data set"),
    ],
)
def test_split_is_never_joined_or_replaced_by_other_files(tmp_path: Path, files: list[str], message: str) -> None:
    write_files(tmp_path / "data", dict.fromkeys(files, "x"))
    with pytest.raises(ZooError, match=message):
        load(tmp_path / "data")


def test_split_reads_its_file_or_shards_and_ignores_unrelated_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = {
        "train.jsonl": "mine",
        "test.jsonl": "test",
        "notes/read.md": "x",
        "other.jsonl": "no",
        ".old/train.jsonl": "no",
    }
    write_files(tmp_path / "one", files)
    assert load(tmp_path / "one") == ["mine 0", "mine 1", "mine 2"]
    assert load(tmp_path / "one", "test") == ["test 0", "test 1", "test 2"]
    write_files(tmp_path / "shards", {f"data/train-0000{shard}-of-00002.jsonl": str(shard) for shard in range(2)})
    assert len(load(tmp_path / "shards")) == 6
    assert not caplog.records


def test_files_without_split_name_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_files(tmp_path / "data", {"a.jsonl": "a", "deep/b.jsonl": "b"})
    with caplog.at_level(logging.WARNING):
        assert len(load(tmp_path / "data")) == 6
    assert "is made of a.jsonl, deep/b.jsonl" in caplog.text
    caplog.clear()
    write_files(tmp_path / "one", {"a.jsonl": "a"})
    assert len(load(tmp_path / "one")) == 3 and not caplog.records


def test_card_file_list_defines_split(tmp_path: Path) -> None:
    write_files(tmp_path / "data", {"train.jsonl": "mine", "train-old/a.jsonl": "old"})
    (tmp_path / "data/README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: train.jsonl\n---\n"
    )
    assert load(tmp_path / "data") == ["mine 0", "mine 1", "mine 2"]
