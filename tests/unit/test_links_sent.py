"""What symbolic links lead to is not published: a run from elsewhere brings links to this machine's files."""

import json
import shutil
from pathlib import Path

import pytest
from test_publish import REPO, commits, download, save, send, sender, uploads  # noqa: F401
from thread_hub import ThreadHub

from rlhf_zoo import own_runs
from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub import publish
from rlhf_zoo.record import StageRecord

pytestmark = pytest.mark.attack


def change_signature(folder: Path) -> None:
    """As a run that came from another machine."""
    path = folder / "run" / "ppo" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "signature": "0" * 64}))


@pytest.mark.parametrize("place", ["checkpoint-5/tokenizer.txt", "checkpoint-5/critic", "checkpoint-5"])
def test_a_link_out_of_a_checkpoint_is_never_sent(place: str, thread_hub: ThreadHub, tmp_path: Path) -> None:
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
def test_no_file_of_a_strangers_run_is_a_link_to_elsewhere(place: str, thread_hub: ThreadHub, tmp_path: Path) -> None:
    """Cards, metrics and data are made from files that lie beside the checkpoints."""
    save(tmp_path, 5)
    elsewhere = tmp_path / "home" / "private"
    elsewhere.mkdir(parents=True)
    link = tmp_path / "run" / place
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(elsewhere)
    change_signature(tmp_path)
    with pytest.raises(ZooError, match=f"{link.name} is a link to outside"):
        sender(thread_hub, tmp_path)
    assert not thread_hub.api().repo_exists(REPO)
    with own_runs.trusting():
        sender(thread_hub, tmp_path)


def test_links_within_a_checkpoint_and_into_the_clients_blobs_are_sent(thread_hub: ThreadHub, tmp_path: Path) -> None:
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
