"""Files and refs of the embedded Hub, through the unmodified client: commits, trees, downloads, branches, tags."""

import hashlib
import random
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete, RepoFile, RepoFolder
from huggingface_hub.errors import BadRequestError, EntryNotFoundError, HfHubHTTPError, RevisionNotFoundError

from rlhf_zoo.hub.server import files_api, refs_api

BINARY = random.Random(0).randbytes(200_000)
REPO = "local/files"


@pytest.fixture
def hub(in_process_hub):
    in_process_hub.api().create_repo(REPO)
    return in_process_hub


@pytest.fixture
def api(hub):
    return hub.api()


def add(path: str, content: bytes) -> CommitOperationAdd:
    return CommitOperationAdd(path, content)


def commit(api, *operations, **options):
    return api.create_commit(REPO, list(operations), commit_message="Change files", **options)


def git_blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def download(api, hub, path: str, **options) -> bytes:
    return Path(api.hf_hub_download(REPO, path, cache_dir=hub.cache, **options)).read_bytes()


def test_commit_stores_small_files_in_git_and_large_ones_in_lfs(hub, api):
    result = commit(api, add("notes/a.txt", b"one\n"), add("model.safetensors", BINARY), add("empty.txt", b""))
    assert result.oid == api.model_info(REPO).sha
    assert result.commit_url == f"{hub.url}/{REPO}/commit/{result.oid}"
    assert download(api, hub, "notes/a.txt") == b"one\n"
    assert download(api, hub, "model.safetensors") == BINARY
    assert download(api, hub, "empty.txt") == b""
    siblings = {s.rfilename: s for s in api.model_info(REPO, files_metadata=True).siblings}
    assert siblings["notes/a.txt"].blob_id == git_blob(b"one\n")
    assert siblings["notes/a.txt"].lfs is None
    sha256 = hashlib.sha256(BINARY).hexdigest()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(BINARY)}\n".encode()
    large = siblings["model.safetensors"]
    assert (large.size, large.blob_id) == (len(BINARY), git_blob(pointer))
    assert (large.lfs.sha256, large.lfs.size, large.lfs.pointer_size) == (sha256, len(BINARY), len(pointer))
    assert hub.git(REPO, "show", "main:model.safetensors").encode() == pointer
    stored = hub.git_dir(REPO) / "lfs" / "objects" / sha256[:2] / sha256[2:4] / sha256
    assert stored.read_bytes() == BINARY
    assert hub.send("GET", f"/{REPO}/raw/main/model.safetensors").content == pointer


def test_commit_of_unchanged_files_is_skipped(api):
    first = commit(api, add("a.txt", b"a"), add("w.bin", BINARY))
    repeated = commit(api, add("a.txt", b"a"), add("w.bin", BINARY))
    assert repeated.oid == first.oid
    changed = commit(api, add("a.txt", b"b"), add("w.bin", BINARY))
    assert changed.oid != first.oid
    assert len(api.list_repo_commits(REPO)) == 3


def test_commit_requires_current_parent_commit(api):
    first = commit(api, add("a.txt", b"1"))
    second = commit(api, add("a.txt", b"2"), parent_commit=first.oid)
    with pytest.raises(HfHubHTTPError, match="A commit has happened since") as caught:
        commit(api, add("a.txt", b"3"), parent_commit=first.oid)
    assert caught.value.response.status_code == 412
    assert api.model_info(REPO).sha == second.oid
    commit(api, add("a.txt", b"3"), parent_commit=second.oid[:12])


def test_commit_copies_files_across_revisions_and_repositories(hub, api):
    api.create_repo("local/other")
    api.upload_file(path_or_fileobj=b"from there", path_in_repo="a.txt", repo_id="local/other")
    commit(api, add("a.txt", b"text"), add("w.bin", BINARY))
    old = api.model_info(REPO).sha
    commit(api, add("w.bin", b"\0new"))
    commit(
        api,
        CommitOperationCopy("a.txt", "copies/a.txt"),
        CommitOperationCopy("w.bin", "copies/old.bin", src_revision=old),
        CommitOperationCopy("w.bin", "copies/new.bin"),
        CommitOperationCopy("a.txt", "copies/other.txt", src_repo_id="local/other", src_repo_type="model"),
    )
    assert download(api, hub, "copies/other.txt") == b"from there"
    assert download(api, hub, "copies/a.txt") == b"text"
    assert download(api, hub, "copies/old.bin") == BINARY
    assert download(api, hub, "copies/new.bin") == b"\0new"
    with pytest.raises(EntryNotFoundError):
        commit(api, CommitOperationCopy("none.bin", "copies/none.bin"))


