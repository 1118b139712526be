"""Checkpoints on the embedded Hub: one commit and one tag each, nothing twice, nothing that should stay at home."""

import datetime
import hashlib
import json
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hub_fixture import RunningHub
from huggingface_hub.errors import HfHubHTTPError
from thread_hub import ThreadHub, send_all
from zoo_process import zoo

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client import publish, run_signature
from rlhf_zoo.hub.client.connect import DEFAULT_HUB, Hub
from rlhf_zoo.hub.client.step_tags import tag_name
from rlhf_zoo.hub.server import create_token
from rlhf_zoo.hub.server.application import Application
from rlhf_zoo.publishing.sender import Sender
from rlhf_zoo.publishing.sent_checkpoints import published_tags, unsent_checkpoints
from rlhf_zoo.runs.context import RunContext
from rlhf_zoo.runs.recipe import Recipe
from rlhf_zoo.runs.record import StageRecord, fingerprint

REPO = "local/toy-ppo"
HOME = (
    "optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "pytorch_model.bin", "trainer_state.json",
    "COMPLETE", "published.json", "critic/pytorch_model.bin", "runs/events.json",
)  # fmt: skip
SENT = (
    "model.safetensors", "config.json", "tokenizer.json", "generation_config.json", "ppo_state.json",
    "critic/model.safetensors", "critic/config.json",
)  # fmt: skip
BESIDE = ("README.md", "rlhf_card.json", "metrics.jsonl", "recipe.json", "claim.json")


def save(folder: Path, step: int, *, salt: str = "", extra: tuple[str, ...] = ()) -> Path:
    """A complete checkpoint of run/ppo whose weights depend on step and salt."""
    record = StageRecord(folder / "run" / "ppo")
    resolved = {"kl_coef": 0.1, "salt": salt}
    if not record.read():
        record.write(stage="ppo", recipe="toy", status="running", seed=1, hub="local", repo=None, parents={})
        record.write(fingerprint=fingerprint(resolved), resolved=resolved, versions={}, command="rlhf-zoo ppo toy")
    record.append_metrics({"step": step, "objective/score": step / 10, "objective/kl": 0.1})
    path = record.checkpoint_path(step)
    for name in {*HOME, *SENT, *extra} - {"COMPLETE", "published.json"}:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        weights = hashlib.sha256(f"{name} {step} {salt}".encode()).digest() * 100
        (path / name).write_bytes(weights if "model" in name else b"{}\n")
    record.mark_complete(path)
    return path


def finish(folder: Path, step: int | None = None) -> None:
    """The ppo stage of `folder` is done, and `step` is the chosen checkpoint."""
    record = StageRecord(folder / "run" / "ppo")
    chosen = {"step": step, "rule": "best", "metric": "eval_x", "value": 1.0} if step is not None else None
    record.write(status="finished", finished="2026-11-21T00:00:00+00:00", chosen=chosen)


def sender(
    hub: ThreadHub | RunningHub, folder: Path, *, stages: tuple[str, ...] = ("ppo",), again: bool = False, **fields: Any
) -> Sender:
    """What sends the run of `folder`. fields: of its context."""
    toy = Recipe("toy", folder, {"description": "A toy."}, {})
    fields = {"recipe": toy, "directory": folder / "run", "namespace": "local", "publish": True} | fields
    context = RunContext(hub=Hub("other", hub.url, "test"), **fields)
    return Sender(context, stages=stages, resend_cards=again)


def send(hub: ThreadHub, folder: Path, **options: Any) -> None:
    send_all(sender(hub, folder, **options))


def commits(hub: ThreadHub | RunningHub, repo: str = REPO) -> list[str]:
    """Subjects, oldest first; without the first, which is the Hub's, and the one that claims the repository."""
    return [commit.title for commit in reversed(hub.api().list_repo_commits(repo))][2:]


def tags(hub: ThreadHub | RunningHub, repo: str = REPO) -> dict[str, str]:
    return {ref.name: ref.target_commit for ref in hub.api().list_repo_refs(repo).tags}


