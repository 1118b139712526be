"""Files that a data set's content names are not opened: media columns, linked formats, archives, odd names."""

# ruff: noqa: F811

import ast
import json
import zipfile
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet
from test_checked_data import ROWS, Trap, hub, own_cache, trap  # noqa: F401
from thread_hub import ThreadHub

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.checked_data import drop_media, open_checked
from rlhf_zoo.hub.client.connect import DEFAULT_HUB
from rlhf_zoo.pipeline.new.data import inspect_data
from rlhf_zoo.runs.data.sources import find_data
from rlhf_zoo.runs.pairs import NamedPairs

pytestmark = pytest.mark.attack
ROOT = Path(__file__).parents[2]
MEDIA = {"bytes": pa.binary(), "path": pa.string()}


def card_of(image: Any) -> str:
    """Front matter by which the column `image` of JSON lines holds images."""
    features = [{"name": "prompt", "dtype": "string"}, {"name": "image", **image}]
    return f"---\n{yaml.safe_dump({'dataset_info': {'features': features}})}---\n"


def write_json_data(folder: Path, url: str, image: Any = None) -> None:
    value: Any = f"{url}/image.png"
    value = [value] if image and "list" in image else value
    (folder / "train.jsonl").write_text(json.dumps({"prompt": "a", "image": value}) + "\n")
    (folder / "README.md").write_text(card_of(image or {"dtype": "image"}))


def media_table(url: str, kind: str, nested: bool = False) -> pa.Table:
    """A table whose own metadata says that a column holds media."""
    value, struct, media = {"bytes": None, "path": f"{url}/file"}, pa.struct(MEDIA), {"_type": kind}
    image = pa.array([[value]], pa.list_(struct)) if nested else pa.array([value], struct)
    feature = {"_type": "List", "feature": media} if nested else media
    features = {"prompt": {"dtype": "string", "_type": "Value"}, "image": feature}
    rows = pa.table({"prompt": ["a"], "image": image})
    return rows.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def write_parquet_data(folder: Path, url: str, kind: str = "Image", nested: bool = False) -> None:
    parquet.write_table(media_table(url, kind, nested), folder / "train.parquet")


def write_arrow_data(folder: Path, url: str) -> None:
    rows = media_table(url, "Image")
    with pa.OSFile(str(folder / "train.arrow"), "wb") as file, pa.ipc.new_stream(file, rows.schema) as writer:
        writer.write_table(rows)


COLUMNS = {
    "json": write_json_data,
    "json, list": lambda folder, url: write_json_data(folder, url, {"list": "image"}),
    "parquet": write_parquet_data,
    "parquet, nested": lambda folder, url: write_parquet_data(folder, url, nested=True),
    "parquet, video": lambda folder, url: write_parquet_data(folder, url, kind="Video"),
    "parquet, audio": lambda folder, url: write_parquet_data(folder, url, kind="Audio"),
    "arrow": write_arrow_data,
}


def read_all(name: str) -> list[list[Any]]:
    """The names of the columns, and the first row, as each reader of data sets has them."""
    source = find_data(name, None, DEFAULT_HUB)
    loaded = source.load(None, "train", columns=["prompt"])
    first = source.first_row(None, "train") or {}
    (part,) = inspect_data(name).subsets
    return [[*loaded[0].items()], [*first.items()], [*part.rows["train"][0].items()]]


@pytest.mark.parametrize(("how", "place"), [*((how, "folder") for how in COLUMNS), ("json", "hub"), ("parquet", "hub")])
def test_media_columns_open_no_files(how: str, place: str, hub: ThreadHub, trap: Trap, tmp_path: Path) -> None:
    folder = tmp_path / "media"
    folder.mkdir()
    COLUMNS[how](folder, trap.url)
    name = str(folder)
    if place == "hub":
        hub.make("media", {path.name: path.read_bytes() for path in folder.iterdir()}, "dataset")
        name = "local/media"
    assert read_all(name) == [[("prompt", "a")]] * 3
    assert trap.heard == []


def test_drop_media_keeps_value_columns() -> None:
    rows = {"prompt": ["a"], "turns": [[{"role": "user", "n": [1]}]], "label": [1]}
    loaded = datasets.Dataset.from_dict(rows).cast_column("label", datasets.ClassLabel(num_classes=2))
    assert drop_media(loaded) is loaded
    splits = datasets.DatasetDict(train=loaded.add_column("image", ["x"]).cast_column("image", datasets.Image()))
    assert drop_media(splits)["train"].column_names == ["prompt", "turns", "label"]


LOADERS = {
    "train.png": b"", "train.wav": b"", "train.mp4": b"", "train.pdf": b"", "train.h5": b"\x89HDF", "train.tar": b"",
    "train.vortex": b"", "train.tsfile": b"", "train.eval": b"", "train.pdb": b"", "data.lance/a.lance": b"",
}  # fmt: skip


