"""Checkpoints on the embedded Hub: one commit and one tag each, nothing twice, nothing that should stay at home."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import shutil
import socket
from pathlib import Path

import pytest
from hub_fixture import RunningHub
from zoo_process import errors, zoo

from rlhf_zoo.hub.publish import tag_name
from rlhf_zoo.hub.server import create_token
from rlhf_zoo.record import StageRecord, fingerprint

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
PREAMBLE = """
import os
from pathlib import Path
from rlhf_zoo.hub.connect import Hub
from rlhf_zoo.recipes import Recipe
from rlhf_zoo.stages.context import RunContext
from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub import publish
from rlhf_zoo.stages.outbox import Outbox
from rlhf_zoo.stages.release import Sender

def sender(again=False, **fields):
    return Sender(context(**fields), stages=("ppo",), again=again)

def context(**fields):
    hub = Hub("other", os.environ["HF_ENDPOINT"], "test")
    fields = {"directory": Path("run"), "namespace": "local", "publish": True} | fields
    return RunContext(recipe=Recipe("toy", Path("."), {"description": "A toy."}, {}), hub=hub, **fields)
"""


def save(folder: Path, step: int, *, salt: str = "", extra: tuple[str, ...] = ()) -> Path:
    """A complete checkpoint of run/ppo whose weights depend on step and salt."""
    record = StageRecord(folder / "run" / "ppo")
    resolved = {"kl_coef": 0.1, "salt": salt}
    if not record.read():
        record.write(stage="ppo", recipe="toy", status="running", seed=1, hub="local", repo=None, parents={})
        record.write(fingerprint=fingerprint(resolved), resolved=resolved, versions={}, command="rlhf-zoo ppo toy")
    record.append_metrics({"step": step, "objective/score": step / 10, "objective/kl": 0.1})
    path = record.checkpoint_path(step)
    for name in (*HOME, *SENT, *extra):
        if name in ("COMPLETE", "published.json"):
            continue
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        weights = hashlib.sha256(f"{name} {step} {salt}".encode()).digest() * 100
        (path / name).write_bytes(weights if "model" in name else b"{}\n")
    record.mark_complete(path)
    return path


def send(hub: RunningHub, folder: Path, code: str = "sender().send_all()") -> str:
    return hub.python(PREAMBLE + code, cwd=folder).strip()


def finish(folder: Path, step: int | None = None) -> None:
    """The ppo stage of `folder` is done, and `step` is the chosen checkpoint."""
    record = StageRecord(folder / "run" / "ppo")
    chosen = {"step": step, "rule": "best", "metric": "eval_x", "value": 1.0} if step is not None else None
    record.write(status="finished", finished="2026-11-21T00:00:00+00:00", chosen=chosen)


def commits(hub: RunningHub, repo: str = REPO) -> list[str]:
    """Subjects, oldest first."""
    return hub.git(repo, "log", "--reverse", "--format=%s", "main").splitlines()


def tags(hub: RunningHub, repo: str = REPO) -> dict[str, str]:
    return {ref.name: ref.target_commit for ref in hub.api().list_repo_refs(repo).tags}


def uploads(hub: RunningHub) -> int:
    """How many files' bytes clients have sent so far, and commits they asked for."""
    return sum("PUT " in line or "/commit/" in line for line in hub.log.read_text().splitlines())


