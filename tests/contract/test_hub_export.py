"""`rlhf-zoo hub export` from one embedded Hub to another, which stands in for any Hub."""

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from fault_proxy import Fault, FaultProxy
from hub_fixture import Hub
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, constants
from thread_hub import ThreadHub
from zoo_process import errors, zoo

from rlhf_zoo.cli.hub import hub as command
from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.export import ExportResult, open_source
from rlhf_zoo.hub.client.export import export as export_repository

SOURCE, TARGET = "local/tiny-ppo", "user/tiny-ppo"
STEPS = 4


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a Hub with one repository as a run leaves it: tagged steps, a moved tag, a deleted file, a branch."""
    hub = ThreadHub(tmp_path_factory.mktemp("origin") / "hub")
    api = hub.api()
    api.create_repo(SOURCE)

    def commit(title: str, files: dict[str, bytes], deleted: tuple[str, ...] = (), **options: Any) -> str:
        operations: list[Any] = [CommitOperationAdd(name, content) for name, content in files.items()]
        operations += [CommitOperationDelete(name) for name in deleted]
        return api.create_commit(SOURCE, operations, commit_message=title, **options).oid

    card = b"---\nlibrary_name: transformers\n---\n# Card\n"
    commit("Card", {"README.md": card, "adapter.bin": os.urandom(20_000), "notes/old.txt": "älter\n".encode()})
    for step in range(STEPS):
        files = {"model.safetensors": os.urandom(60_000 + step), "state.json": b'{"step": %d}' % step}
        oid = commit(f"Step {step}", files, commit_description=f"Reward 0.{step}\n\nKL 0.0{step}")
        api.create_tag(SOURCE, tag=f"step-{step}", revision=oid, tag_message=f"Step {step}: reward 0.{step}")
        if step in (1, 2):
            if step == 2:
                api.delete_tag(SOURCE, tag="best")
            api.create_tag(SOURCE, tag="best", revision=oid, tag_message=f"Best so far:\n\nstep {step}")
    api.create_branch(SOURCE, branch="merged", revision="step-1")
    merged = commit("Merged", {"merged.safetensors": os.urandom(30_000)}, ("state.json",), revision="merged")
    api.create_tag(SOURCE, tag="v/merged", revision=merged)
    commit("Tidy", {"README.md": card + b"More.\n"}, ("adapter.bin", "notes/old.txt"))
    commit("Unseen suffix", {"weights.xyz": b"\0" + os.urandom(5_000), "again/model.copy": b"\0" * 5_000})
    hub.close()
    return hub.root


@pytest.fixture
def source_hub(origin: Path, tmp_path: Path) -> Iterator[ThreadHub]:
    hub = ThreadHub(Path(shutil.copytree(origin, tmp_path / "here" / "hub")))
    yield hub
    hub.close()


@pytest.fixture
def target_hub(in_process_hub: ThreadHub) -> ThreadHub:
    return in_process_hub


@pytest.fixture
def proxy(target_hub: ThreadHub) -> Iterator[FaultProxy]:
    with FaultProxy(target_hub.url) as proxy:
        yield proxy


@pytest.fixture
def export(
    source_hub: ThreadHub, target_hub: ThreadHub, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., ExportResult]:
    """Exports with the client of this process, whose waits between attempts are short."""
    fast_time = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: time.sleep(seconds / 50)})
    monkeypatch.setattr("huggingface_hub.utils._http.time", fast_time)
    monkeypatch.setenv("HF_TOKEN", target_hub.token)

    def export(
        to: str = target_hub.url,
        source: str = SOURCE,
        repo: str = TARGET,
        kind: str = "model",
        private: bool | None = None,
    ) -> ExportResult:
        monkeypatch.setattr(constants, "ENDPOINT", to)
        with open_source(source_hub.root, source, kind) as opened:
            return export_repository(opened, repo, private=private, report=lambda line: None)

    return export


def commits(hub: Hub, name: str, *revisions: str) -> list[str]:
    """Returns commit ids in git's order, oldest first."""
    return hub.git(name, "rev-list", "--reverse", "--topo-order", *revisions).split()