def download(hub: ThreadHub, name: str, revision: str | None = None) -> bytes:
    return Path(hub.api().hf_hub_download(REPO, name, revision=revision)).read_bytes()


@pytest.fixture(autouse=True)
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests so far by which clients sent files' bytes and made commits. Nor are plots drawn."""
    seen: list[str] = []
    really = Application.answer

    def answer(self: Application, request: Any) -> Any:
        if request.method == "PUT" or "/commit/" in request.path:
            seen.append(f"{request.method} {request.path}")
        return really(self, request)

    monkeypatch.setattr(Application, "answer", answer)
    monkeypatch.setattr("rlhf_zoo.publishing.cards.card._draw_plots", lambda *_: {})
    return seen


def test_checkpoints_get_one_commit_and_tag_each(thread_hub, tmp_path, uploads):
    first, second = save(tmp_path, 5), save(tmp_path, 10)
    save(tmp_path, 15)
    (second.parent / "checkpoint-15" / "COMPLETE").unlink()
    send(thread_hub, tmp_path)
    assert commits(thread_hub) == ["toy ppo: step 5", "toy ppo: step 10"]
    found = tags(thread_hub)
    assert list(found) == [tag_name(5), tag_name(10)] == ["step-000005", "step-000010"]
    log = [commit.commit_id for commit in thread_hub.api().list_repo_commits(REPO)][:2][::-1]
    assert list(found.values()) == log
    record = StageRecord(first.parent)
    began = int(datetime.datetime.fromisoformat(record.metrics()[0]["time"]).timestamp())
    events = f"runs/ppo/events.out.tfevents.{began}.rlhf-zoo"
    for path, (tag, commit) in zip((first, second), found.items(), strict=True):
        note = json.loads((path / "published.json").read_text())
        assert (note["hub"], note["repo"], note["commit"], note["tag"]) == (thread_hub.url, REPO, commit, tag)
        there = set(thread_hub.api().list_repo_files(REPO, revision=tag))
        assert there == {*SENT, *BESIDE, ".gitattributes", events}
        for name in ("model.safetensors", "critic/model.safetensors"):
            assert download(thread_hub, name, tag) == (path / name).read_bytes()
        last = json.loads(download(thread_hub, "metrics.jsonl", tag).splitlines()[-1])["step"]
        assert tag == tag_name(last)
    assert record.read()["repo"] == {"id": REPO, "commit": log[-1], "tags": found}
    before = list(uploads)
    send(thread_hub, tmp_path)
    assert (uploads, commits(thread_hub), tags(thread_hub)) == (before, ["toy ppo: step 5", "toy ppo: step 10"], found)


def test_best_is_last_checkpoint_until_evaluation_moves_it(thread_hub, tmp_path, uploads):
    save(tmp_path, 5)
    last = save(tmp_path, 10)
    finish(tmp_path)
    send(thread_hub, tmp_path)
    found = tags(thread_hub)
    assert list(found) == ["best", "step-000005", "step-000010"]
    assert commits(thread_hub) == ["toy ppo: step 5", "toy ppo: step 10", "toy ppo: card of step-000010"]
    run = json.loads((last.parent / "run.json").read_text())
    assert run["repo"] == {"id": REPO, "commit": found["best"], "tags": found}
    assert download(thread_hub, "model.safetensors", "best") == (last / "model.safetensors").read_bytes()
    before = len(uploads)
    send(thread_hub, tmp_path)
    assert len(uploads) == before
    send(thread_hub, tmp_path, again=True)
    assert tags(thread_hub) == found and len(commits(thread_hub)) == 3
    # The client asks which files changed, and sends none.
    assert not [one for one in uploads[before:] if one.startswith("PUT")]
    (tmp_path / "run" / "eval").mkdir()
    figure = {"value": 0.75, "ci95": [0.7, 0.8], "n": 100}
    (tmp_path / "run" / "eval" / "evaluation.json").write_text(json.dumps({"win_rate": figure, "n": 100}))
    send(thread_hub, tmp_path)
    after = tags(thread_hub)
    assert after.pop("best") != found.pop("best") and after == found
    assert json.loads(download(thread_hub, "rlhf_card.json", "best"))["evaluation"]["win_rate"] == figure