def test_commit_deletes_files_and_folders(hub, api):
    commit(api, *(add(path, path.encode()) for path in ("a.txt", "d/b.txt", "d/e/c.txt", "f/g.txt")))
    commit(api, CommitOperationDelete("a.txt"), CommitOperationDelete("d/"), add("d/new.txt", b"new"))
    assert sorted(api.list_repo_files(REPO)) == [".gitattributes", "d/new.txt", "f/g.txt"]
    api.delete_file("f/g.txt", REPO)
    assert sorted(api.list_repo_files(REPO)) == [".gitattributes", "d/new.txt"]
    with pytest.raises(EntryNotFoundError):
        api.list_repo_tree(REPO, "f").__next__()  # git has no empty folders
    for path in ("none.txt", "d", "d/new.txt/"):
        with pytest.raises(EntryNotFoundError, match="doesn't exist"):
            commit(api, CommitOperationDelete(path))
    api.delete_folder("d", REPO)
    assert api.list_repo_files(REPO) == [".gitattributes"]


def test_commit_is_atomic(hub, api):
    before = api.model_info(REPO).sha
    with pytest.raises(EntryNotFoundError):
        commit(api, add("good.txt", b"good"), CommitOperationDelete("none.txt"))
    commit(api, add("plain", b"a file"))
    with pytest.raises(BadRequestError, match="'plain' is a file"):
        commit(api, add("also.txt", b"x"), add("plain/inside.txt", b"y"))
    commit(api, add("folder/x.txt", b"x"))
    with pytest.raises(BadRequestError, match="a folder has that name"):
        commit(api, add("folder", b"y"))
    commit(api, CommitOperationDelete("folder/"), add("folder", b"now a file"))
    assert sorted(api.list_repo_files(REPO)) == [".gitattributes", "folder", "plain"]
    assert len(api.list_repo_commits(REPO)) == 4
    assert api.list_repo_commits(REPO)[-1].commit_id == before
    assert not list(hub.git_dir(REPO).glob("incoming-*"))
    assert hub.git(REPO, "fsck", "--full", "--strict") == ""


def test_commit_respects_gitignore_of_repository_and_commit(api):
    commit(api, add(".gitignore", b"build/\n*.tmp\n"))
    commit(api, add("build/x.txt", b"x"), add("y.tmp", b"y"), add("z.txt", b"z"))
    assert sorted(api.list_repo_files(REPO)) == [".gitattributes", ".gitignore", "z.txt"]
    commit(api, add(".gitignore", b"*.secret\n"), add("a.secret", b"a"), add("b.tmp", b"b"))
    assert sorted(api.list_repo_files(REPO)) == [".gitattributes", ".gitignore", "b.tmp", "z.txt"]


def test_upload_mode_follows_attributes_size_and_content(hub, api, tmp_path):
    commit(
        api,
        add("small.json", b"{}"),
        add("unknown", b"\0\1\2 binary"),
        add("long.txt", b"word " * 2_200_000),
        add("a b[1].odd", b"\0"),
        add(".gitattributes", b"*.kept -filter\n*.large filter=lfs diff=lfs merge=lfs -text\n"),
    )
    commit(api, add("text.large", b"text"))
    lfs = {s.rfilename for s in api.model_info(REPO, files_metadata=True).siblings if s.lfs}
    assert lfs == {"unknown", "long.txt", "a b[1].odd", "text.large"}
    # git-lfs must find them too: files without a pattern were added to .gitattributes, once each.
    clone = str(tmp_path / "clone")
    hub.git(REPO, "clone", "--quiet", ".", clone)
    listed = hub.git(REPO, "-C", clone, "check-attr", "filter", "unknown", "long.txt", "a b[1].odd", "small.json")
    assert listed.splitlines() == [
        "unknown: filter: lfs",
        "long.txt: filter: lfs",
        "a b[1].odd: filter: lfs",
        "small.json: filter: unspecified",
    ]
    before = hub.git(REPO, "show", "main:.gitattributes")
    commit(api, add("unknown", b"\0 again"), add("a b[1].odd", b"\0\0"))
    assert hub.git(REPO, "show", "main:.gitattributes") == before


def test_commit_rejects_lfs_pointer_without_content(api):
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12\n".encode()
    with pytest.raises(BadRequestError, match="LFS pointer"):
        commit(api, add("w.txt", pointer))