def tags(hub: Hub, name: str) -> dict[str, tuple[str, str]]:
    """Maps each tag to its tree and its annotation."""
    line_format = "%(refname:lstrip=2)%00%(if)%(*tree)%(then)%(*tree)%(else)%(tree)%(end)%00"
    line_format += "%(if)%(*tree)%(then)%(contents)%(end)%01"
    rows = hub.git(name, "for-each-ref", f"--format={line_format}", "refs/tags").strip().split("\1")
    fields = [row.strip("\n").split("\0") for row in rows if row.strip()]
    return {name: (tree, message.strip()) for name, tree, message in fields}


def is_copy(source_hub: Hub, target_hub: Hub) -> bool:
    """Whether histories and tags are equal. Trees contain blob ids, so equal trees mean equal content."""

    def logs(hub: Hub, name: str) -> list[str]:
        return [hub.git(name, "log", "--format=%T %s", branch) for branch in ("main", "merged")]

    return logs(source_hub, SOURCE) == logs(target_hub, TARGET) and tags(source_hub, SOURCE) == tags(target_hub, TARGET)


def test_export_copies_history_and_tags(source_hub, target_hub, export):
    result = export()
    assert is_copy(source_hub, target_hub)
    target_hub.git(TARGET, "fsck", "--full", "--strict")
    commit_map = result.commits
    assert list(commit_map) == [*commits(source_hub, SOURCE, "main"), *commits(source_hub, SOURCE, "main..merged")]
    assert list(commit_map.values()) == [
        *commits(target_hub, TARGET, "main"),
        *commits(target_hub, TARGET, "main..merged"),
    ]
    assert result.sent == len(commit_map) - 1 == STEPS + 4  # the Hub created the first commit
    assert result.branches == {name: target_hub.git(TARGET, "rev-parse", name).strip() for name in ("main", "merged")}
    assert result.tags == {
        name: target_hub.git(TARGET, "rev-list", "-1", name).strip() for name in tags(source_hub, SOURCE)
    }
    assert result.skipped_tags == []
    fork = source_hub.git(SOURCE, "merge-base", "main", "merged").strip()
    assert target_hub.git(TARGET, "merge-base", "main", "merged").strip() == commit_map[fork]

    oid = source_hub.git(SOURCE, "rev-list", "-1", "step-3").strip()
    date = source_hub.git(SOURCE, "log", "-1", "--format=%cd", "--date=format:%Y-%m-%dT%H:%M:%SZ", oid).strip()
    (exported_commit,) = [
        commit for commit in target_hub.api().list_repo_commits(TARGET) if commit.commit_id == commit_map[oid]
    ]
    assert exported_commit.title == "Step 3"
    assert exported_commit.message == f"Reward 0.3\n\nKL 0.03\n\nExported-From: {SOURCE}@{oid}  {date}"


def test_repeated_export_sends_only_new_commits(source_hub, target_hub, export, proxy):
    first = export(proxy.url)
    before = proxy.counts.requests
    assert before["commit"] == STEPS + 4 and before["lfs_upload"] == STEPS + 4
    assert export(proxy.url) == dataclasses.replace(first, sent=0)
    after = proxy.counts.requests
    operations = ("commit", "preupload", "lfs_batch", "lfs_upload", "create_tag", "delete_tag")
    assert [after[name] - before[name] for name in operations] == [0] * len(operations)
    api = source_hub.api()
    oid = api.upload_file(path_or_fileobj=b"1", path_in_repo="new.json", repo_id=SOURCE, commit_message="New").oid
    api.delete_tag(SOURCE, tag="best")
    api.create_tag(SOURCE, tag="best", revision=oid, tag_message="Best at last")
    api.upload_file(path_or_fileobj=b"2", path_in_repo="new.json", repo_id=SOURCE, revision="merged")
    assert export().sent == 2
    assert is_copy(source_hub, target_hub)