def test_finished_run_gets_a_collection(thread_hub, tmp_path, monkeypatch, caplog):
    """Once all of its stages are released; where the Hub has none or refuses, that costs nothing else."""

    def collections() -> list[str]:
        return [one.title for one in thread_hub.api().list_collections(owner="local")]

    save(tmp_path, 5)
    finish(tmp_path)
    both = Recipe("toy", tmp_path, {"description": "A toy."}, {"sft": {}, "ppo": {}})
    due = sender(thread_hub, tmp_path, recipe=both)
    send_all(due)
    assert collections() == [] and due.remaining_uploads() == [], "SFT is not there"
    due = sender(thread_hub, tmp_path)
    assert due.remaining_uploads()[-1] == "the Collection of toy"

    def refused(status: int) -> Any:
        def collect(*_: Any, **__: Any) -> str:
            answer = httpx.Response(status, request=httpx.Request("POST", thread_hub.url))
            raise ZooError("The Collection cannot be made.") from HfHubHTTPError("no", response=answer)

        return collect

    noted = StageRecord(tmp_path / "run" / "ppo")
    with monkeypatch.context() as patched:
        patched.setattr("rlhf_zoo.publishing.sender.collect", refused(503))
        with pytest.raises(HfHubHTTPError):
            send_all(due)
        assert "collection" not in noted.read(), "it is tried again"
        patched.setattr("rlhf_zoo.publishing.sender.collect", refused(403))
        send_all(due)
        assert "The Collection cannot be made." in caplog.text and due.remaining_uploads() == []
        assert noted.read()["collection"] == {"hub": thread_hub.url, "repos": [REPO], "slug": None}
    noted.write(collection=None)
    send_all(due)
    assert collections() == ["toy: SFT, RM, PPO"] and due.remaining_uploads() == []
    assert noted.read()["collection"]["slug"].startswith("local/toy-sft-rm-ppo")


def test_push_steps_sends_multiples_and_last_and_chosen_checkpoints(thread_hub, tmp_path):
    for step in (5, 10, 15):
        save(tmp_path, step)
    record = StageRecord(tmp_path / "run" / "ppo")
    record.write(resolved={**record.read()["resolved"], "push_steps": 10})
    send(thread_hub, tmp_path)
    assert list(tags(thread_hub)) == [tag_name(10)]
    finish(tmp_path, 5)
    send(thread_hub, tmp_path)
    assert list(tags(thread_hub)) == ["best", *map(tag_name, (5, 10, 15))]


def test_main_equals_chosen_checkpoint(thread_hub, tmp_path):
    chosen = save(tmp_path, 5)
    save(tmp_path, 10, extra=("adapter_model.safetensors",))
    finish(tmp_path, step=5)
    send(thread_hub, tmp_path)
    assert commits(thread_hub) == ["toy ppo: step 5", "toy ppo: step 10", "toy ppo: card of step-000005"]
    assert thread_hub.api().model_info(REPO).sha == tags(thread_hub)["best"]
    there = {entry.path: entry for entry in thread_hub.api().list_repo_tree(REPO, recursive=True)}
    assert "adapter_model.safetensors" not in there
    for name in ("model.safetensors", "critic/model.safetensors"):
        assert there[name].lfs.sha256 == hashlib.sha256((chosen / name).read_bytes()).hexdigest()
    assert json.loads(download(thread_hub, "rlhf_card.json"))["chosen"]["step"] == 5


