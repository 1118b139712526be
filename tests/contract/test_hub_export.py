"""`rlhf-zoo hub export`: from one embedded Hub to another, as to any Hub."""

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
    """The root of a Hub with one repository as a run leaves it: steps with tags, a tag that moved, a file that went, a
    branch."""
    hub = ThreadHub(tmp_path_factory.mktemp("origin") / "hub")
    api = hub.api()
    api.create_repo(SOURCE)

    def commit(title: str, files: dict[str, bytes], gone: tuple[str, ...] = (), **options: Any) -> str:
        operations: list[Any] = [CommitOperationAdd(name, content) for name, content in files.items()]
        operations += [CommitOperationDelete(name) for name in gone]
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
def here(origin: Path, tmp_path: Path) -> Iterator[ThreadHub]:
    hub = ThreadHub(Path(shutil.copytree(origin, tmp_path / "here" / "hub")))
    yield hub
    hub.close()


@pytest.fixture
def there(near_hub: ThreadHub) -> ThreadHub:
    return near_hub


@pytest.fixture
def proxy(there: ThreadHub) -> Iterator[FaultProxy]:
    with FaultProxy(there.url) as proxy:
        yield proxy


@pytest.fixture
def export(here: ThreadHub, there: ThreadHub, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ExportResult]:
    """The client of this process talks to the target; its waits between attempts are short."""
    hurried = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: time.sleep(seconds / 50)})
    monkeypatch.setattr("huggingface_hub.utils._http.time", hurried)
    monkeypatch.setenv("HF_TOKEN", there.token)

    def export(
        to: str = there.url, source: str = SOURCE, repo: str = TARGET, kind: str = "model", private: bool | None = None
    ) -> ExportResult:
        monkeypatch.setattr(constants, "ENDPOINT", to)
        with open_source(here.root, source, kind) as found:
            return export_repository(found, repo, private=private, report=lambda line: None)

    return export


def commits(hub: Hub, name: str, *revisions: str) -> list[str]:
    """Ids, oldest first, by git itself."""
    return hub.git(name, "rev-list", "--reverse", "--topo-order", *revisions).split()


def tags(hub: Hub, name: str) -> dict[str, tuple[str, str]]:
    """Name -> the tree behind it and the annotation."""
    form = "%(refname:lstrip=2)%00%(if)%(*tree)%(then)%(*tree)%(else)%(tree)%(end)%00"
    form += "%(if)%(*tree)%(then)%(contents)%(end)%01"
    rows = hub.git(name, "for-each-ref", f"--format={form}", "refs/tags").strip().split("\1")
    found = [row.strip("\n").split("\0") for row in rows if row.strip()]
    return {name: (tree, message.strip()) for name, tree, message in found}


def is_copy(here: Hub, there: Hub) -> bool:
    """Trees carry blob ids, and blobs of large files their sha256: equal trees are equal content."""

    def shown(hub: Hub, name: str) -> list[str]:
        return [hub.git(name, "log", "--format=%T %s", branch) for branch in ("main", "merged")]

    return shown(here, SOURCE) == shown(there, TARGET) and tags(here, SOURCE) == tags(there, TARGET)


def test_history_and_tags(here, there, export):
    done = export()
    assert is_copy(here, there)
    there.git(TARGET, "fsck", "--full", "--strict")
    mapped = done.commits
    assert list(mapped) == [*commits(here, SOURCE, "main"), *commits(here, SOURCE, "main..merged")]
    assert list(mapped.values()) == [*commits(there, TARGET, "main"), *commits(there, TARGET, "main..merged")]
    assert done.sent == len(mapped) - 1 == STEPS + 4  # the Hub made the first one itself
    assert done.branches == {name: there.git(TARGET, "rev-parse", name).strip() for name in ("main", "merged")}
    assert done.tags == {name: there.git(TARGET, "rev-list", "-1", name).strip() for name in tags(here, SOURCE)}
    assert done.left_out == []
    fork = here.git(SOURCE, "merge-base", "main", "merged").strip()
    assert there.git(TARGET, "merge-base", "main", "merged").strip() == mapped[fork]

    oid = here.git(SOURCE, "rev-list", "-1", "step-3").strip()
    date = here.git(SOURCE, "log", "-1", "--format=%cd", "--date=format:%Y-%m-%dT%H:%M:%SZ", oid).strip()
    (made,) = [one for one in there.api().list_repo_commits(TARGET) if one.commit_id == mapped[oid]]
    assert made.title == "Step 3"
    assert made.message == f"Reward 0.3\n\nKL 0.03\n\nExported-From: {SOURCE}@{oid}  {date}"