def test_export_resumes_after_each_fault(source_hub, target_hub, export, proxy):
    """Each call fails in another way and is repeated: nothing is lost or duplicated."""
    for fault in (
        Fault("refuse", "commit", nth=2),
        Fault("refuse", "commit", nth=2, forwarded=True),
        Fault("drop", "commit", forwarded=True),
        Fault("drop", "commit"),
        Fault("cut_upload", "commit", size=50),
        Fault("refuse", "commit", status=412),
    ):
        proxy.inject(fault)
        with pytest.raises(ZooError, match=rf"^{TARGET} on {proxy.url} refused the commit .* same command again"):
            export(proxy.url)
    proxy.inject(Fault("cut_upload", "lfs_upload", size=10_000), Fault("refuse", "lfs_batch", status=429, seconds=1))
    proxy.inject(Fault("refuse", "create_tag", nth=2), Fault("refuse", "create_tag", nth=4, forwarded=True))
    for _ in range(2):
        with pytest.raises(ZooError, match="refused its tags"):
            export(proxy.url)
    result = export(proxy.url)
    assert proxy.counts.faults == {
        "refuse 500": 2, "refuse 500 forwarded": 2, "drop forwarded": 1, "drop": 1, "cut_upload": 2, "refuse 412": 1,
        "refuse 429": 1,
    }  # fmt: skip
    assert is_copy(source_hub, target_hub)
    assert list(result.commits) == [*commits(source_hub, SOURCE, "main"), *commits(source_hub, SOURCE, "main..merged")]
    # Each large file was sent once, and the one whose upload was cut once more; refused commits resent none.
    assert proxy.counts.requests["lfs_upload"] == STEPS + 4 + 1


def test_export_adds_commit_when_first_commit_of_target_differs(source_hub, target_hub, export):
    """The Hugging Face Hub writes another .gitattributes: one more commit, and the same trees."""
    api = target_hub.api()
    api.create_repo(TARGET)
    api.upload_file(path_or_fileobj=b"*.bin filter=lfs\n", path_in_repo=".gitattributes", repo_id=TARGET)
    api.super_squash_history(TARGET, commit_message="initial commit")
    first = export()
    assert first.sent == STEPS + 5
    assert export() == dataclasses.replace(first, sent=0)
    assert tags(source_hub, SOURCE) == tags(target_hub, TARGET)
    trees = [hub.git(name, "log", "--format=%T").split() for hub, name in ((source_hub, SOURCE), (target_hub, TARGET))]
    assert trees[1][:-1] == trees[0]


# Rejected exports


def make_foreign_commit(source_hub: Hub, target_hub: Hub, export: Callable) -> None:
    target_hub.api().create_repo(TARGET)
    target_hub.api().upload_file(path_or_fileobj=b"1", path_in_repo="mine.txt", repo_id=TARGET)
    target_hub.api().super_squash_history(TARGET)


def commit_after_export(source_hub: Hub, target_hub: Hub, export: Callable) -> None:
    export()
    target_hub.api().upload_file(path_or_fileobj=b"1", path_in_repo="mine.txt", repo_id=TARGET)


def export_other_source(source_hub: Hub, target_hub: Hub, export: Callable) -> None:
    source_hub.api().create_repo("local/other")
    source_hub.api().upload_file(path_or_fileobj=b"1", path_in_repo="a.txt", repo_id="local/other")
    export(source="local/other")


def rewrite_source(source_hub: Hub, target_hub: Hub, export: Callable) -> None:
    export()
    source_hub.api().super_squash_history(SOURCE)


def move_branch_of_source(source_hub: Hub, target_hub: Hub, export: Callable) -> None:
    """Leaves the branch without commits of its own, so no commit is missing on the target."""
    source_hub.api().create_branch(SOURCE, branch="old", revision="step-3")
    export()
    source_hub.api().delete_branch(SOURCE, branch="old")
    source_hub.api().create_branch(SOURCE, branch="old", revision="step-0")


