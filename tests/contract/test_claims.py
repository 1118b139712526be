"""A repository belongs to one run: of two, one is told so, and nothing that the other published moves."""

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
from thread_hub import ThreadHub

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.connect import Hub
from rlhf_zoo.publishing.cards import card
from rlhf_zoo.publishing.sender import Sender, claim_stage_repository
from rlhf_zoo.runs.context import RunContext
from rlhf_zoo.runs.recipe import Recipe
from rlhf_zoo.runs.record import StageRecord, fingerprint

pytestmark = pytest.mark.attack

REPO = "local/toy-ppo"


@pytest.fixture(autouse=True)
def place(thread_hub: ThreadHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run directories `a`, `b` and so on, and a Hub; no plots."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", thread_hub.url)
    monkeypatch.setattr(card, "_plots", lambda *_: {})
    for name in ("create_commit", "create_tag"):  # so that they are put back whatever a test leaves there
        monkeypatch.setattr(HfApi, name, getattr(HfApi, name))


def api() -> HfApi:
    return HfApi()


def run(name: str, **fields: Any) -> RunContext:
    hub = Hub("other", os.environ["HF_ENDPOINT"], "test")
    recipe = Recipe("toy", Path("."), {"description": "A toy."}, {})
    return RunContext(recipe=recipe, directory=Path(name), hub=hub, namespace="local", publish=True, **fields)


def send(name: str, **fields: Any) -> None:
    Sender(run(name, **fields), stages=("ppo",)).send_all()


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


def refused(call: Callable[[], Any], *parts: str) -> None:
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


def mine(name: str, step: int) -> bytes:
    return (Path(name) / "ppo" / f"checkpoint-{step}" / "model.safetensors").read_bytes()


def between(act: Callable[[], Any]) -> None:
    """`act` happens once, after the head was read and before the commit that was made for it."""
    original = HfApi.create_commit

    def create_commit(self: HfApi, *args: Any, **kwargs: Any) -> Any:
        HfApi.create_commit = original
        act()
        return original(self, *args, **kwargs)

    HfApi.create_commit = create_commit


def test_two_runs_with_equal_settings_do_not_mix() -> None:
    # Both find the repository free; the one that commits second is refused, before it trains.
    between(lambda: claim_stage_repository(run("a"), "ppo"))
    refused(lambda: claim_stage_repository(run("b"), "ppo"), REPO, "another run", "--namespace", "--overwrite_repo")
    claim_stage_repository(run("a"), "ppo")
    assert titles()[0] == f"toy ppo: claimed for run {run('a').run_id('ppo')[:8]}"
    save("a", 5), save("b", 5)
    send("a")
    before, at = tags(), head()
    refused(lambda: send("b"), "belongs to another run (")
    save("a", 10), finish("a")
    send("a")
    assert {*tags()} == {"best", "step-000005", "step-000010"} and tags()["step-000005"] == before["step-000005"]
    before, at = tags(), head()
    refused(lambda: claim_stage_repository(run("b"), "ppo"), ", which has finished")
    refused(lambda: claim_stage_repository(run("b", drop_old_tags=True), "ppo"), ", which has finished")
    refused(lambda: send("b", drop_old_tags=True), ", which has finished")
    assert (tags(), head()) == (before, at)
    # Only when it is told to does the second take the repository; the first then writes nothing more.
    send("b", overwrite=True)
    assert {*tags()} == {"step-000005"} and weights("step-000005") == weights("main") == mine("b", 5)
    before, at = tags(), head()
    save("a", 15)
    refused(lambda: send("a"), "another run")
    assert (tags(), head()) == (before, at)


def test_a_commit_made_meanwhile_stops_a_run_only_where_it_is_another_runs() -> None:
    save("a", 5), save("a", 10)
    send("a")

    # Somebody edits a file on the website between our reading and our commit: read again, and go on.
    edit = [CommitOperationAdd("notes.md", b"by hand")]
    save("a", 15)
    between(lambda: api().create_commit(REPO, edit, commit_message="Update notes.md"))
    send("a")
    assert titles()[:2] == ["toy ppo: step 15", "Update notes.md"], titles()
    assert "notes.md" in api().list_repo_files(REPO) and weights("step-000015") == mine("a", 15)

    # The answer to a commit was never heard, and then somebody edits: the commit is found, and nothing is sent twice.
    checkpoint = Path("a/ppo/checkpoint-15")
    (checkpoint / "published.json").unlink(), (checkpoint / "SENDING").write_text("toy ppo: step 15")
    StageRecord("a/ppo").write(repo=None)
    api().delete_tag(REPO, tag="step-000015")
    api().create_commit(REPO, [CommitOperationAdd("notes.md", b"again")], commit_message="Update notes.md")
    at, sent = head(), api().list_repo_commits(REPO)[1].commit_id
    send("a")
    assert head() == at and tags()["step-000015"] == sent

    # Another run takes the repository between our reading and our commit: refused, and not one file of ours is there.
    save("a", 20), save("b", 5)
    between(lambda: claim_stage_repository(run("b", overwrite=True), "ppo"))
    refused(lambda: send("a"), "another run")
    assert not tags() and "claimed for run" in titles()[0]
    # Without the claim file, which somebody deleted, it is nobody's to take but the run's that filled it.
    send("b")
    api().delete_file("claim.json", REPO)
    refused(lambda: claim_stage_repository(run("c"), "ppo"), "belongs to another run")
    claim_stage_repository(run("b"), "ppo")