def test_a_second_time_sends_what_is_new(here, there, export, proxy):
    first = export(proxy.url)
    before = proxy.counts.requests
    assert before["commit"] == STEPS + 4 and before["lfs_upload"] == STEPS + 4
    assert export(proxy.url) == dataclasses.replace(first, sent=0)
    after = proxy.counts.requests
    sending = ("commit", "preupload", "lfs_batch", "lfs_upload", "create_tag", "delete_tag")
    assert [after[name] - before[name] for name in sending] == [0] * len(sending)
    api = here.api()
    oid = api.upload_file(path_or_fileobj=b"1", path_in_repo="new.json", repo_id=SOURCE, commit_message="New").oid
    api.delete_tag(SOURCE, tag="best")
    api.create_tag(SOURCE, tag="best", revision=oid, tag_message="Best at last")
    api.upload_file(path_or_fileobj=b"2", path_in_repo="new.json", repo_id=SOURCE, revision="merged")
    assert export().sent == 2
    assert is_copy(here, there)


def test_interrupted_and_resumed(here, there, export, proxy):
    """Each call fails in another way and is made again: nothing is lost, nothing is there twice."""
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
    done = export(proxy.url)
    assert proxy.counts.faults == {
        "refuse 500": 2, "refuse 500 forwarded": 2, "drop forwarded": 1, "drop": 1, "cut_upload": 2, "refuse 412": 1,
        "refuse 429": 1,
    }  # fmt: skip
    assert is_copy(here, there)
    assert list(done.commits) == [*commits(here, SOURCE, "main"), *commits(here, SOURCE, "main..merged")]
    # Each large file came once: the one that was torn was sent once more, and those of refused commits were not.
    assert proxy.counts.requests["lfs_upload"] == STEPS + 4 + 1


def test_a_target_that_makes_other_first_commits(here, there, export):
    """The Hugging Face Hub's .gitattributes is not ours: one commit more, and the same trees."""
    api = there.api()
    api.create_repo(TARGET)
    api.upload_file(path_or_fileobj=b"*.bin filter=lfs\n", path_in_repo=".gitattributes", repo_id=TARGET)
    api.super_squash_history(TARGET, commit_message="initial commit")
    first = export()
    assert first.sent == STEPS + 5
    assert export() == dataclasses.replace(first, sent=0)
    assert tags(here, SOURCE) == tags(there, TARGET)
    trees = [hub.git(name, "log", "--format=%T").split() for hub, name in ((here, SOURCE), (there, TARGET))]
    assert trees[1][:-1] == trees[0]


# Refusals


def foreign_commit(here: Hub, there: Hub, export: Callable) -> None:
    there.api().create_repo(TARGET)
    there.api().upload_file(path_or_fileobj=b"1", path_in_repo="mine.txt", repo_id=TARGET)
    there.api().super_squash_history(TARGET)


def commit_on_top(here: Hub, there: Hub, export: Callable) -> None:
    export()
    there.api().upload_file(path_or_fileobj=b"1", path_in_repo="mine.txt", repo_id=TARGET)


def export_of_another(here: Hub, there: Hub, export: Callable) -> None:
    here.api().create_repo("local/other")
    here.api().upload_file(path_or_fileobj=b"1", path_in_repo="a.txt", repo_id="local/other")
    export(source="local/other")


def source_rewritten(here: Hub, there: Hub, export: Callable) -> None:
    export()
    here.api().super_squash_history(SOURCE)


@pytest.mark.parametrize("before", [foreign_commit, commit_on_top, export_of_another, source_rewritten])
def test_a_target_with_anything_else_is_left_alone(here, there, export, before):
    before(here, there, export)
    refs = there.git(TARGET, "for-each-ref")
    with pytest.raises(
        ZooError, match=rf"^{TARGET} on {there.url} holds the commit .*, which is not an export of {SOURCE}"
    ):
        export()
    assert there.git(TARGET, "for-each-ref") == refs


def test_another_writer_meanwhile(there, export, proxy):
    """Nothing is put on top of a commit that came in between."""
    proxy.inject(Fault("hold", "commit", nth=2))
    with ThreadPoolExecutor(1) as pool:
        exporting = pool.submit(export, proxy.url)
        proxy.wait_held()
        mine = there.api().upload_file(path_or_fileobj=b"1", path_in_repo="mine.txt", repo_id=TARGET).oid
        proxy.release()
    with pytest.raises(ZooError, match="refused the commit"):
        exporting.result()
    assert there.git(TARGET, "rev-parse", "main").strip() == mine
    with pytest.raises(ZooError, match=f"holds the commit {mine[:8]}"):
        export(proxy.url)


def test_files_that_do_not_arrive_are_missed(here, export):
    """The client leaves out what a .gitignore names, as another client of the source had not."""
    values = [{"path": ".gitignore", "content": "*.log\n"}, {"path": "a.log", "content": "1\n"}]
    answer = here.commit(SOURCE, *({"key": "file", "value": value | {"encoding": "utf-8"}} for value in values))
    assert answer.status == 200
    with pytest.raises(ZooError, match=rf"differs from {SOURCE}@{answer.json()['commitOid'][:8]} in a\.log"):
        export()