def test_tree_lists_files_folders_and_last_commits(api):
    commit(api, add("a.txt", b"a"), add("d/b.bin", BINARY), add("d/e/c.txt", b"cc"))
    result = commit(api, add("d/e/c.txt", b"ccc"))
    flat = list(api.list_repo_tree(REPO))
    assert [(type(item), item.path) for item in flat] == [
        (RepoFile, ".gitattributes"),
        (RepoFile, "a.txt"),
        (RepoFolder, "d"),
    ]
    deep = {item.path: item for item in api.list_repo_tree(REPO, "d", recursive=True, expand=True)}
    assert sorted(deep) == ["d/b.bin", "d/e", "d/e/c.txt"]
    assert deep["d/b.bin"].size == len(BINARY)
    assert deep["d/b.bin"].lfs.sha256 == hashlib.sha256(BINARY).hexdigest()
    assert deep["d/e/c.txt"].last_commit.oid == deep["d/e"].last_commit.oid == result.oid
    assert deep["d/b.bin"].last_commit.oid != result.oid
    assert deep["d/b.bin"].last_commit.title == "Change files"
    for path in ("none", "a.txt"):
        with pytest.raises(EntryNotFoundError):
            list(api.list_repo_tree(REPO, path))


def test_tree_is_paged(api, monkeypatch):
    monkeypatch.setattr(files_api, "_PAGE_SIZE", 10)
    monkeypatch.setattr(files_api, "_EXPANDED_PAGE_SIZE", 4)
    names = [f"d/{number:04d}.txt" for number in range(23)]
    commit(api, *(add(name, name.encode()) for name in names))
    for expand, sizes in ((False, [10, 10, 3]), (True, [4, 4, 4, 4, 4, 3])):
        pages = [page for page, _ in api._iter_repo_tree_pages(REPO, "d", expand=expand)]
        assert [len(page) for page in pages] == sizes
        assert [item.path for page in pages for item in page] == names


def test_paths_info_returns_existing_paths(api):
    commit(api, add("a.txt", b"a"), add("d/b.bin", BINARY))
    infos = {item.path: item for item in api.get_paths_info(REPO, ["a.txt", "d", "d/b.bin", "none"], expand=True)}
    assert sorted(infos) == ["a.txt", "d", "d/b.bin"]
    assert isinstance(infos["d"], RepoFolder)
    assert infos["d/b.bin"].lfs.size == len(BINARY)
    assert infos["a.txt"].blob_id == git_blob(b"a")
    assert infos["a.txt"].last_commit.oid == api.model_info(REPO).sha
    assert api.get_paths_info(REPO, "none") == []
    assert api.file_exists(REPO, "a.txt")
    assert not api.file_exists(REPO, "none.txt")


def test_download_returns_file_at_revision(hub, api):
    first = commit(api, add("a.txt", b"one")).oid
    api.create_tag(REPO, tag="exp/one", revision=first)
    commit(api, add("a.txt", b"two"))
    assert download(api, hub, "a.txt") == b"two"
    assert download(api, hub, "a.txt", revision=first) == b"one"
    assert download(api, hub, "a.txt", revision="exp/one") == b"one"
    snapshot = api.snapshot_download(REPO, revision="exp/one", cache_dir=hub.cache)
    assert Path(snapshot).name == first
    with pytest.raises(EntryNotFoundError):
        download(api, hub, "none.txt")
    no_exist = hub.cache / "models--local--files" / ".no_exist" / api.model_info(REPO).sha / "none.txt"
    assert no_exist.exists()


def test_download_answers_head_range_and_conditional_requests(hub, api):
    result = commit(api, add("w.bin", BINARY), add("a.txt", b"0123456789"))
    sha256 = hashlib.sha256(BINARY).hexdigest()
    for path, content, etag in (("w.bin", BINARY, sha256), ("a.txt", b"0123456789", git_blob(b"0123456789"))):
        url = f"/{REPO}/resolve/main/{path}"
        head = hub.send("HEAD", url)
        assert head.status == 200
        assert head.headers["X-Repo-Commit"] == result.oid
        assert head.headers["ETag"] == f'"{etag}"'
        assert head.headers["Content-Length"] == str(len(content))
        assert head.headers.get("X-Linked-Size") == (str(len(content)) if path == "w.bin" else None)
        assert "Content-Encoding" not in head.headers
        assert "X-Xet-Hash" not in head.headers
        for byte_range, part in (("bytes=3-", content[3:]), ("bytes=2-5", content[2:6]), ("bytes=-4", content[-4:])):
            answer = hub.send("GET", url, Range=byte_range)
            assert (answer.status, answer.content) == (206, part), byte_range
            start = content.index(part)
            assert answer.headers["Content-Range"] == f"bytes {start}-{start + len(part) - 1}/{len(content)}"
        assert hub.send("GET", url, Range="bytes=0-0").content == content[:1]
        beyond = hub.send("GET", url, Range=f"bytes={len(content)}-")
        assert (beyond.status, beyond.headers["Content-Range"]) == (416, f"bytes */{len(content)}")
        assert hub.send("GET", url, Range="lines=1-2").content == content
        changed = hub.send("GET", url, Range="bytes=3-", If_Range='"other"')
        assert (changed.status, changed.content) == (200, content)
        assert hub.send("GET", url, If_None_Match=f'"{etag}"').status == 304