def test_a_commit_and_a_tag_per_checkpoint_and_nothing_twice(hub, tmp_path):
    first, second = save(tmp_path, 5), save(tmp_path, 10)
    save(tmp_path, 15)
    (second.parent / "checkpoint-15" / "COMPLETE").unlink()
    send(hub, tmp_path)
    assert commits(hub)[2:] == ["toy ppo: step 5", "toy ppo: step 10"]
    found = tags(hub)
    assert list(found) == [tag_name(5), tag_name(10)] == ["step-000005", "step-000010"]
    log = hub.git(REPO, "log", "--format=%H", "--reverse", "main").split()[2:]
    assert list(found.values()) == log
    for path, (tag, commit) in zip((first, second), found.items(), strict=True):
        note = json.loads((path / "published.json").read_text())
        assert (note["hub"], note["repo"], note["commit"], note["tag"]) == (hub.url, REPO, commit, tag)
        there = set(hub.api().list_repo_files(REPO, revision=tag))
        began = int(datetime.datetime.fromisoformat(created(first.parent)).timestamp())
        events = f"runs/ppo/events.out.tfevents.{began}.rlhf-zoo"
        assert {name for name in there if not name.startswith("plots/")} == {*SENT, *BESIDE, ".gitattributes", events}
        assert hub.git(REPO, "cat-file", "-t", f"refs/tags/{tag}").strip() == "tag", "an annotated tag"
        assert not there & set(HOME)
        for name in ("model.safetensors", "critic/model.safetensors"):
            pulled = hub.api().hf_hub_download(REPO, name, revision=tag, cache_dir=tmp_path / "cache")
            assert Path(pulled).read_bytes() == (path / name).read_bytes()
        rows = Path(hub.api().hf_hub_download(REPO, "metrics.jsonl", revision=tag, cache_dir=tmp_path / "cache"))
        last = [json.loads(line)["step"] for line in rows.read_text().splitlines()][-1]
        assert tag == tag_name(last)
    run = json.loads((first.parent / "run.json").read_text())
    assert run["repo"] == {"id": REPO, "commit": log[-1], "tags": found}
    before = uploads(hub)
    send(hub, tmp_path)
    assert (uploads(hub), commits(hub)[2:], tags(hub)) == (before, ["toy ppo: step 5", "toy ppo: step 10"], found)
    assert "notice" not in hub.git(REPO, "fsck", "--strict")


def created(stage: Path) -> str:
    """When the first row of metrics was written."""
    return json.loads((stage / "metrics.jsonl").read_text().splitlines()[0])["time"]


def test_best_is_the_last_checkpoint_with_the_final_card(hub, tmp_path):
    save(tmp_path, 5)
    last = save(tmp_path, 10)
    finish(tmp_path)
    send(hub, tmp_path)
    found = tags(hub)
    assert list(found) == ["best", "step-000005", "step-000010"]
    assert commits(hub)[2:] == ["toy ppo: step 5", "toy ppo: step 10", "toy ppo: card of step-000010"]
    run = json.loads((last.parent / "run.json").read_text())
    assert run["repo"] == {"id": REPO, "commit": found["best"], "tags": found}
    best = Path(hub.api().hf_hub_download(REPO, "model.safetensors", revision="best", cache_dir=tmp_path / "cache"))
    assert best.read_bytes() == (last / "model.safetensors").read_bytes()
    before = uploads(hub)
    send(hub, tmp_path)
    send(hub, tmp_path, "sender(again=True).send_all()")
    assert tags(hub) == found and len(commits(hub)) == 5
    # The client asks which files changed, and sends none.
    assert uploads(hub) == before


def test_main_is_the_chosen_checkpoint_byte_for_byte(hub, tmp_path):
    chosen = save(tmp_path, 5)
    save(tmp_path, 10, extra=("adapter_model.safetensors",))
    finish(tmp_path, step=5)
    send(hub, tmp_path)
    found = tags(hub)
    assert commits(hub)[2:] == ["toy ppo: step 5", "toy ppo: step 10", "toy ppo: card of step-000005"]
    assert hub.api().model_info(REPO).sha == found["best"]
    there = {entry.path: entry for entry in hub.api().list_repo_tree(REPO, recursive=True)}
    assert "adapter_model.safetensors" not in there
    for name in ("model.safetensors", "critic/model.safetensors"):
        assert there[name].lfs.sha256 == hashlib.sha256((chosen / name).read_bytes()).hexdigest()
    card = Path(hub.api().hf_hub_download(REPO, "rlhf_card.json", cache_dir=tmp_path / "cache"))
    assert json.loads(card.read_text())["chosen"]["step"] == 5