def test_main_is_last_and_best_is_absent_when_none_is_recommended(thread_hub, tmp_path):
    save(tmp_path, 5)
    last = save(tmp_path, 10)
    finish(tmp_path, step=5)
    send(thread_hub, tmp_path)
    record = StageRecord(last.parent)
    record.write(chosen={"step": 10, "rule": "recommended", "metric": None, "value": None, "none": True})
    send(thread_hub, tmp_path)
    assert list(tags(thread_hub)) == ["step-000005", "step-000010"] == list(record.read()["repo"]["tags"])
    assert download(thread_hub, "model.safetensors") == (last / "model.safetensors").read_bytes()
    card = download(thread_hub, "README.md").decode()
    assert "step **10** is the last checkpoint, because the verdict recommends none" in card
    assert "@best" not in card and "the tag `best`:" not in card


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, True),
        ({"path": "checkpoint-4"}, False),
        ({"path": "/home/someone/checkpoint-3"}, False),
        ({"fingerprint": "of a run before this one"}, False),
    ],
)
def test_parent_sent_later_is_pinned_when_child_is_sent(thread_hub, tmp_path, changes, found):
    save(tmp_path, 5)
    checkpoint = save(tmp_path, 3)
    sft = StageRecord(tmp_path / "run" / "sft")
    shutil.copytree(checkpoint, sft.checkpoint_path(3))
    shutil.rmtree(checkpoint)
    told = {"resolved": {"learning_rate": 0.1}, "fingerprint": fingerprint({"learning_rate": 0.1})}
    sft.write(stage="sft", recipe="toy", status="running", parents={}, versions={}, **told)
    parent = {"repo": None, "commit": None, "path": "checkpoint-3", "fingerprint": told["fingerprint"], **changes}
    StageRecord(tmp_path / "run" / "ppo").write(parents={"sft": parent})
    send(thread_hub, tmp_path, stages=("sft", "ppo"))
    card = json.loads(download(thread_hub, "rlhf_card.json", "step-000005"))
    wanted = {"repo": "local/toy-sft", "commit": tags(thread_hub, "local/toy-sft")["step-000003"]}
    assert card["parents"]["sft"] == (wanted if found else {"repo": None, "commit": None})


