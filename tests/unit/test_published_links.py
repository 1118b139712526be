"""A run from elsewhere: no file that its links lead to is published, and none of its figures."""

import json
import shutil
from pathlib import Path

import pytest
from test_publish import REPO, commits, download, finish, save, send, sender, uploads  # noqa: F401
from thread_hub import ThreadHub

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client import publish, run_signature
from rlhf_zoo.runs.record import StageRecord

pytestmark = pytest.mark.attack


def change_signature(folder: Path) -> None:
    """As a run that came from another machine."""
    path = folder / "run" / "ppo" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "signature": "0" * 64}))


@pytest.mark.parametrize("place", ["checkpoint-5/tokenizer.txt", "checkpoint-5/critic", "checkpoint-5"])
def test_link_out_of_checkpoint_is_never_sent(place: str, thread_hub: ThreadHub, tmp_path: Path) -> None:
    """A folder from elsewhere brings links to files of whoever pushes it; also a run of one's own sends none."""
    checkpoint = save(tmp_path, 5)
    secret = tmp_path / "home" / "id_rsa"
    secret.parent.mkdir()
    secret.write_text("the key of this machine")
    link = checkpoint.parent / place
    target = secret if link.suffix else secret.parent
    if place == "checkpoint-5":  # on another disk it may be one's own, and a stranger's is refused
        target = Path(shutil.move(checkpoint, secret.parent))
        change_signature(tmp_path)
    shutil.rmtree(link, ignore_errors=True)
    link.symlink_to(target)
    with pytest.raises(ZooError, match=link.name):
        send(thread_hub, tmp_path)
    api = thread_hub.api()
    assert not api.repo_exists(REPO) or "model.safetensors" not in api.list_repo_files(REPO)


@pytest.mark.parametrize("place", ["ppo/metrics.jsonl", "eval/samples.jsonl", "eval", "baseline", "data"])
def test_links_in_downloaded_run_are_rejected(place: str, thread_hub: ThreadHub, tmp_path: Path) -> None:
    """Cards, metrics and data are made from files that lie beside the checkpoints."""
    save(tmp_path, 5)
    elsewhere = tmp_path / "home" / "private"
    elsewhere.mkdir(parents=True)
    link = tmp_path / "run" / place
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(elsewhere)
    change_signature(tmp_path)
    with pytest.raises(ZooError, match=f"{link.name} links to a file outside"):
        sender(thread_hub, tmp_path)
    assert not thread_hub.api().repo_exists(REPO)
    with run_signature.trust_all_runs():
        sender(thread_hub, tmp_path)


def test_links_within_checkpoint_and_into_hub_cache_are_sent(thread_hub: ThreadHub, tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 5)
    (checkpoint / "config.json").rename(checkpoint / "other.json")
    (checkpoint / "config.json").symlink_to("other.json")
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    cached = tmp_path / "models--a--b" / "snapshots" / "c" / "model.safetensors"
    cached.parent.mkdir(parents=True)
    (blobs / "d").write_text("weights")
    cached.symlink_to("../../blobs/d")
    assert publish.checkpoint_files(cached.parent) == {"model.safetensors": cached}
    StageRecord(checkpoint.parent).mark_complete(checkpoint)
    send(thread_hub, tmp_path)
    assert commits(thread_hub) == ["toy ppo: step 5"] and download(thread_hub, "config.json") == b"{}\n"


def test_downloaded_run_cannot_choose_checkpoint_of_another_run(thread_hub: ThreadHub, tmp_path: Path) -> None:
    """`step` of run.json becomes a path: it named a private model, which `push` published as the chosen checkpoint."""
    private = save(tmp_path / "private", 5)
    checkpoint = save(tmp_path, 5)
    (checkpoint.parent / "checkpoint-x").mkdir()
    path = checkpoint.parent / "run.json"
    step = f"x/../../../{private.relative_to(tmp_path)}"
    assert (checkpoint.parent / f"checkpoint-{step}" / "COMPLETE").is_file()
    chosen = {"step": step, "rule": "last", "metric": None, "value": None}
    path.write_text(json.dumps({**json.loads(path.read_text()), "status": "finished", "chosen": chosen}))
    with pytest.raises(ZooError, match=r"chosen\.step"):
        send(thread_hub, tmp_path)
    assert not thread_hub.api().repo_exists(REPO)