def test_a_steps_tag_never_moves_unasked() -> None:
    save("a", 5), save("a", 10)
    send("a")
    before = tags()

    # The same run, trained again without a word to the Hub: found before it trains, and when it sends.
    shutil.rmtree("a/ppo")
    refused(lambda: claim_stage_repository(run("a"), "ppo"), "step-000005", "--restart")
    save("a", 5, "other")
    refused(lambda: send("a"), "step-000005", "is never moved", "--overwrite_repo")
    assert tags() == before and weights("step-000005") != mine("a", 5)
    # Equal weights are the tag's own: taken for sent.
    save("a", 5), save("a", 10)
    send("a")
    assert tags() == before and json.loads(Path("a/ppo/run.json").read_text())["repo"]["tags"] == before
    # --restart drops the tags of what was before, and only those.
    shutil.rmtree("a/ppo")
    save("a", 5, "other")
    send("a", drop_old_tags=True)
    assert {*tags()} == {"step-000005"} and weights("step-000005") == mine("a", 5)
    # Asked, the tag of a step that is trained again with other last bits moves, also once the sender is under way.
    save("a", 10), send("a")
    sender = Sender(run("a", overwrite=True), stages=("ppo",))
    sender.send_all()
    save("a", 10, "other last bits")
    sender.send_all()
    assert weights("step-000010") == mine("a", 10)
    shutil.rmtree("a/ppo")
    save("a", 5, "other"), send("a", drop_old_tags=True)
    before = tags()
    send("a", drop_old_tags=True)
    assert tags() == before

    # A repository of the time before there were claims: of the run that knows its commits, and of no other.
    api().delete_file("claim.json", REPO)
    shutil.copytree("a", "b"), os.unlink("b/run_id"), os.unlink("a/run_id")
    StageRecord("b/ppo").write(repo=None), os.unlink("b/ppo/checkpoint-5/published.json")
    refused(lambda: send("b"), "belongs to another run")
    save("a", 10)
    send("a")
    assert tags()["step-000005"] == before["step-000005"] and weights("main") == mine("a", 10)
    Path("a/run_id").write_text("of somebody")
    refused(lambda: send("a"), "run_id cannot be used (it does not hold a run id)")


def test_a_copy_is_a_run_of_its_own_and_what_the_hub_lost_is_sent_again() -> None:
    save("a", 5), save("a", 10), finish("a")
    send("a")
    before, at = tags(), head()

    # A copy of the directory is another run; a renamed one is the same.
    shutil.copytree("a", "b")
    refused(lambda: send("b"), ", which has finished", "--overwrite_repo")
    refused(lambda: claim_stage_repository(run("b", drop_old_tags=True), "ppo"), ", which has finished")
    os.rename("a", "moved"), os.rename("moved", "a")
    send("a")
    assert (tags(), head()) == (before, at)

    # Taken, and taken back: what the other's tags replaced is sent again, and nothing is called published that is not.
    save("b", 5, "other"), os.unlink("b/ppo/checkpoint-10/COMPLETE")
    StageRecord("b/ppo").write(repo=None, status="running")
    send("b", overwrite=True)
    assert {*tags()} == {"step-000005"} and weights("step-000005") == mine("b", 5)
    refused(lambda: send("a"), "another run")
    send("a", overwrite=True)
    assert {*tags()} == {*before} and all(weights(f"step-{step:06}") == mine("a", step) for step in (5, 10))
    assert weights("best") == weights("main") == mine("a", 10)
    assert json.loads(Path("a/ppo/run.json").read_text())["repo"]["tags"] == tags()

    # A tag that waits for the Hub while another run takes the repository is not made.
    save("a", 15)
    original = HfApi.create_tag

    def refuse(self, *args, **kwargs):
        raise OSError("the Hub is away")

    HfApi.create_tag = refuse
    with pytest.raises(OSError, match="the Hub is away"):
        send("a")
    HfApi.create_tag = original
    claim_stage_repository(run("b", overwrite=True), "ppo")
    refused(lambda: send("a"), "another run")
    # And one that was made in the same moment is taken away again.
    claim_stage_repository(run("a", overwrite=True), "ppo")

    def late(self, *args, **kwargs):
        HfApi.create_tag = original
        claim_stage_repository(run("b", overwrite=True), "ppo")
        return original(self, *args, **kwargs)

    HfApi.create_tag = late
    refused(lambda: send("a"), "another run")
    assert "step-000015" not in tags(), tags()

    # A claim that is no claim is nobody's.
    api().create_commit(REPO, [CommitOperationAdd("claim.json", b"[" * 100_000)], commit_message="Damage")
    refused(lambda: send("a"), "another run")