def test_optimizer_is_sent_only_with_push_optimizer(thread_hub, tmp_path):
    save(tmp_path, 5)
    record = StageRecord(tmp_path / "run" / "ppo")
    resolved = {**record.read()["resolved"], "push_optimizer": True}
    record.write(resolved=resolved, fingerprint=fingerprint(resolved))
    send(thread_hub, tmp_path, private=True)
    there = set(thread_hub.api().list_repo_files(REPO, revision="step-000005"))
    assert there & set(HOME) == {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
    assert thread_hub.api().model_info(REPO).private is True


def test_events_hold_metrics_and_no_file_names_machine_or_token(thread_hub, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    save(tmp_path, 5)
    save(tmp_path, 10)
    finish(tmp_path)
    send(thread_hub, tmp_path)
    for tag, steps in (("step-000005", [5]), ("best", [5, 10])):
        folder = Path(thread_hub.api().snapshot_download(REPO, revision=tag))
        (events,) = folder.rglob("*tfevents*")
        assert socket.gethostname() not in events.name
        found = EventAccumulator(str(events.parent))
        found.Reload()
        assert [one.step for one in found.Scalars("objective/score")] == steps
        assert [one.value for one in found.Scalars("objective/score")] == pytest.approx([step / 10 for step in steps])
        texts = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
        assert len(texts) > len(SENT)
        for secret in (thread_hub.token, str(tmp_path), os.environ.get("HOME", "/root/")):
            assert not [text for text in texts if secret.encode() in text]


def test_files_of_earlier_checkpoint_are_deleted(thread_hub, tmp_path):
    save(tmp_path, 5, extra=("adapter_model.safetensors", "adapter_config.json"))
    send(thread_hub, tmp_path)
    thread_hub.api().upload_file(path_or_fileobj=b"mine", path_in_repo="notes/hand-written.md", repo_id=REPO)
    save(tmp_path, 10)
    send(thread_hub, tmp_path)
    assert "adapter_config.json" in thread_hub.api().list_repo_files(REPO, revision="step-000005")
    there = thread_hub.api().list_repo_files(REPO, revision="step-000010")
    assert not [name for name in there if "adapter" in name] and "notes/hand-written.md" in there


class Killed(BaseException):
    pass


@pytest.mark.parametrize("where", ["_tag", "write_json"])
def test_kill_between_commit_and_tag_sends_nothing_twice(thread_hub, tmp_path, monkeypatch, uploads, where):
    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    save(tmp_path, 5)
    with monkeypatch.context() as patched:
        patched.setattr(publish, where, killed)
        with pytest.raises(Killed):
            send(thread_hub, tmp_path)
    assert commits(thread_hub) == ["toy ppo: step 5"]
    assert len(tags(thread_hub)) == (0 if where == "_tag" else 1)
    head = thread_hub.api().model_info(REPO).sha
    before = list(uploads)
    if where == "_tag":  # a card that says otherwise, as after `rlhf-zoo push`, does not make another commit
        StageRecord(tmp_path / "run" / "ppo").write(command="rlhf-zoo another")
    send(thread_hub, tmp_path)
    assert tags(thread_hub) == {"step-000005": head} and uploads == before
    assert (tmp_path / "run" / "ppo" / "checkpoint-5" / "published.json").is_file()


def test_push_resume_sends_pending_checkpoints_to_recorded_namespace(thread_hub, tmp_path):
    save(tmp_path, 5)
    env = {"home": tmp_path / "home", "cwd": tmp_path, "RLHF_ZOO_HUB_TOKEN": thread_hub.token}
    done = zoo("push", "--resume", "run", **env)
    (tmp_path / "home" / "zoo").mkdir(parents=True, exist_ok=True)
    shutil.copy(run_signature.home() / run_signature.KEY_FILE, tmp_path / "home" / "zoo")  # this test wrote the run
    assert done.returncode == 2 and "run was trained without publishing: leave --resume out" in done.stderr
    publish = {"hub": thread_hub.url, "namespace": "elsewhere", "private": True}
    StageRecord(tmp_path / "run" / "ppo").write(publish=publish)
    done = zoo("push", "--resume", "run", **env)
    assert (done.returncode, done.stdout) == (0, "elsewhere/toy-ppo: step-000005\n"), done.stderr
    assert thread_hub.api().model_info("elsewhere/toy-ppo").private is True
    done = zoo("push", "--resume", "run", "--namespace", "third", **env)
    assert done.returncode == 2 and f"sends run to elsewhere on {thread_hub.url}, where training was" in done.stderr


@pytest.mark.parametrize("finished", [False, True])
def test_damaged_checkpoint_is_not_sent(thread_hub, tmp_path, finished):
    checkpoint = save(tmp_path, 5)
    if finished:
        send(thread_hub, tmp_path)
        finish(tmp_path, 5)
    before = tags(thread_hub) if finished else {}
    (checkpoint / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ZooError, match=r"checkpoint-5/model\.safetensors"):
        send(thread_hub, tmp_path)
    assert tags(thread_hub) == before and not (checkpoint / "SENDING").exists()


def test_deleted_repository_and_new_namespace_get_everything(thread_hub, tmp_path):
    save(tmp_path, 5)
    finish(tmp_path)
    send(thread_hub, tmp_path)
    thread_hub.api().delete_repo(REPO)
    send(thread_hub, tmp_path)
    assert list(tags(thread_hub)) == ["best", "step-000005"]
    assert "model.safetensors" in thread_hub.api().list_repo_files(REPO, revision="best")
    send(thread_hub, tmp_path, namespace="elsewhere")
    assert list(tags(thread_hub, "elsewhere/toy-ppo")) == ["best", "step-000005"]
    # What another Hub acknowledged under the same name is not sent to this one.
    record = StageRecord(tmp_path / "run" / "ppo")
    sent = published_tags(record, "elsewhere/toy-ppo", hub_label=thread_hub.url)
    assert list(sent) == ["step-000005", "best"]
    for repo, hub in (("elsewhere/toy-ppo", "http://other"), (REPO, thread_hub.url)):
        assert published_tags(record, repo, hub_label=hub) == {}
        assert unsent_checkpoints(record, repo, hub_label=hub) == [record.checkpoint_path(5)]


@pytest.mark.parametrize("checkpoints_in_list", [published_tags, unsent_checkpoints])
def test_lists_leave_out_sent_checkpoint_that_another_thread_deletes(
    thread_hub, tmp_path, monkeypatch, checkpoints_in_list
):
    """Training deletes old checkpoints while the outbox lists them, and the other way round at the end."""
    save(tmp_path, 5)
    send(thread_hub, tmp_path)
    record, read = StageRecord(tmp_path / "run" / "ppo"), publish.read_json
    record.write(repo=None)

    def delete_first(path):
        record.remove_checkpoint(path.parent)
        return read(path)

    monkeypatch.setattr(publish, "read_json", delete_first)
    assert not checkpoints_in_list(record, REPO, hub_label=thread_hub.url)


def test_deleted_chosen_checkpoint_is_copied_from_first_namespace(thread_hub, tmp_path):
    save(tmp_path, 5)
    checkpoint = save(tmp_path, 10)
    weights = (checkpoint / "model.safetensors").read_bytes()
    finish(tmp_path, 10)
    send(thread_hub, tmp_path)
    shutil.rmtree(checkpoint)
    send(thread_hub, tmp_path, namespace="elsewhere")
    assert list(tags(thread_hub, "elsewhere/toy-ppo")) == ["best", "step-000005", "step-000010"]
    assert (checkpoint / "model.safetensors").read_bytes() == weights


def test_base_path_of_adapter_copy_does_not_move_tags(thread_hub, tmp_path):
    """There and back: the tag stays, though adapter_config.json names the base by another commit. Weights move none."""
    checkpoint = save(tmp_path, 5, extra=("adapter_model.safetensors", "adapter_config.json"))
    base = tmp_path / "cache" / "0123"
    (checkpoint / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    StageRecord(checkpoint.parent).mark_complete(checkpoint)
    record = StageRecord(checkpoint.parent)
    for commit, namespace in (("0123", "local"), ("4567", "elsewhere"), ("89ab", "local")):
        (checkpoint / "adapter_config.json").write_text(
            json.dumps({"base_model_name_or_path": str(base.with_name(commit))})
        )
        record.mark_complete(checkpoint)
        record.write(parents={"sft": {"repo": f"{namespace}/base", "commit": commit, "path": None}})
        send(thread_hub, tmp_path, namespace=namespace)
        note = json.loads((checkpoint / "published.json").read_text())
        assert note["repo"] == f"{namespace}/toy-ppo" and note["commit"] == tags(thread_hub, note["repo"])[tag_name(5)]
    assert commits(thread_hub) == ["toy ppo: step 5"]
    assert json.loads(download(thread_hub, "adapter_config.json", tag_name(5)))["revision"] == "0123"
    (checkpoint / "published.json").unlink()
    (checkpoint / "adapter_model.safetensors").write_bytes(b"others")
    record.mark_complete(checkpoint)
    with pytest.raises(ZooError, match="The tag step-000005 of local/toy-ppo"):
        send(thread_hub, tmp_path)


def test_bad_or_read_only_token_is_rejected_before_training(thread_hub, tmp_path, monkeypatch):
    url = thread_hub.url
    for token, message in (
        (create_token(thread_hub.root, "read"), "is read-only: publish with a token of the role write."),
        ("hub_wrong", "does not accept the token: create one with the role write, and set RLHF_ZOO_HUB_TOKEN."),
        ("", f"There is no token for {url}: set RLHF_ZOO_HUB_TOKEN."),
        (
            "hf_ä",
            f"RLHF_ZOO_HUB_TOKEN contains characters that are not allowed in a token: set it to the token for {url}.",
        ),
    ):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(ZooError) as refused:
            publish.resolve_namespace(None, hub=replace(DEFAULT_HUB, token_variable="RLHF_ZOO_HUB_TOKEN"))
        assert message in str(refused.value) and "hub_wrong" not in str(refused.value)
    options = ("--hub", url, "--push_to_hub", "--output_dir", "run")
    done = zoo("run", "tiny-world", *options, home=tmp_path / "home", cwd=tmp_path, RLHF_ZOO_HUB_TOKEN="hub_wrong")
    assert done.returncode == 2 and done.stdout == "" and "does not accept the token" in done.stderr
    assert list(thread_hub.api().list_models()) == [] and not (tmp_path / "run").exists()
