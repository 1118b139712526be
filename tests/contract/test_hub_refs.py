"""Branches, tags and history of the embedded Hub, through the unmodified client."""

from __future__ import annotations

import pytest
from huggingface_hub.errors import BadRequestError, HfHubHTTPError, RevisionNotFoundError

from rlhf_zoo.hub_server import refs_api

REPO = "local/refs"


@pytest.fixture
def hub(near_hub):
    near_hub.api().create_repo(REPO)
    return near_hub


@pytest.fixture
def api(hub):
    return hub.api()


def upload(api, content: bytes, **options) -> str:
    options = {"path_in_repo": "a.txt", "repo_id": REPO, **options}
    return api.upload_file(path_or_fileobj=content, **options).oid


def test_branches(hub, api):
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


def test_tags(hub, api):
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


def test_names_that_git_refuses(api):
    for name in ("a..b", "a b", "x~1", "x.lock", "-x", "a//b", "f" * 40, "HEAD", "y" * 300, ".hidden", "a/.b"):
        with pytest.raises(BadRequestError):
            api.create_branch(REPO, branch=name)
        with pytest.raises(BadRequestError):
            api.create_tag(REPO, tag=name)
    assert len(api.list_repo_refs(REPO).branches) == 1
    assert api.list_repo_refs(REPO).tags == []


def test_names_that_exclude_each_other(api):
    api.create_branch(REPO, branch="exp")
    api.create_tag(REPO, tag="v1/a")
    for call in (
        lambda: api.create_branch(REPO, branch="exp/a"),
        lambda: api.create_tag(REPO, tag="v1"),
        lambda: api.create_tag(REPO, tag="exp"),
        lambda: api.create_branch(REPO, branch="v1/a"),
    ):
        with pytest.raises(BadRequestError):
            call()


def test_history(hub, api, monkeypatch):
    monkeypatch.setattr(refs_api, "_PAGE", 5)
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


def test_squash(hub, api):
    upload(api, b"one")
    upload(api, b"two")
    api.super_squash_history(REPO, commit_message="All in one")
    [only] = api.list_repo_commits(REPO)
    assert only.title == "All in one"
    assert sorted(api.list_repo_files(REPO)) == [".gitattributes", "a.txt"]


def test_repository_that_git_has_packed(hub, api):
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
