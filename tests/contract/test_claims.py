"""One run claims a repository; a second run is refused, and changes no tag and no commit of the first."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from thread_hub import ThreadHub, send_all

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client import publish
from rlhf_zoo.hub.client.connect import Hub
from rlhf_zoo.publishing.cards import card
from rlhf_zoo.publishing.sender import Sender, claim_stage_repository
from rlhf_zoo.runs.context import RunContext
from rlhf_zoo.runs.recipe import Recipe
from rlhf_zoo.runs.record import StageRecord, fingerprint

pytestmark = pytest.mark.attack

REPO = "local/toy-ppo"


@pytest.fixture(autouse=True)
def hub_and_run_directories(thread_hub: ThreadHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hub, and a working directory for the run directories `a`, `b`, …; no plots."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", thread_hub.url)
    monkeypatch.setattr(card, "_draw_plots", lambda *_: {})
    for name in ("create_commit", "create_tag"):  # so that monkeypatch restores them after each test
        monkeypatch.setattr(HfApi, name, getattr(HfApi, name))


def api() -> HfApi:
    return HfApi()


def run_context(name: str, **fields: Any) -> RunContext:
    hub = Hub("other", os.environ["HF_ENDPOINT"], "test")
    recipe = Recipe("toy", Path("."), {"description": "A toy."}, {})
    return RunContext(recipe=recipe, directory=Path(name), hub=hub, namespace="local", publish=True, **fields)


def send(name: str, **fields: Any) -> None:
    send_all(Sender(run_context(name, **fields), stages=("ppo",)))


def save(name: str, step: int, salt: str = "") -> None:
    record, resolved = StageRecord(Path(name) / "ppo"), {"kl_coef": 0.1}
    if not record.read():
        record.write(stage="ppo", recipe="toy", status="running", seed=1, hub="local", repo=None, parents={})
        record.write(fingerprint=fingerprint(resolved), resolved=resolved, versions={}, command="rlhf-zoo ppo toy")
    record.append_metrics({"step": step, "objective/score": step / 10, "objective/kl": 0.1})
    path = record.checkpoint_path(step)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    (path / "config.json").write_bytes(b"{}")
    (path / "model.safetensors").write_bytes(hashlib.sha256(f"{step} {salt or name}".encode()).digest() * 100)
    record.mark_complete(path)


def finish(name: str) -> None:
    StageRecord(Path(name) / "ppo").write(status="finished", finished="2026-11-21T00:00:00+00:00", chosen=None)


def assert_refused(call: Callable[[], Any], *parts: str) -> None:
    with pytest.raises(ZooError) as caught:
        call()
    assert all(part in str(caught.value) for part in parts), caught.value


def tags() -> dict[str, str]:
    return {ref.name: ref.target_commit for ref in api().list_repo_refs(REPO).tags}


def titles() -> list[str]:
    return [commit.title for commit in api().list_repo_commits(REPO)]


def head() -> str:
    return api().model_info(REPO).sha


def weights(revision: str) -> bytes:
    return Path(huggingface_hub.hf_hub_download(REPO, "model.safetensors", revision=revision)).read_bytes()


def local_weights(name: str, step: int) -> bytes:
    return (Path(name) / "ppo" / f"checkpoint-{step}" / "model.safetensors").read_bytes()


def run_before_next_commit(action: Callable[[], Any]) -> None:
    """Calls `action` once, after the sender has read the head and before it commits."""
    original = HfApi.create_commit

    def create_commit(self: HfApi, *args: Any, **kwargs: Any) -> Any:
        HfApi.create_commit = original
        action()
        return original(self, *args, **kwargs)

    HfApi.create_commit = create_commit


def test_second_run_is_refused_until_it_overwrites_repository() -> None:
    # Both find the repository free; the one that commits second is refused, before it trains.
    run_before_next_commit(lambda: claim_stage_repository(run_context("a"), "ppo"))
    assert_refused(
        lambda: claim_stage_repository(run_context("b"), "ppo"), REPO, "another run", "--namespace", "--overwrite_repo"
    )
    claim_stage_repository(run_context("a"), "ppo")
    assert titles()[0] == f"toy ppo: claimed for run {run_context('a').run_id('ppo')[:8]}"
    save("a", 5), save("b", 5)
    send("a")
    tags_before, head_before = tags(), head()
    assert_refused(lambda: send("b"), "belongs to another run (")
    save("a", 10), finish("a")
    send("a")
    assert {*tags()} == {"best", "step-000005", "step-000010"} and tags()["step-000005"] == tags_before["step-000005"]
    tags_before, head_before = tags(), head()
    assert_refused(lambda: claim_stage_repository(run_context("b"), "ppo"), ", which has finished")
    assert_refused(lambda: claim_stage_repository(run_context("b", drop_old_tags=True), "ppo"), ", which has finished")
    assert_refused(lambda: send("b", drop_old_tags=True), ", which has finished")
    assert (tags(), head()) == (tags_before, head_before)
    # Only --overwrite_repo lets the second run take the repository; the first is then refused.
    send("b", overwrite=True)
    assert {*tags()} == {"step-000005"} and weights("step-000005") == weights("main") == local_weights("b", 5)
    tags_before, head_before = tags(), head()
    save("a", 15)
    assert_refused(lambda: send("a"), "another run")
    assert (tags(), head()) == (tags_before, head_before)


def test_send_retries_after_foreign_commit_unless_another_run_claims() -> None:
    save("a", 5), save("a", 10)
    send("a")

    # Someone edits a file on the website between our read and our commit: the sender reads again and commits.
    edit = [CommitOperationAdd("notes.md", b"by hand")]
    save("a", 15)
    run_before_next_commit(lambda: api().create_commit(REPO, edit, commit_message="Update notes.md"))
    send("a")
    assert titles()[:2] == ["toy ppo: step 15", "Update notes.md"], titles()
    assert "notes.md" in api().list_repo_files(REPO) and weights("step-000015") == local_weights("a", 15)

    # The response to a commit was lost, then someone edits: the sender finds its commit and sends nothing twice.
    checkpoint = Path("a/ppo/checkpoint-15")
    (checkpoint / "published.json").unlink(), (checkpoint / "SENDING").write_text("toy ppo: step 15")
    StageRecord("a/ppo").write(repo=None)
    api().delete_tag(REPO, tag="step-000015")
    api().create_commit(REPO, [CommitOperationAdd("notes.md", b"again")], commit_message="Update notes.md")
    head_before, sent_commit = head(), api().list_repo_commits(REPO)[1].commit_id
    send("a")
    assert head() == head_before and tags()["step-000015"] == sent_commit

    # Another run claims the repository between our read and our commit: refused, and none of our files is there.
    save("a", 20), save("b", 5)
    run_before_next_commit(lambda: claim_stage_repository(run_context("b", overwrite=True), "ppo"))
    assert_refused(lambda: send("a"), "another run")
    assert not tags() and "claimed for run" in titles()[0]
    # When the claim file was deleted, only the run that published here may claim the repository.
    send("b")
    api().delete_file("claim.json", REPO)
    assert_refused(lambda: claim_stage_repository(run_context("c"), "ppo"), "belongs to another run")
    claim_stage_repository(run_context("b"), "ppo")


def test_branch_tag_of_run_that_claims_after_commit_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    save("a", 5)
    send("a")
    replace_files = publish._replace_files

    def commit_and_lose_claim(*args: Any, **options: Any) -> str:
        commit = replace_files(*args, **options)
        claim_stage_repository(run_context("b", overwrite=True), "ppo")
        api().create_tag(REPO, tag="v1", revision="main")
        return commit

    monkeypatch.setattr(publish, "_replace_files", commit_and_lose_claim)
    Path("cards").mkdir()
    context, folder = run_context("a"), Path("a/ppo/checkpoint-5")
    options: dict[str, Any] = {"run_id": context.run_id("ppo"), "hub": context.hub, "extra_files": Path("cards")}
    options |= {"message": "Merge", "branch": "merged", "tag": "v1"}
    assert_refused(lambda: publish.publish_on_branch(folder, REPO, **options), "another run")
    assert {*tags()} == {"v1"}


def test_step_tag_moves_only_with_overwrite_or_restart() -> None:
    save("a", 5), save("a", 10)
    send("a")
    tags_before = tags()

    # The same run, trained again without --restart: refused before training and when sending.
    shutil.rmtree("a/ppo")
    assert_refused(lambda: claim_stage_repository(run_context("a"), "ppo"), "step-000005", "--restart")
    save("a", 5, "other")
    assert_refused(lambda: send("a"), "step-000005", "moves only with --overwrite_repo")
    assert tags() == tags_before and weights("step-000005") != local_weights("a", 5)
    # Weights equal to the tag's count as sent.
    save("a", 5), save("a", 10)
    send("a")
    assert tags() == tags_before and json.loads(Path("a/ppo/run.json").read_text())["repo"]["tags"] == tags_before
    # --restart deletes the tags of the earlier training, and only those.
    shutil.rmtree("a/ppo")
    save("a", 5, "other")
    send("a", drop_old_tags=True)
    assert {*tags()} == {"step-000005"} and weights("step-000005") == local_weights("a", 5)
    # With --overwrite_repo the tag of a retrained step moves, also in a sender that has already sent it.
    save("a", 10), send("a")
    sender = Sender(run_context("a", overwrite=True), stages=("ppo",))
    send_all(sender)
    save("a", 10, "other last bits")
    send_all(sender)
    assert weights("step-000010") == local_weights("a", 10)
    shutil.rmtree("a/ppo")
    save("a", 5, "other"), send("a", drop_old_tags=True)
    tags_before = tags()
    send("a", drop_old_tags=True)
    assert tags() == tags_before

    # A repository without a claim (older versions wrote none) belongs to the run that knows its commits.
    api().delete_file("claim.json", REPO)
    shutil.copytree("a", "b"), os.unlink("b/run_id"), os.unlink("a/run_id")
    StageRecord("b/ppo").write(repo=None), os.unlink("b/ppo/checkpoint-5/published.json")
    assert_refused(lambda: send("b"), "belongs to another run")
    save("a", 10)
    send("a")
    assert tags()["step-000005"] == tags_before["step-000005"] and weights("main") == local_weights("a", 10)
    Path("a/run_id").write_text("of somebody")
    assert_refused(lambda: send("a"), "run_id cannot be used (it does not hold a run id)")


def test_copied_directory_is_another_run_and_overwrite_sends_again() -> None:
    save("a", 5), save("a", 10), finish("a")
    send("a")
    tags_before, head_before = tags(), head()

    # A copy of the directory is another run; a renamed one is the same.
    shutil.copytree("a", "b")
    assert_refused(lambda: send("b"), ", which has finished", "--overwrite_repo")
    assert_refused(lambda: claim_stage_repository(run_context("b", drop_old_tags=True), "ppo"), ", which has finished")
    os.rename("a", "moved"), os.rename("moved", "a")
    send("a")
    assert (tags(), head()) == (tags_before, head_before)

    # Another run takes the repository, the first takes it back: its replaced tags are sent again and recorded.
    save("b", 5, "other"), os.unlink("b/ppo/checkpoint-10/COMPLETE")
    StageRecord("b/ppo").write(repo=None, status="running")
    send("b", overwrite=True)
    assert {*tags()} == {"step-000005"} and weights("step-000005") == local_weights("b", 5)
    assert_refused(lambda: send("a"), "another run")
    send("a", overwrite=True)
    assert {*tags()} == {*tags_before} and all(
        weights(f"step-{step:06}") == local_weights("a", step) for step in (5, 10)
    )
    assert weights("best") == weights("main") == local_weights("a", 10)
    assert json.loads(Path("a/ppo/run.json").read_text())["repo"]["tags"] == tags()

    # A tag that is still to be created when another run claims the repository is not created.
    save("a", 15)
    original = HfApi.create_tag

    def refuse(self, *args, **kwargs):
        raise OSError("the Hub is away")

    HfApi.create_tag = refuse
    with pytest.raises(OSError, match="the Hub is away"):
        send("a")
    HfApi.create_tag = original
    claim_stage_repository(run_context("b", overwrite=True), "ppo")
    assert_refused(lambda: send("a"), "another run")
    # A tag created at the same moment is deleted again.
    claim_stage_repository(run_context("a", overwrite=True), "ppo")

    def claim_then_tag(self, *args, **kwargs):
        HfApi.create_tag = original
        claim_stage_repository(run_context("b", overwrite=True), "ppo")
        return original(self, *args, **kwargs)

    HfApi.create_tag = claim_then_tag
    assert_refused(lambda: send("a"), "another run")
    assert "step-000015" not in tags(), tags()

    # A damaged claim belongs to no run.
    api().create_commit(REPO, [CommitOperationAdd("claim.json", b"[" * 100_000)], commit_message="Damage")
    assert_refused(lambda: send("a"), "another run")
