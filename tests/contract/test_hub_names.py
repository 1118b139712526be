"""Short commit ids, a branch and a tag of one name, copies and moved repositories, through the unmodified client."""

import os
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationCopy, HfFileSystem
from huggingface_hub.errors import BadRequestError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from thread_hub import ThreadHub

BIG = b"\0" * 5000


def files(hub: ThreadHub, repo: str, revision: str | None = None, kind: str = "model") -> dict[str, bytes]:
    """Downloads every file except .gitattributes."""
    api, cache = hub.api(), hub.cache
    names = api.list_repo_files(repo, revision=revision, repo_type=kind)
    paths = {n: api.hf_hub_download(repo, n, revision=revision, repo_type=kind, cache_dir=cache) for n in names}
    return {name: Path(path).read_bytes() for name, path in paths.items() if name != ".gitattributes"}


# Short commit ids, and branches and tags of the same name


def test_revision_may_be_short_commit_id(in_process_hub: ThreadHub) -> None:
    api = in_process_hub.api()
    first = in_process_hub.push("local/m", {"a": "1"})
    in_process_hub.push("local/m", {"a": "2"})
    api.create_tag("local/m", tag="short", revision=first[:7])
    assert {tag.name: tag.target_commit for tag in api.list_repo_refs("local/m").tags} == {"short": first}
    api.create_branch("local/m", branch="from", revision=first[:10])
    for revision in (first[:7], first[:8].upper(), first[:39], "from"):
        assert api.model_info("local/m", revision=revision).sha == first
        assert files(in_process_hub, "local/m", revision) == {"a": b"1"}
    tree = in_process_hub.git("local/m", "rev-parse", "main^{tree}").strip()
    for revision in (first[:6], tree[:8], tree, "f" * 12):
        with pytest.raises(RevisionNotFoundError):
            api.create_tag("local/m", tag="none", revision=revision)
    in_process_hub.git("local/m", "gc", "-q")
    assert api.model_info("local/m", revision=first[:7]).sha == first