@pytest.mark.parametrize("file", LOADERS)
def test_formats_that_may_open_other_files_are_refused(file: str, hub: ThreadHub, tmp_path: Path) -> None:
    (tmp_path / "set" / file).parent.mkdir(parents=True)
    (tmp_path / "set" / file).write_bytes(LOADERS[file])
    names = [str(tmp_path / "set")]
    if file == "train.h5":
        hub.make("set", {file: LOADERS[file]}, "dataset")
        names.append("local/set")
    for name in names:
        with open_checked(name) as data:
            for read in (
                lambda: data.load(split="train"),
                lambda: data.stream(None, "train"),
                lambda: data.splits(None),
                lambda: data.make_builder(),
            ):
                with pytest.raises(ZooError, match="would read it with the loader"):
                    read()


@pytest.mark.parametrize("name", ["json", "text", "csv"])
@pytest.mark.parametrize("offline", [True, False])
def test_loader_name_does_not_read_working_directory(
    name: str,
    offline: bool,
    hub: ThreadHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`datasets` takes it for the loader, and without files that takes all of the folder that one is in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "private.jsonl").write_text('{"prompt": "private"}\n')
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)
    with pytest.raises(ZooError, match="is not a file, a folder or the id of a data set"):
        find_data(name, None, DEFAULT_HUB).load(None, "train", columns=[])
    (tmp_path / name).mkdir()  # one's own folder is what it is called
    (tmp_path / name / "train.jsonl").write_text(ROWS)
    assert find_data(name, None, DEFAULT_HUB).load(None, "train", columns=[])["prompt"][:] == ["a", "b"]
    assert NamedPairs(name, None, "default", None).open(DEFAULT_HUB).first_row(None, "train") == {"prompt": "a"}


@pytest.mark.parametrize("inner", ["a.jsonl::{url}/b.zip", "{url}/a.jsonl", "a.jsonl::file://{secret}"])
def test_archive_member_name_is_not_opened_as_address(
    inner: str,
    trap: Trap,
    tmp_path: Path,
    hub: ThreadHub,
) -> None:
    secret = tmp_path / "secret.zip"
    with zipfile.ZipFile(secret, "w") as archive:
        archive.writestr("a.jsonl", '{"prompt": "secret"}\n')
    folder = tmp_path / "packed"
    folder.mkdir()
    with zipfile.ZipFile(folder / "train.zip", "w") as archive:
        archive.writestr("plain.jsonl", ROWS)
        archive.writestr(inner.format(url=trap.url, secret=secret), '{"prompt": "a"}\n')
    hub.make("packed", {"train.zip": (folder / "train.zip").read_bytes()}, "dataset")
    for name in (str(folder), "local/packed"):
        for read in (
            lambda name=name: find_data(name, None, DEFAULT_HUB).load(None, "train", columns=[]),
            lambda name=name: find_data(name, None, DEFAULT_HUB).first_row(None, "train"),
        ):
            with pytest.raises(ZooError, match="would open as an address"):
                read()
    assert trap.heard == []
    with zipfile.ZipFile(folder / "train.zip", "w") as archive:
        archive.writestr("plain.jsonl", ROWS)
    assert find_data(str(folder), None, DEFAULT_HUB).load(None, "train", columns=[])["prompt"][:] == ["a", "b"]


def test_chained_file_names_are_not_opened(tmp_path: Path) -> None:
    folder = tmp_path / "chain"
    folder.mkdir()
    (folder / "train.jsonl::memory").write_text(ROWS)
    (folder / "README.md").write_text("---\nconfigs: [{config_name: default, data_files: 'train*'}]\n---\n")
    (folder / "train.jsonl").write_text(ROWS)
    with pytest.raises(ZooError, match="may lie outside it"):
        find_data(str(folder), None, DEFAULT_HUB).load(None, "train", columns=[])


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00", b"a: " + b"x" * 2**21, b"tasks: " + b"[" * 5000, b"tasks: {a: 1}"]
)
def test_malformed_benchmark_mark_is_ignored(content: bytes, hub: ThreadHub) -> None:
    """eval.yaml of a repository, which is read when the data set is looked up."""
    hub.make("marked", {"eval.yaml": content, "train.jsonl": ROWS}, "dataset")
    assert find_data("local/marked", None, DEFAULT_HUB).lineage["benchmark"] is None


def loader_calls(path: Path) -> set[str]:
    """The functions of `datasets` that load, as a file calls or imports them."""
    loads = {"load_dataset", "load_dataset_builder", "load_from_disk", "get_dataset_split_names"}
    loads |= {"get_dataset_config_names", "get_dataset_config_info", "get_dataset_infos"}
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.attr] if isinstance(node, ast.Attribute) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        found |= loads & set(names)
    return found


def test_datasets_loaders_are_called_in_one_module_only() -> None:
    """Also in examples, which people copy."""
    files = [path for folder in ("rlhf_zoo", "examples", "spaces") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    assert {path.name for path in files if loader_calls(path)} == {"checked_data.py"}
