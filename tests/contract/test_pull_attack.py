"""`rlhf-zoo pull` from a malicious Hub writes only the files of the checkpoint, inside its folder."""

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi
from thread_hub import ThreadHub

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client import pull
from rlhf_zoo.hub.client.connect import Hub
from rlhf_zoo.hub.client.downloads import DOWNLOAD_FOLDER, PARTIAL_FOLDER, find_download
from rlhf_zoo.hub.client.local_paths import PULL_MARK, Folder
from rlhf_zoo.hub.client.pull import fetch
from rlhf_zoo.hub.client.trees import fetch_dataset
from rlhf_zoo.hub.server import files_api

pytestmark = pytest.mark.attack

REPO = "local/toy-ppo"
FILES = {"config.json": "{}", "critic/config.json": '{"critic": true}'}


@pytest.fixture
def forge_tree(thread_hub: ThreadHub, monkeypatch: pytest.MonkeyPatch) -> Any:
    """forge_tree(field=value) changes fields of config.json in the Hub's tree."""
    thread_hub.make("toy-ppo", FILES)
    original_tree = HfApi.list_repo_tree

    def forge(**fields: Any) -> None:
        def tree(self: HfApi, *args: Any, **kwargs: Any) -> Any:
            for entry in original_tree(self, *args, **kwargs):
                if entry.path == "config.json":
                    entry.__dict__.update(fields)
                yield entry

        monkeypatch.setattr(HfApi, "list_repo_tree", tree)

    return forge


def all_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("destination", ["cache", "output_dir"])
def test_pull_rejects_hostile_file_names(forge_tree: Any, tmp_path: Path, destination: str) -> None:
    before = all_files(tmp_path)
    output_dir = tmp_path / "out" if destination == "output_dir" else None
    for name in (
        ".git/hooks/post-checkout", "a/.GIT/config", "git~1/config", "../evil", "/etc/evil", "a/../../evil", "a//b",
        "..\\evil", "a\\..\\..\\evil", "C:\\evil", "nul\0byte", "line\nbreak", "a\u202etxt.exe", "x" * 300, "", 5, None,
        f"{PARTIAL_FOLDER}/x", f"{PARTIAL_FOLDER.upper()}/x",
    ):  # fmt: skip
        forge_tree(path=name)
        with pytest.raises(ZooError, match=f"^{REPO} has a file ") as error:
            fetch(REPO, output_dir)
        assert "\n" not in str(error.value) and str(error.value).isprintable(), name
        assert all_files(tmp_path) == before and not (tmp_path / "out").exists(), name


@pytest.mark.parametrize("destination", ["cache", "output_dir"])
def test_pull_rejects_invalid_digests_and_sizes(forge_tree: Any, tmp_path: Path, destination: str) -> None:
    """A partial file is named after its digest."""
    (tmp_path / "mine.txt").write_text("mine, and longer than config.json")
    before = all_files(tmp_path)
    output_dir = tmp_path / "out" if destination == "output_dir" else None
    parent_path = "../../mine.txt" if destination == "output_dir" else "../../../mine.txt"
    for fields in (
        {"blob_id": parent_path}, {"blob_id": str(tmp_path / "mine.txt")}, {"blob_id": ""}, {"blob_id": None},
        {"blob_id": "A" * 40}, {"size": -1}, {"size": None}, {"size": "5"}, {"size": 2**63}, {"size": 10**400},
    ):  # fmt: skip
        forge_tree(**fields)
        with pytest.raises(ZooError, match=r" lists config.json in .*: check --hub\.$"):
            fetch(REPO, output_dir)
        assert all_files(tmp_path) == before, fields


@pytest.mark.parametrize(
    ("names", "refusal"),
    [
        (["README.md", "readme.md"], "are the same on some"),
        (["a/X.bin", "A/x.bin"], "are the same on some"),
        (["caf\u00e9.txt", "cafe\u0301.txt"], "are the same on some"),
        (["\u017fft.txt", "sft.txt"], "are the same on some"),
        (["x", "X/config.json"], "a file 'x' and a folder of that name"),
        (["a", "a/b/c"], "a file 'a' and a folder of that name"),
        ([f"{'d/' * 33}x"], "over 32 folders deep"),
        ([f"{k}.txt" for k in range(10**5)], "over 10,000 files"),
    ],
)
@pytest.mark.parametrize("destination", ["cache", "output_dir"])
def test_pull_rejects_tree_that_does_not_fit_in_folder(
    thread_hub: ThreadHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    refusal: str,
    destination: str,
) -> None:
    thread_hub.make("toy-ppo", FILES)
    listed, before = [], all_files(tmp_path)

    def tree(self: HfApi, *args: Any, **kwargs: Any) -> Any:
        for name in names:
            listed.append(name)
            yield SimpleNamespace(path=name, size=2, blob_id="9" * 40, lfs=None)

    monkeypatch.setattr(HfApi, "list_repo_tree", tree)
    with pytest.raises(ZooError, match=refusal):
        fetch(REPO, tmp_path / "out" if destination == "output_dir" else None)
    assert len(listed) <= 10_001 and all_files(tmp_path) == before and not (tmp_path / "out").exists()