@pytest.mark.parametrize(
    "prepare",
    [make_foreign_commit, commit_after_export, export_other_source, rewrite_source, move_branch_of_source],
)
def test_export_rejects_target_with_other_commits(source_hub, target_hub, export, prepare):
    prepare(source_hub, target_hub, export)
    refs = target_hub.git(TARGET, "for-each-ref")
    with pytest.raises(
        ZooError, match=rf"^{TARGET} on {target_hub.url} holds the commit .*, which is not an export of {SOURCE}"
    ):
        export()
    assert target_hub.git(TARGET, "for-each-ref") == refs


def test_export_does_not_commit_over_concurrent_write(target_hub, export, proxy):
    """The other commit is made between two commits of the export."""
    proxy.inject(Fault("hold", "commit", nth=2))
    with ThreadPoolExecutor(1) as pool:
        exporting = pool.submit(export, proxy.url)
        proxy.wait_held()
        other_commit = target_hub.api().upload_file(path_or_fileobj=b"1", path_in_repo="mine.txt", repo_id=TARGET).oid
        proxy.release()
    with pytest.raises(ZooError, match="refused the commit"):
        exporting.result()
    assert target_hub.git(TARGET, "rev-parse", "main").strip() == other_commit
    with pytest.raises(ZooError, match=f"holds the commit {other_commit[:8]}"):
        export(proxy.url)


def test_export_fails_when_target_lacks_file(source_hub, export):
    """The client skips files that .gitignore names, and the source has one."""
    values = [{"path": ".gitignore", "content": "*.log\n"}, {"path": "a.log", "content": "1\n"}]
    answer = source_hub.commit(SOURCE, *({"key": "file", "value": value | {"encoding": "utf-8"}} for value in values))
    assert answer.status == 200
    with pytest.raises(ZooError, match=rf"differs from {SOURCE}@{answer.json()['commitOid'][:8]} in a\.log"):
        export()


def test_export_rejects_damaged_source_before_sending(source_hub, target_hub, export):
    (tree,) = source_hub.git(SOURCE, "ls-tree", "step-0", "model.safetensors").splitlines()
    pointer = source_hub.git(SOURCE, "cat-file", "blob", tree.split()[2])
    oid = pointer.partition("sha256:")[2][:64]
    path = source_hub.git_dir(SOURCE) / "lfs/objects" / oid[:2] / oid[2:4] / oid
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ZooError, match=f"^model.safetensors of local/tiny-ppo@.*{path}"):
        export()
    assert not target_hub.api().repo_exists(TARGET)


# Kinds of repositories


@pytest.mark.parametrize(("kind", "options"), [("dataset", {}), ("space", {"space_sdk": "gradio"})])
def test_export_copies_data_sets_and_spaces_and_their_privacy(source_hub, target_hub, export, kind, options):
    card = b"---\ntitle: A\nsdk: gradio\nsdk_version: 6.31.0\napp_file: app.py\n---\n"
    api = source_hub.api()
    api.create_repo("local/x", repo_type=kind, private=True, **options)
    files = {"README.md": card if kind == "space" else b"# Data\n", "app.py": b"pass\n", "data.parquet": b"\0" * 99}
    operations = [CommitOperationAdd(name, content) for name, content in files.items()]
    oid = api.create_commit("local/x", operations, commit_message="All", repo_type=kind).oid
    api.create_tag("local/x", tag="v1", revision=oid, repo_type=kind)
    export(kind=kind, repo="user/x", source="local/x")
    info = target_hub.api().repo_info("user/x", repo_type=kind, revision="v1")
    assert info.private and {sibling.rfilename for sibling in info.siblings} == {*files, ".gitattributes"}
    tree = source_hub.git("local/x", "rev-parse", "v1^{tree}", kind=kind)
    assert target_hub.git("user/x", "rev-parse", "v1^{tree}", kind=kind) == tree
    export(kind=kind, repo="user/open", source="local/x", private=False)
    assert not target_hub.api().repo_info("user/open", repo_type=kind).private
    with pytest.raises(ZooError, match="exists and is public: make it private first, or export with --public"):
        export(kind=kind, repo="user/open", source="local/x")