def test_downloaded_run_cannot_name_repository_to_restore_from(thread_hub: ThreadHub, tmp_path: Path) -> None:
    """It could be a private one, which would be published again under another name."""
    save(tmp_path, 5)
    checkpoint = save(tmp_path, 10)
    finish(tmp_path, 10)
    send(thread_hub, tmp_path, namespace="private")
    shutil.rmtree(checkpoint)
    own = shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-own"))
    send(thread_hub, own, namespace="public")
    assert thread_hub.api().repo_exists("public/toy-ppo")
    change_signature(tmp_path)
    with pytest.raises(ZooError, match="cannot be loaded from other/toy-ppo@step-000010"):
        send(thread_hub, tmp_path, namespace="other")


def test_downloaded_part_of_run_sends_nothing_of_the_parent_run(thread_hub: ThreadHub, tmp_path: Path) -> None:
    """Its ablation.json or round.json says that the run above it is its own."""
    save(tmp_path, 5)
    part = tmp_path / "run" / "part"
    shutil.copytree(tmp_path / "run" / "ppo", part / "ppo")
    path = part / "ppo" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "signature": "0" * 64}))
    (tmp_path / "run" / "sft").mkdir()
    StageRecord(tmp_path / "run" / "sft").write(stage="sft", recipe="toy")
    with pytest.raises(ZooError, match="claims to be part of your run"):
        sender(thread_hub, tmp_path, directory=part, base=tmp_path / "run")


def test_downloaded_run_is_sent_without_metrics(
    thread_hub: ThreadHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 5)
    record = StageRecord(tmp_path / "run" / "ppo")
    record.write(seconds=0.125, reward_model={"accuracy": 0.875})
    finish(tmp_path, 5)
    (tmp_path / "run" / "eval").mkdir()
    (tmp_path / "run" / "eval" / "evaluation.json").write_text('{"win_rate": {"value": 0.999}}')
    change_signature(tmp_path)
    send(thread_hub, tmp_path)
    assert "it is sent without figures. Add --trust_run if you trust this run." in caplog.text
    for tag in ("step-000005", "best"):
        files = thread_hub.api().list_repo_files(REPO, revision=tag)
        assert "model.safetensors" in files and "metrics.jsonl" not in files
        assert not any(name.startswith(("runs/", "plots/")) for name in files)
        readme, card = (download(thread_hub, name, tag).decode() for name in ("README.md", "rlhf_card.json"))
        assert "This run was not written by the publisher's rlhf-zoo" in readme
        for figure in ("0.999", "0.875", "0.125", "0.500"):
            assert figure not in readme + card
        document = json.loads(card)
        assert document["reward"] is document["kl"] is document["evaluation"] is None and document["tag"] is not None
    with run_signature.trust_all_runs():
        send(thread_hub, tmp_path, again=True)
    assert "metrics.jsonl" in thread_hub.api().list_repo_files(REPO, revision="best")
    assert "not written by the publisher" not in download(thread_hub, "README.md", "best").decode()


def test_send_rejects_tag_that_a_branch_already_names(thread_hub: ThreadHub, tmp_path: Path) -> None:
    save(tmp_path, 5)
    send(thread_hub, tmp_path)
    thread_hub.api().create_branch(REPO, branch="step-000010")
    save(tmp_path, 10)
    with pytest.raises(ZooError, match=r"has a branch named step-000010, .* delete or rename that branch"):
        send(thread_hub, tmp_path)
    thread_hub.api().delete_branch(REPO, branch="step-000010")
    send(thread_hub, tmp_path)
    assert commits(thread_hub) == ["toy ppo: step 5", "toy ppo: step 10"]