def test_an_evaluation_moves_best_to_the_new_card(hub, tmp_path):
    save(tmp_path, 5)
    finish(tmp_path)
    send(hub, tmp_path)
    before = tags(hub)
    (tmp_path / "run" / "eval").mkdir()
    figure = {"value": 0.75, "ci95": [0.7, 0.8], "n": 100}
    (tmp_path / "run" / "eval" / "evaluation.json").write_text(json.dumps({"win_rate": figure, "n": 100}))
    send(hub, tmp_path)
    after = tags(hub)
    assert after["step-000005"] == before["step-000005"] and after["best"] != before["best"]
    card = Path(hub.api().hf_hub_download(REPO, "rlhf_card.json", revision="best", cache_dir=tmp_path / "cache"))
    assert json.loads(card.read_text())["evaluation"]["win_rate"] == figure


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, True),
        ({"path": "checkpoint-4"}, False),
        ({"path": "/home/someone/checkpoint-3"}, False),
        ({"fingerprint": "of a run before this one"}, False),
    ],
)
def test_a_parent_that_is_sent_later_is_pinned_when_its_child_is_sent(hub, tmp_path, changes, found):
    save(tmp_path, 5)
    checkpoint = save(tmp_path, 3)
    sft = StageRecord(tmp_path / "run" / "sft")
    shutil.copytree(checkpoint, sft.checkpoint_path(3))
    shutil.rmtree(checkpoint)
    resolved = {"learning_rate": 0.1}
    told = {"resolved": resolved, "fingerprint": fingerprint(resolved)}
    sft.write(stage="sft", recipe="toy", status="running", parents={}, versions={}, **told)
    parent = {"repo": None, "commit": None, "path": "checkpoint-3", "fingerprint": fingerprint(resolved), **changes}
    StageRecord(tmp_path / "run" / "ppo").write(parents={"sft": parent})
    send(hub, tmp_path, "Sender(context(), stages=('sft', 'ppo')).send_all()")
    card = Path(hub.api().hf_hub_download(REPO, "rlhf_card.json", revision="step-000005", cache_dir=tmp_path / "cache"))
    wanted = {"repo": "local/toy-sft", "commit": tags(hub, "local/toy-sft")["step-000003"]}
    assert json.loads(card.read_text())["parents"]["sft"] == (wanted if found else {"repo": None, "commit": None})


def test_the_optimizer_goes_only_where_it_is_asked_for(hub, tmp_path):
    save(tmp_path, 5)
    record = StageRecord(tmp_path / "run" / "ppo")
    resolved = {**record.read()["resolved"], "push_optimizer": True}
    record.write(resolved=resolved, fingerprint=fingerprint(resolved))
    send(hub, tmp_path)
    there = set(hub.api().list_repo_files(REPO, revision="step-000005"))
    assert there & set(HOME) == {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}