def test_files_with_unusual_names_round_trip(hub, api):
    names = [
        "a b.txt",
        "ü/é.txt",
        "100%.txt",
        "a+b&c=d?.txt",
        "#hash.txt",
        "quote'\".txt",
        "x" * 255,
        "-dash",
        "日本/語",
    ]
    commit(api, *(add(name, name.encode()) for name in names))
    for name in names:
        assert download(api, hub, name) == name.encode(), name
    assert set(names) <= set(api.list_repo_files(REPO))
    assert hub.git(REPO, "fsck", "--full", "--strict") == ""


# Branches, tags and history


def upload(api, content: bytes, **options) -> str:
    options = {"path_in_repo": "a.txt", "repo_id": REPO, **options}
    return api.upload_file(path_or_fileobj=content, **options).oid


def test_branches_are_created_listed_and_deleted(hub, api):
    first = upload(api, b"one")
    api.create_branch(REPO, branch="exp/kl-0.1")
    api.create_branch(REPO, branch="old", revision=api.list_repo_commits(REPO)[-1].commit_id)
    with pytest.raises(HfHubHTTPError, match=r"\b409 "):
        api.create_branch(REPO, branch="exp/kl-0.1")
    api.create_branch(REPO, branch="exp/kl-0.1", exist_ok=True)
    with pytest.raises(RevisionNotFoundError):
        api.create_branch(REPO, branch="b", revision="none")

    second = upload(api, b"two", revision="exp/kl-0.1")
    refs = {ref.name: ref for ref in api.list_repo_refs(REPO).branches}
    assert refs["exp/kl-0.1"].ref == "refs/heads/exp/kl-0.1"
    assert {name: ref.target_commit for name, ref in refs.items()} == {
        "main": first,
        "exp/kl-0.1": second,
        "old": api.list_repo_commits(REPO)[-1].commit_id,
    }
    assert api.list_repo_files(REPO, revision="old") == [".gitattributes"]
    assert api.model_info(REPO, revision="exp/kl-0.1").sha == second
    assert api.model_info(REPO, revision="refs/heads/exp/kl-0.1").sha == second
    assert api.model_info(REPO, revision=first).sha == first
    with open(api.hf_hub_download(REPO, "a.txt", revision="exp/kl-0.1", cache_dir=hub.cache)) as file:
        assert file.read() == "two"
    listed = hub.git(REPO, "branch", "--format=%(refname:short)").split()
    assert sorted(listed) == ["exp/kl-0.1", "main", "old"]

    api.delete_branch(REPO, branch="exp/kl-0.1")
    assert [ref.name for ref in api.list_repo_refs(REPO).branches] == ["main", "old"]
    api.create_branch(REPO, branch="exp")  # the folder refs/heads/exp has gone
    with pytest.raises(RevisionNotFoundError):
        api.delete_branch(REPO, branch="exp/kl-0.1")
    with pytest.raises(HfHubHTTPError, match="cannot be deleted") as caught:
        api.delete_branch(REPO, branch="main")
    assert caught.value.response.status_code == 403