@pytest.mark.parametrize("destination", ["cache", "output_dir"])
def test_pull_rejects_tree_larger_than_disk(forge_tree: Any, tmp_path: Path, destination: str) -> None:
    before = all_files(tmp_path)
    forge_tree(size=2**62)
    with pytest.raises(ZooError, match=r"takes 4,294,967,296.0 GiB more in .*: free some space"):
        fetch(REPO, tmp_path / "out" if destination == "output_dir" else None)
    assert all_files(tmp_path) == before and not (tmp_path / "out").exists()


def test_pull_accepts_odd_but_safe_names(thread_hub: ThreadHub, tmp_path: Path) -> None:
    names = ["CON", "nul.txt", "~", "~root/x", "-rf", "$(id)", "a b", "%2e%2e/x", "x?y#z", f"{'d/' * 32}x"]
    thread_hub.make("toy-ppo", dict.fromkeys(names, "x"))
    fetch(REPO, tmp_path / "out")
    written = {name for name in all_files(tmp_path / "out") if not name.startswith(".cache/")}
    assert written == {*names, ".gitattributes"}


def test_pull_rejects_commit_that_is_path(forge_tree: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original_info, before = HfApi.model_info, all_files(tmp_path)

    def info(self: HfApi, *args: Any, **kwargs: Any) -> Any:
        answer = original_info(self, *args, **kwargs)
        answer.sha = "../../../evil"
        return answer

    monkeypatch.setattr(HfApi, "model_info", info)
    for output_dir in (None, tmp_path / "out"):
        with pytest.raises(ZooError, match="as the commit of"):
            fetch(REPO, output_dir)
    for revision in ("../../../evil", "/etc/evil", "a/../b", "-x", "a\0b"):  # a card may name any revision
        with pytest.raises(ZooError, match=f"^{REPO} has no revision "):
            fetch(f"{REPO}@{revision}")
    assert all_files(tmp_path) == before


def test_pull_ignores_etag_that_is_path(forge_tree: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client names its blob after the ETag."""
    original_headers = files_api._file_headers

    def headers(path: str, etag: str, commit: str) -> dict[str, str]:
        return original_headers(path, etag, commit) | {"ETag": '"../../../evil"'}

    monkeypatch.setattr(files_api, "_file_headers", headers)
    pulled = fetch(REPO)
    assert not (tmp_path / "evil").exists() and not list(tmp_path.rglob("evil*"))
    assert {name: (pulled.path / name).read_text() for name in FILES} == FILES
    assert (pulled.path / "config.json").is_symlink(), "revisions share their blobs"
    repeated = fetch(f"{REPO}@main")
    assert (repeated.path, repeated.refetched) == (pulled.path, [])


def test_pull_rejects_symlinks_in_destination(forge_tree: Any, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for link in ("critic", PARTIAL_FOLDER, ".cache"):
        out = tmp_path / f"out-{link}"
        out.mkdir()
        (out / link).symlink_to(elsewhere)
        with pytest.raises(ZooError, match="is a symbolic link, which would redirect files"):
            fetch(REPO, out)
        assert list(elsewhere.iterdir()) == [] and {path.name for path in out.iterdir()} == {link}
    # A symlink in place of a partial file is refused; one in place of the file itself is replaced.
    out = tmp_path / "out"
    (out / PARTIAL_FOLDER).mkdir(parents=True)
    Folder(REPO, "a" * 40, out).begin([])
    users_file = elsewhere / "mine"
    users_file.write_text("mine")
    part = out / PARTIAL_FOLDER / hashlib.sha1(b"blob 2\0{}").hexdigest()
    part.symlink_to(users_file)
    with pytest.raises(ZooError, match="is a symbolic link"):
        fetch(REPO, out)
    part.unlink()
    (out / "config.json").symlink_to(users_file)
    fetch(REPO, out)
    assert users_file.read_text() == "mine" and (out / "config.json").read_text() == "{}"
    assert not (out / "config.json").is_symlink()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZooError("The Hub answers 410.")])
def test_unfinished_pull_is_marked_as_download(
    forge_tree: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    out, marks, original_fetch = tmp_path / "out", [], pull._fetch_file

    def fail(file: Any, *args: Any) -> Any:
        marks.append(find_download(out))
        if file.path == "config.json":
            raise error
        return original_fetch(file, *args)

    monkeypatch.setattr(pull, "_fetch_file", fail)
    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        fetch(REPO, out)
    assert marks and set(marks) == {out / DOWNLOAD_FOLDER} == {find_download(out)}
    monkeypatch.setattr(pull, "_fetch_file", original_fetch)
    assert fetch(REPO, out).unrelated == [], "the same command resumes"


@pytest.mark.parametrize("content", ["an equal file", "a partial file", "another file", "a pull of another repository"])
def test_pull_rejects_folder_that_it_did_not_write(forge_tree: Any, tmp_path: Path, content: str) -> None:
    """It is rejected even if one of its files, such as a license, equals the repository's."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "critic").mkdir()
    if content != "another file":
        (tmp_path / "mine" / "config.json").write_text("mine")
    if content == "a partial file":
        (tmp_path / "mine" / PARTIAL_FOLDER).mkdir()
    elif content == "an equal file":
        (tmp_path / "mine" / "critic" / "config.json").write_text(FILES["critic/config.json"])
    elif content == "another file":
        (tmp_path / "mine" / "notes.txt").write_text("mine")
    else:
        Folder("x/y", "a" * 40, tmp_path / "mine").begin([])
    before = all_files(tmp_path)
    with pytest.raises(ZooError, match=r"(was not written by a pull of|holds a pull of 'x/y', not of) local/toy-ppo"):
        fetch(REPO, tmp_path / "mine")
    assert all_files(tmp_path) == before


def test_pull_adopts_download_of_client_with_matching_file(forge_tree: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / DOWNLOAD_FOLDER).mkdir(parents=True)
    (out / "config.json").write_text("another revision's")
    with pytest.raises(ZooError, match="was not written by a pull of"):
        fetch(REPO, out)
    (out / "critic").mkdir()
    (out / "critic" / "config.json").write_text(FILES["critic/config.json"])
    assert fetch(REPO, out).refetched == ["config.json"]
    assert (out / PULL_MARK).read_text() == f"{REPO}\n"


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"path": "../evil.jsonl"}, "has a file '../evil.jsonl'"),
        ({"size": 2**62}, r"takes 4,294,967,296.0 GiB more in .*: free some space\.$"),
        ({"blob_id": "../../evil"}, "lists rows.jsonl in local/rows with"),
    ],
)
def test_fetch_dataset_rejects_forged_tree(
    thread_hub: ThreadHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], refusal: str
) -> None:
    api = thread_hub.api()
    api.create_repo("local/rows", repo_type="dataset")
    for name, content in (("rows.jsonl", b"{}"), ("other.txt", b"text")):
        api.upload_file(path_or_fileobj=content, path_in_repo=name, repo_id="local/rows", repo_type="dataset")
    hub = Hub("other", thread_hub.url, "test", cache=tmp_path / "cache")
    folder = fetch_dataset(hub, "local/rows", revision="main", patterns=["*.jsonl"])
    assert all_files(folder) == {"rows.jsonl": b"{}"}
    original_tree = HfApi.list_repo_tree

    def tree(self: HfApi, *args: Any, **kwargs: Any) -> Any:
        for entry in original_tree(self, *args, **kwargs):
            entry.__dict__.update(fields if entry.path == "rows.jsonl" else {})
            yield entry

    monkeypatch.setattr(HfApi, "list_repo_tree", tree)
    empty = Hub("other", thread_hub.url, "test", cache=tmp_path / "empty")
    with pytest.raises(ZooError, match=refusal):
        fetch_dataset(empty, "local/rows", revision=None, patterns=["*.jsonl"])
    assert not (tmp_path / "empty").exists()


def test_pull_with_refused_token_names_its_variable(thread_hub: ThreadHub) -> None:
    hub = Hub("other", thread_hub.url, "test", token="hub_wrong", token_variable="RLHF_ZOO_SOURCE_TOKEN")
    with pytest.raises(ZooError, match=f"does not accept the token for {REPO}: set RLHF_ZOO_SOURCE_TOKEN"):
        fetch(REPO, hub=hub)


def test_pull_rejects_branch_and_tag_of_same_name(thread_hub: ThreadHub) -> None:
    thread_hub.make("toy-ppo", FILES)
    api = thread_hub.api()
    api.create_tag(REPO, tag="best")
    api.create_branch(REPO, branch="best")
    with pytest.raises(ZooError, match=f"^{REPO} has both a branch and a tag named 'best': name the commit instead"):
        fetch(f"{REPO}@best")
    api.delete_branch(REPO, branch="best")
    assert fetch(f"{REPO}@best").commit == api.model_info(REPO).sha