def test_a_damaged_source_is_found_before_anything_is_sent(here, there, export):
    (tree,) = here.git(SOURCE, "ls-tree", "step-0", "model.safetensors").splitlines()
    pointer = here.git(SOURCE, "cat-file", "blob", tree.split()[2])
    oid = pointer.partition("sha256:")[2][:64]
    path = here.git_dir(SOURCE) / "lfs/objects" / oid[:2] / oid[2:4] / oid
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ZooError, match=f"^model.safetensors of local/tiny-ppo@.*{path}"):
        export()
    assert not there.api().repo_exists(TARGET)


# Kinds of repositories


@pytest.mark.parametrize(("kind", "options"), [("dataset", {}), ("space", {"space_sdk": "gradio"})])
def test_data_sets_spaces_and_private_ones(here, there, export, kind, options):
    card = b"---\ntitle: A\nsdk: gradio\nsdk_version: 6.31.0\napp_file: app.py\n---\n"
    api = here.api()
    api.create_repo("local/x", repo_type=kind, private=True, **options)
    files = {"README.md": card if kind == "space" else b"# Data\n", "app.py": b"pass\n", "data.parquet": b"\0" * 99}
    operations = [CommitOperationAdd(name, content) for name, content in files.items()]
    oid = api.create_commit("local/x", operations, commit_message="All", repo_type=kind).oid
    api.create_tag("local/x", tag="v1", revision=oid, repo_type=kind)
    export(kind=kind, repo="user/x", source="local/x")
    info = there.api().repo_info("user/x", repo_type=kind, revision="v1")
    assert info.private and {one.rfilename for one in info.siblings} == {*files, ".gitattributes"}
    tree = here.git("local/x", "rev-parse", "v1^{tree}", kind=kind)
    assert there.git("user/x", "rev-parse", "v1^{tree}", kind=kind) == tree
    export(kind=kind, repo="user/open", source="local/x", private=False)
    assert not there.api().repo_info("user/open", repo_type=kind).private
    with pytest.raises(ZooError, match="exists and is public: make it private first, or export with --public"):
        export(kind=kind, repo="user/open", source="local/x")


def test_tags_and_branches_that_main_does_not_lead_to(here, there, export):
    """A squashed history: the branch is sent whole, and a tag that nothing leads to is named."""
    here.api().super_squash_history(SOURCE)
    done = export()
    assert done.left_out == ["best", "step-2", "step-3"]
    kept = {name: tag for name, tag in tags(here, SOURCE).items() if name not in done.left_out}
    assert tags(there, TARGET) == kept and {"step-0", "step-1", "v/merged"} <= kept.keys()
    for branch in ("main", "merged"):
        trees = [hub.git(name, "rev-parse", f"{branch}^{{tree}}") for hub, name in ((here, SOURCE), (there, TARGET))]
        assert trees[0] == trees[1]
    assert export() == dataclasses.replace(done, sent=0)


# The command


def test_what_a_user_reads(here, there, tmp_path):
    """Only RLHF_ZOO_HUB_TOKEN goes to a Hub that HF_ENDPOINT does not name; no token is ever shown."""
    arguments = ("hub", "export", SOURCE, "--root", str(here.root), "--repo", TARGET)
    wrong = "hub_wrong_secret"
    to = ("--to", there.url)
    for more, env, message in (
        (to, {"RLHF_ZOO_HUB_TOKEN": wrong}, "does not accept the token"),
        (to, {"HF_TOKEN": there.token}, f"There is no token for {there.url}: set RLHF_ZOO_HUB_TOKEN"),
    ):
        done = zoo(*arguments, *more, home=tmp_path / "user", **env)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert message in errors(done.stderr)[0]
        assert not any(token in done.stderr for token in env.values())
    env = {"HF_ENDPOINT": there.url, "HF_TOKEN": there.token, "RLHF_ZOO_HUB_TOKEN": wrong}
    done = zoo(*arguments, home=tmp_path / "user", **env)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert len(lines) == STEPS + 4 and lines[0].startswith("[1/8] ") and lines[-1].startswith("[8/8] ")
    assert lines[1].endswith(" Step 0: 2 files (0.1 MB), 0 deleted")
    assert f"{there.url}/{TARGET} holds {SOURCE}: 8 new commits were sent" in " ".join(done.stdout.split())
    assert "still name parents and commits of the embedded Hub" in done.stdout
    assert there.token not in done.stdout + done.stderr
    done = zoo(*arguments, *to, "--json", home=tmp_path / "user", RLHF_ZOO_HUB_TOKEN=there.token)
    assert f'"url": "{there.url}/{TARGET}"' in done.stdout and '"sent": 0' in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["local/tiny-pop", "--repo", TARGET], "has no repository 'local/tiny-pop', did you mean 'local/tiny-ppo'"),
        (
            [SOURCE, "--repo", TARGET, "--repo_type", "dataset"],
            f"no repository '{SOURCE}' of type dataset: it has none",
        ),
        ([SOURCE, "--repo", "ppo"], "--repo is 'ppo', which no Hub accepts: write USER/NAME"),
    ],
)
def test_names(origin, arguments, message):
    with pytest.raises(ZooError, match=message):
        CliRunner().invoke(command, ["export", *arguments, "--root", str(origin)], catch_exceptions=False)