def test_ambiguous_short_commit_id_is_rejected(in_process_hub: ThreadHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from dulwich.object_store import DiskObjectStore

    first, second = in_process_hub.push("local/m", {"a": "1"}), in_process_hub.push("local/m", {"a": "2"})
    commit_ids = [first.encode(), second.encode()]
    monkeypatch.setattr(DiskObjectStore, "iter_prefix", lambda store, prefix: iter(commit_ids))
    with pytest.raises(BadRequestError, match="2 commits begin with"):
        in_process_hub.api().create_tag("local/m", tag="x", revision="abcdef0")


def test_tag_is_read_before_branch_of_same_name(in_process_hub: ThreadHub) -> None:
    """As in git. Commits go to the branch, which its full name reads."""
    api = in_process_hub.api()
    first = in_process_hub.push("local/m", {"a": "1"})
    api.create_branch("local/m", branch="v1")
    api.create_tag("local/m", tag="v1")
    api.create_tag("local/m", tag="v2")
    api.create_branch("local/m", branch="v2")
    added = [CommitOperationAdd("b", b"2")]
    second = api.create_commit("local/m", added, commit_message="more", revision="v1").oid
    assert api.model_info("local/m", revision="v1").sha == first
    assert in_process_hub.git("local/m", "rev-parse", "v1").split()[0] == first
    assert api.model_info("local/m", revision="refs/heads/v1").sha == second
    assert api.model_info("local/m", revision="refs/tags/v1").sha == first
    for create in (lambda: api.create_branch("local/m", branch="v1"), lambda: api.create_tag("local/m", tag="v1")):
        with pytest.raises(HfHubHTTPError, match=r"\b409 "):
            create()
    api.delete_tag("local/m", tag="v1")
    assert api.model_info("local/m", revision="v1").sha == second
    refs = api.list_repo_refs("local/m")
    assert ({ref.name for ref in refs.branches}, {ref.name for ref in refs.tags}) == ({"main", "v1", "v2"}, {"v2"})
    in_process_hub.git("local/m", "fsck", "--strict")


# Copies


def test_copy_files_shares_large_files_on_disk(in_process_hub: ThreadHub) -> None:
    api = in_process_hub.api()
    in_process_hub.push("local/from", {"config.json": "{}", "w.safetensors": BIG, "d/x.bin": BIG + b"1"})
    api.create_repo("local/to")
    api.create_repo("team/data", repo_type="dataset", private=True)
    api.copy_files("hf://local/from/", "hf://local/to/")
    api.copy_files("hf://local/from/d/x.bin", "hf://datasets/team/data/copied.bin")
    copy = CommitOperationCopy("w.safetensors", "again.safetensors", src_repo_id="local/from", src_repo_type="model")
    api.create_commit("local/to", [copy], commit_message="copy")
    assert files(in_process_hub, "local/to") == files(in_process_hub, "local/from") | {"again.safetensors": BIG}
    assert files(in_process_hub, "team/data", kind="dataset") == {"copied.bin": BIG + b"1"}
    # One file on the disk, which stays when one of the repositories is deleted.
    stored = [
        path for path in in_process_hub.root.glob("repos/*/*/*.git/lfs/objects/*/*/*") if path.stat().st_size == 5000
    ]
    assert len({path.stat().st_ino for path in stored}) == 1 < len(stored)
    api.delete_repo("local/from")
    assert files(in_process_hub, "local/to")["w.safetensors"] == BIG


def test_copy_requires_source_file_and_write_access(in_process_hub: ThreadHub) -> None:
    in_process_hub.push("local/from", {"w.bin": BIG})
    in_process_hub.api().create_repo("local/to")
    info = in_process_hub.api().get_paths_info("local/from", ["w.bin"])[0]
    assert info.lfs is not None
    request = {"files": [{"sha256": oid, "xetHash": oid, "filename": "w.bin"} for oid in (info.lfs.sha256, "0" * 64)]}
    target = {"target": {"type": "model", "name": "local/to"}}
    path = "/api/models/local/from/lfs-files/duplicate"
    answer = in_process_hub.send("POST", path, request | target)
    assert (answer.status, [item["sha256"] for item in answer.json()["failed"]]) == (200, ["0" * 64])
    assert in_process_hub.send("POST", path, request | target, role="read").status == 403
    assert in_process_hub.send("POST", path, request | target, role=None).status == 401
    for name, status in (("local/none", 404), ("none", 400), ("../x", 400)):
        assert in_process_hub.send("POST", path, request | {"target": {"name": name}}).status == status
    assert in_process_hub.send("POST", path, {"files": [{"sha256": "../../x"}]} | target).status == 400
    # No file names a Xet hash, because the Hub has no downloads by Xet.
    assert in_process_hub.api("read").get_paths_info("local/from", ["w.bin"])[0].xet_hash is None
    assert {getattr(item, "xet_hash", None) for item in in_process_hub.api().list_repo_tree("local/from")} == {None}


def test_duplicate_repo_copies_files_refs_and_variables(in_process_hub: ThreadHub) -> None:
    api = in_process_hub.api()
    first = in_process_hub.push("local/from", {"a": "1", "w.bin": BIG})
    second = in_process_hub.push("local/from", {"a": "2"})
    api.create_tag("local/from", tag="v1", revision=first)
    in_process_hub.git("local/from", "gc", "-q")
    url = api.duplicate_repo("local/from", to_id="team/to", private=True)
    assert (url.repo_id, url.files_copy_pending) == ("team/to", False)
    assert api.model_info("team/to").sha == second and api.model_info("team/to").private
    assert files(in_process_hub, "team/to", "v1") == {"a": b"1", "w.bin": BIG}
    in_process_hub.git("team/to", "fsck", "--strict")
    in_process_hub.push("team/to", {"a": "3"})
    api.delete_repo("team/to")
    assert files(in_process_hub, "local/from") == {"a": b"2", "w.bin": BIG}
    assert api.duplicate_repo("local/from", to_id="local/from", exist_ok=True).repo_id == "local/from"
    with pytest.raises(HfHubHTTPError, match=r"\b409 "):
        api.duplicate_repo("local/from", to_id="local/from")
    api.create_repo("local/s", repo_type="space", space_sdk="gradio", space_variables=[{"key": "A", "value": "1"}])
    added_variables = [{"key": "B", "value": "2"}]
    api.duplicate_repo("local/s", to_id="local/t", repo_type="space", space_variables=added_variables)
    variables = api.get_space_variables("local/t")
    assert {key: value.value for key, value in variables.items()} == {"A": "1", "B": "2"}
    with pytest.raises(BadRequestError, match="does not run them"):
        api.duplicate_repo("local/s", to_id="local/u", repo_type="space", space_hardware="t4-small")


# Moved repositories


def test_old_name_of_moved_repository_redirects(in_process_hub: ThreadHub, tmp_path: Path) -> None:
    api = in_process_hub.api()
    in_process_hub.push("local/old", {"a": "1", "w.bin": BIG})
    api.create_branch("local/old", branch="exp/a")
    api.move_repo("local/old", "team/middle")
    api.move_repo("team/middle", "local/new")
    for name in ("local/old", "team/middle"):
        answer = in_process_hub.send("GET", f"/api/models/{name}/tree/exp%2Fa?recursive=true&limit=5")
        location = "/api/models/local/new/tree/exp%2Fa?recursive=true&limit=5"
        assert (answer.status, answer.headers["Location"]) == (307, location)
        assert api.model_info(name).id == "local/new"
        assert files(in_process_hub, name, "exp/a") == {"a": b"1", "w.bin": BIG}
    folder = api.snapshot_download("local/old", cache_dir=in_process_hub.cache, local_dir=tmp_path / "old")
    assert (Path(folder) / "w.bin").read_bytes() == BIG
    assert HfFileSystem(endpoint=in_process_hub.url, token=in_process_hub.token).read_text("local/old/a") == "1"
    # Writes under the old name: a small file, large files, refs and settings.
    added = [CommitOperationAdd("b", b"2" * 100), CommitOperationAdd("x.bin", BIG + b"x")]
    api.create_commit("local/old", added, commit_message="more")
    large = "x" * (9 * 2**20)
    api.upload_file(path_or_fileobj=large.encode(), path_in_repo="large.txt", repo_id="local/old")
    api.create_tag("local/old", tag="v1")
    api.update_repo_settings("local/old", private=True)
    assert set(files(in_process_hub, "local/new", "v1")) == {"a", "b", "w.bin", "x.bin", "large.txt"}
    # Anonymous clients learn neither the old nor the new name of a private repository.
    with pytest.raises(RepositoryNotFoundError):
        in_process_hub.api(None).model_info("local/old")
    assert in_process_hub.send("GET", "/api/models/local/old", role=None).status == 401
    # A new repository takes over the old name; after its deletion the name redirects nowhere.
    in_process_hub.push("local/old", {"a": "another"})
    assert files(in_process_hub, "local/old") == {"a": b"another"}
    api.delete_repo("local/old")
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("local/old")
    api.delete_repo("local/new")
    in_process_hub.push("local/new", {"a": "another repository"})
    for name in ("local/old", "team/middle"):
        with pytest.raises(RepositoryNotFoundError):
            api.model_info(name)


def test_collection_follows_moved_repository(in_process_hub: ThreadHub) -> None:
    api = in_process_hub.api()
    slug = api.create_collection("c").slug
    for name in ("a", "gone"):
        api.create_repo(f"local/{name}")
        api.add_collection_item(slug, f"local/{name}", "model", note=name)
    api.move_repo("local/a", "team/b")
    api.delete_repo("local/gone")
    assert [item.item_id for item in in_process_hub.api(None).get_collection(slug).items] == ["team/b"]
    assert [item.item_id for item in api.get_collection(slug).items] == ["team/b", "local/gone"]
    assert [collection.slug for collection in in_process_hub.api(None).list_collections(item="models/team/b")] == [slug]


def test_repository_moved_back_and_forth_keeps_both_names(in_process_hub: ThreadHub) -> None:
    api = in_process_hub.api()
    api.create_repo("local/a", repo_type="dataset")
    for source, target in (("a", "b"), ("b", "a"), ("a", "b")):
        api.move_repo(f"local/{source}", f"local/{target}", repo_type="dataset")
        for name in "ab":
            assert api.dataset_info(f"local/{name}").id == f"local/{target}"
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("local/a")  # of another kind
    api.create_repo("local/taken", repo_type="dataset")
    with pytest.raises(HfHubHTTPError, match=r"\b409 "):
        api.move_repo("local/b", "local/taken", repo_type="dataset")
    with pytest.raises(RepositoryNotFoundError):
        api.move_repo("local/a", "local/c", repo_type="dataset")


@pytest.mark.parametrize("content", [b"", b"[1]", b"{}", b'{"to": 5}', b'{"to": "../x", "created": ""}', None])
def test_damaged_move_record_disables_only_old_name(in_process_hub: ThreadHub, content: bytes | None) -> None:
    in_process_hub.api().create_repo("local/a")
    in_process_hub.api().move_repo("local/a", "local/b")
    (record,) = (in_process_hub.root / "moved").iterdir()
    record.unlink()
    record.mkdir() if content is None else record.write_bytes(content)
    assert in_process_hub.send("GET", "/api/models/local/a").status == 404
    assert in_process_hub.send("GET", "/api/models/local/b").status == 200
    assert os.path.lexists(record)