def test_tags_are_created_listed_and_deleted(hub, api):
    first = upload(api, b"one")
    second = upload(api, b"two")
    api.create_tag(REPO, tag="step-000040", revision=first)
    api.create_tag(REPO, tag="release/best", tag_message="The best by the judge")
    with pytest.raises(HfHubHTTPError, match=r"\b409 "):
        api.create_tag(REPO, tag="step-000040")
    api.create_tag(REPO, tag="step-000040", exist_ok=True)
    with pytest.raises(RevisionNotFoundError):
        api.create_tag(REPO, tag="x", revision="none")
    api.create_tag(REPO, tag="of-a-tag", revision="release/best")

    tags = {ref.name: ref.target_commit for ref in api.list_repo_refs(REPO).tags}
    assert tags == {"step-000040": first, "release/best": second, "of-a-tag": second}
    assert hub.git(REPO, "cat-file", "-t", "release/best").strip() == "tag"
    assert hub.git(REPO, "cat-file", "-t", "step-000040").strip() == "commit"
    assert "The best by the judge" in hub.git(REPO, "cat-file", "-p", "release/best")
    assert api.model_info(REPO, revision="release/best").sha == second
    assert api.list_repo_commits(REPO, revision="step-000040")[0].commit_id == first
    with pytest.raises(BadRequestError, match="is not a branch"):
        upload(api, b"three", revision="step-000040")

    api.delete_tag(REPO, tag="release/best")
    assert sorted(ref.name for ref in api.list_repo_refs(REPO).tags) == ["of-a-tag", "step-000040"]
    with pytest.raises(RevisionNotFoundError):
        api.delete_tag(REPO, tag="release/best")
    # The unreachable tag object is all that fsck may mention.
    assert all(line.startswith("dangling tag") for line in hub.git(REPO, "fsck", "--full", "--strict").splitlines())


def test_refs_reject_names_that_git_rejects(api):
    for name in ("a..b", "a b", "x~1", "x.lock", "-x", "a//b", "f" * 40, "HEAD", "y" * 300, ".hidden", "a/.b"):
        with pytest.raises(BadRequestError):
            api.create_branch(REPO, branch=name)
        with pytest.raises(BadRequestError):
            api.create_tag(REPO, tag=name)
    assert len(api.list_repo_refs(REPO).branches) == 1
    assert api.list_repo_refs(REPO).tags == []


def test_refs_reject_name_that_is_prefix_of_another(api):
    api.create_branch(REPO, branch="exp")
    api.create_tag(REPO, tag="v1/a")
    for call in (
        lambda: api.create_branch(REPO, branch="exp/a"),
        lambda: api.create_tag(REPO, tag="v1"),
    ):
        with pytest.raises(BadRequestError):
            call()


def test_commits_are_listed_newest_first(hub, api, monkeypatch):
    monkeypatch.setattr(refs_api, "_PAGE_SIZE", 5)
    oids = [
        upload(api, b"%d" % number, commit_message=f"Step {number}", commit_description="Why\n\nBecause")
        for number in range(11)
    ]
    commits = api.list_repo_commits(REPO)
    assert [c.commit_id for c in commits[:-1]] == oids[::-1]
    assert (commits[0].title, commits[0].message, commits[0].authors) == ("Step 10", "Why\n\nBecause", ["local"])
    assert commits[-1].title == "Create the repository"
    assert api.list_repo_commits(REPO, formatted=True)[0].formatted_title == "Step 10"
    assert hub.git(REPO, "log", "--format=%H").split() == [c.commit_id for c in commits]
    assert hub.git(REPO, "log", "-1", "--format=%B").strip() == "Step 10\n\nWhy\n\nBecause"


def test_squash_leaves_one_commit(hub, api):
    upload(api, b"one")
    upload(api, b"two")
    api.super_squash_history(REPO, commit_message="All in one")
    [only] = api.list_repo_commits(REPO)
    assert only.title == "All in one"
    assert sorted(api.list_repo_files(REPO)) == [".gitattributes", "a.txt"]


def test_packed_repository_is_read_and_written(hub, api):
    first = upload(api, b"one")
    api.create_tag(REPO, tag="v1", tag_message="annotated")
    api.create_branch(REPO, branch="b/c")
    hub.git(REPO, "gc", "--quiet", "--prune=now")
    assert not (hub.git_dir(REPO) / "refs" / "heads" / "main").exists()
    assert {ref.name: ref.target_commit for ref in api.list_repo_refs(REPO).branches} == {"main": first, "b/c": first}
    assert api.model_info(REPO, revision="v1").sha == first
    info = {s.rfilename: s.size for s in api.model_info(REPO, files_metadata=True).siblings}
    assert info["a.txt"] == 3
    second = upload(api, b"two")
    assert api.list_repo_commits(REPO)[1].commit_id == first
    api.delete_tag(REPO, tag="v1")
    api.delete_branch(REPO, branch="b/c")
    refs = api.list_repo_refs(REPO)
    assert ([ref.name for ref in refs.branches], refs.tags) == (["main"], [])
    assert refs.branches[0].target_commit == second
    hub.git(REPO, "fsck", "--full", "--strict")