def test_export_of_squashed_history_omits_unreachable_tags(source_hub, target_hub, export):
    """The branch is sent completely, and tags that no branch reaches are reported."""
    source_hub.api().super_squash_history(SOURCE)
    result = export()
    assert result.skipped_tags == ["best", "step-2", "step-3"]
    sent_tags = {name: tag for name, tag in tags(source_hub, SOURCE).items() if name not in result.skipped_tags}
    assert tags(target_hub, TARGET) == sent_tags and {"step-0", "step-1", "v/merged"} <= sent_tags.keys()
    for branch in ("main", "merged"):
        trees = [
            hub.git(name, "rev-parse", f"{branch}^{{tree}}")
            for hub, name in ((source_hub, SOURCE), (target_hub, TARGET))
        ]
        assert trees[0] == trees[1]
    assert export() == dataclasses.replace(result, sent=0)


# The command


def test_export_command_reports_progress_and_hides_tokens(source_hub, target_hub, tmp_path):
    """Only RLHF_ZOO_HUB_TOKEN goes to a Hub that HF_ENDPOINT does not name; no token is ever shown."""
    arguments = ("hub", "export", SOURCE, "--root", str(source_hub.root), "--repo", TARGET)
    wrong_token = "hub_wrong_secret"
    target_flags = ("--to", target_hub.url)
    for extra_flags, env, message in (
        (target_flags, {"RLHF_ZOO_HUB_TOKEN": wrong_token}, "does not accept the token"),
        (
            target_flags,
            {"HF_TOKEN": target_hub.token},
            f"There is no token for {target_hub.url}: set RLHF_ZOO_HUB_TOKEN",
        ),
    ):
        result = zoo(*arguments, *extra_flags, home=tmp_path / "user", **env)
        assert (result.returncode, result.stdout) == (2, ""), result.stderr
        assert message in errors(result.stderr)[0]
        assert not any(token in result.stderr for token in env.values())
    env = {"HF_ENDPOINT": target_hub.url, "HF_TOKEN": target_hub.token, "RLHF_ZOO_HUB_TOKEN": wrong_token}
    result = zoo(*arguments, home=tmp_path / "user", **env)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("[")]
    assert len(lines) == STEPS + 4 and lines[0].startswith("[1/8] ") and lines[-1].startswith("[8/8] ")
    assert lines[1].endswith(" Step 0: 2 files (0.1 MB), 0 deleted")
    assert f"{target_hub.url}/{TARGET} holds {SOURCE}: 8 new commits were sent" in " ".join(result.stdout.split())
    assert "still name parents and commits of the embedded Hub" in result.stdout
    assert target_hub.token not in result.stdout + result.stderr
    result = zoo(*arguments, *target_flags, "--json", home=tmp_path / "user", RLHF_ZOO_HUB_TOKEN=target_hub.token)
    assert f'"url": "{target_hub.url}/{TARGET}"' in result.stdout and '"sent": 0' in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["local/tiny-pop", "--repo", TARGET], "has no model 'local/tiny-pop': the closest names are local/tiny-ppo"),
        (["local/tiny", "--repo", TARGET, "--repo_type", "space"], "has no space 'local/tiny': it has none"),
        (["/tmp", "--repo", TARGET], "has no model '/tmp': this is a path, but only a repository can be exported"),
        ([SOURCE, "--repo", TARGET, "--root", "/none"], "There is no embedded Hub in /none: name its folder"),
        (
            [SOURCE, "--repo", TARGET, "--repo_type", "dataset"],
            f"{SOURCE} is a model, not a dataset: pass --repo_type model.",
        ),
        ([SOURCE, "--repo", "ppo"], "--repo is 'ppo', which no Hub accepts: write USER/NAME"),
    ],
)
def test_export_command_rejects_unknown_or_invalid_names(origin, arguments, message):
    with pytest.raises(ZooError, match=message):
        CliRunner().invoke(command, ["export", "--root", str(origin), *arguments], catch_exceptions=False)