def test_events_hold_the_metrics_and_no_name_of_this_machine(hub, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    save(tmp_path, 5)
    save(tmp_path, 10)
    send(hub, tmp_path)
    for tag, steps in (("step-000005", [5]), ("step-000010", [5, 10])):
        folder = hub.api().snapshot_download(REPO, revision=tag, cache_dir=tmp_path / "cache", allow_patterns="runs/*")
        (events,) = Path(folder).rglob("*tfevents*")
        assert socket.gethostname() not in events.name
        found = EventAccumulator(str(events.parent))
        found.Reload()
        assert [one.step for one in found.Scalars("objective/score")] == steps
        assert [one.value for one in found.Scalars("objective/score")] == pytest.approx([step / 10 for step in steps])


def test_tags_move_when_a_run_is_restarted(hub, tmp_path):
    save(tmp_path, 5)
    finish(tmp_path)
    send(hub, tmp_path)
    before = tags(hub)
    shutil.rmtree(tmp_path / "run")
    other = save(tmp_path, 5, salt="again")
    finish(tmp_path)
    refused = send(hub, tmp_path, "try:\n    sender().send_all()\nexcept ZooError as error:\n    print(error)")
    assert "which is another run and finished" in refused and "--namespace" in refused
    assert tags(hub) == before
    send(hub, tmp_path, "sender(overwrite=True).send_all()")
    after = tags(hub)
    assert before.keys() == after.keys() and not set(before.values()) & set(after.values())
    pulled = hub.api().hf_hub_download(REPO, "model.safetensors", revision="step-000005", cache_dir=tmp_path / "cache")
    assert Path(pulled).read_bytes() == (other / "model.safetensors").read_bytes()
    assert hub.git(REPO, "cat-file", "-t", before["best"]).strip() == "commit"


def test_what_an_earlier_checkpoint_left_goes(hub, tmp_path):
    save(tmp_path, 5, extra=("adapter_model.safetensors", "adapter_config.json"))
    send(hub, tmp_path)
    hub.api().upload_file(path_or_fileobj=b"mine", path_in_repo="notes/hand-written.md", repo_id=REPO)
    save(tmp_path, 10)
    send(hub, tmp_path)
    assert "adapter_config.json" in hub.api().list_repo_files(REPO, revision="step-000005")
    there = hub.api().list_repo_files(REPO, revision="step-000010")
    assert not [name for name in there if "adapter" in name] and "notes/hand-written.md" in there


@pytest.mark.parametrize("where", ["publish._tag", "publish.write_json"])
def test_a_kill_between_commit_and_tag_sends_nothing_twice(hub, tmp_path, where):
    save(tmp_path, 5)
    killed = f"{where} = lambda *a, **k: os._exit(9)\nsender().send_all()"
    with pytest.raises(AssertionError):
        send(hub, tmp_path, killed)
    assert commits(hub)[2:] == ["toy ppo: step 5"]
    assert len(tags(hub)) == (0 if "tag" in where else 1)
    head = hub.api().model_info(REPO).sha
    puts = hub.log.read_text().count("PUT ")
    if "tag" in where:  # a card that says otherwise, as after `rlhf-zoo push`, does not make another commit
        StageRecord(tmp_path / "run" / "ppo").write(command="rlhf-zoo another")
    send(hub, tmp_path)
    assert commits(hub)[2:] == ["toy ppo: step 5"] and tags(hub) == {"step-000005": head}
    assert hub.log.read_text().count("PUT ") == puts
    assert (tmp_path / "run" / "ppo" / "checkpoint-5" / "published.json").is_file()


def test_an_unreachable_hub_leaves_checkpoints_pending_and_push_sends_them(hubs, tmp_path):
    hub = hubs("first")
    save(tmp_path, 5)
    send(hub, tmp_path)
    assert hub.stop() == 0
    paths = [save(tmp_path, 10), save(tmp_path, 15)]
    waiting = """
with Outbox(sender(), hub="the Hub", mend="rlhf-zoo push --resume run", patience=0) as outbox:
    try:
        outbox.drain()
    except ZooError as error:
        print(error, flush=True)
        os._exit(0)
"""
    said = send(hub, tmp_path, waiting)
    assert said.startswith("3 of the run's releases are not on the Hub yet, the first is a look at local/toy-ppo (")
    assert said.endswith("): when it answers, `rlhf-zoo push --resume run` sends them.")
    assert not any((path / "published.json").exists() for path in paths)
    down = zoo("push", "run", "--hub", hub.url, home=tmp_path / "home", cwd=tmp_path, RLHF_ZOO_HUB_TOKEN=hub.token)
    assert down.returncode == 2 and "cannot be reached" in errors(down.stderr)[-1]

    port = hub.url.rpartition(":")[2]
    hub = hubs("second", "--port", port, root=hub.root)
    done = zoo("push", "run", "--hub", hub.url, home=tmp_path / "home", cwd=tmp_path, RLHF_ZOO_HUB_TOKEN=hub.token)
    assert (done.returncode, errors(done.stderr)) == (0, []), done.stderr
    assert done.stdout == f"{REPO}: step-000005, step-000010, step-000015\n"
    assert commits(hub)[2:] == ["toy ppo: step 5", "toy ppo: step 10", "toy ppo: step 15"]
    finish(tmp_path)
    done = zoo("push", "run/ppo", "--hub", hub.url, home=tmp_path / "home", cwd=tmp_path, RLHF_ZOO_HUB_TOKEN=hub.token)
    assert done.returncode == 0 and done.stdout.strip().endswith("best"), done.stderr
    assert "best" in tags(hub)


def test_push_resume_sends_what_was_to_be_published_to_where_it_was_to_go(hub, tmp_path):
    save(tmp_path, 5)
    env = {"home": tmp_path / "home", "cwd": tmp_path, "RLHF_ZOO_HUB_TOKEN": hub.token}
    done = zoo("push", "--resume", "run", **env)
    assert done.returncode == 2 and "run was not to be published: leave --resume out" in done.stderr
    publish = {"hub": hub.url, "namespace": "elsewhere", "private": True}
    StageRecord(tmp_path / "run" / "ppo").write(publish=publish)
    done = zoo("push", "--resume", "run", **env)
    assert (done.returncode, done.stdout) == (0, "elsewhere/toy-ppo: step-000005\n"), done.stderr
    assert hub.api().model_info("elsewhere/toy-ppo").private is True
    done = zoo("push", "--resume", "run", "--namespace", "third", **env)
    assert done.returncode == 2 and f"sends run to where it was to go, elsewhere on {hub.url}" in done.stderr


def test_each_hub_gets_its_own_and_a_lost_one_gets_all_again(hubs, tmp_path):
    one, two = hubs("one"), hubs("two")
    save(tmp_path, 5)
    finish(tmp_path)
    for hub in (one, two):
        send(hub, tmp_path)
        assert list(tags(hub)) == ["best", "step-000005"]
        assert json.loads((tmp_path / "run" / "ppo" / "run.json").read_text())["hub"] == hub.url
    two.api().delete_repo(REPO)
    send(two, tmp_path)
    assert list(tags(two)) == ["best", "step-000005"]
    assert "model.safetensors" in two.api().list_repo_files(REPO, revision="best")
    send(two, tmp_path, "sender(namespace='elsewhere').send_all()")
    assert list(tags(two, "elsewhere/toy-ppo")) == ["best", "step-000005"]


def test_private_repositories(hub, tmp_path):
    save(tmp_path, 5)
    send(hub, tmp_path, "sender(private=True).send_all()")
    assert hub.api().model_info(REPO).private is True


def test_a_wrong_or_reading_token_ends_a_run_before_it_begins(hub, tmp_path):
    for token, message in (
        (create_token(hub.root, "read"), "may only read: publishing needs one with the role write."),
        ("hub_wrong", "does not accept the token: make a new one with the role write, and set RLHF_ZOO_HUB_TOKEN."),
        ("", f"There is no token for {hub.url}: set RLHF_ZOO_HUB_TOKEN."),
        ("hf_ä", f"RLHF_ZOO_HUB_TOKEN holds characters that no token has, so {hub.url} cannot be asked: set it again."),
    ):
        options = ("--hub", hub.url, "--push_to_hub", "--output_dir", "run")
        done = zoo("run", "tiny-world", *options, home=tmp_path / "home", cwd=tmp_path, RLHF_ZOO_HUB_TOKEN=token)
        assert done.returncode == 2
        assert len(errors(done.stderr)) == 1 and message in done.stderr, done.stderr
        assert done.stdout == "" and not (tmp_path / "run").exists()
    assert list(hub.api().list_models()) == []
    assert "hub_wrong" not in hub.log.read_text()


def test_one_token_for_all_is_no_environment_leak(hub, tmp_path):
    """What goes to a Hub is files of the checkpoint and the card, and neither holds the token or this machine."""
    save(tmp_path, 5)
    finish(tmp_path)
    send(hub, tmp_path)
    folder = hub.api().snapshot_download(REPO, revision="best", cache_dir=tmp_path / "cache")
    texts = [path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()]
    assert len(texts) > len(SENT)
    for secret in (hub.token, str(tmp_path), os.environ.get("HOME", "/root/")):
        assert not [text for text in texts if secret.encode() in text]
