"""Publishing while the Hub fails in every way: training continues, and every checkpoint arrives byte for byte.

A proxy injects the faults between a real run of a small recipe and the embedded Hub.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import Fault, FaultProxy
from finished_run import STEPS, Run
from hub_fixture import RunningHub, start_hub
from test_pipeline import weight_digests
from zoo_process import errors, wait_until

from rlhf_zoo.hub.client.publish import checkpoint_files
from rlhf_zoo.hub.client.run_signature import KEY_FILE
from rlhf_zoo.hub.client.step_tags import tag_name
from rlhf_zoo.runs.recipe import copy_recipe
from rlhf_zoo.runs.record import checkpoint_step

SAVED = sum(map(len, STEPS.values()))


@dataclass(frozen=True, kw_only=True)
class Place(Run):
    """A run of the small recipe that publishes through a proxy to a new Hub."""

    server: RunningHub
    proxy: FaultProxy

    def command(self, verb: str = "run", *more: str) -> list[str]:
        return super().command(verb, "--hub", self.proxy.url, "--push_to_hub", "--namespace", "local", *more)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def publishing_defects(place: Place) -> list[str]:
    """Lists checkpoints that the Hub does not hold byte for byte under their tag, and other defects of the Hub."""
    defects = []
    api = place.server.api()
    for stage, steps in STEPS.items():
        repo = f"local/tiny-world-{stage}"
        tags = {ref.name: ref.target_commit for ref in api.list_repo_refs(repo).tags}
        if set(tags) != {*map(tag_name, steps), "best"}:
            defects.append(f"{repo} has the tags {sorted(tags)}")
        for checkpoint in place.record(stage).checkpoints():
            tag = tag_name(checkpoint_step(checkpoint))
            entries = {e.path: e for e in api.list_repo_tree(repo, revision=tags.get(tag, "main"), recursive=True)}
            for name, path in checkpoint_files(checkpoint).items():
                entry: Any = entries.get(name)
                size = entry.size if entry is not None else -1
                if size != path.stat().st_size or (entry.lfs and entry.lfs.sha256 != sha256(path)):
                    defects.append(f"{repo}@{tag}: {name}")
        subjects = place.server.git(repo, "log", "--reverse", "--format=%s", "main").splitlines()[2:]
        wanted = [f"tiny-world {stage}: step {step}" for step in steps]
        cards = [subject for subject in subjects if "card of" in subject]
        if [subject for subject in subjects if "card of" not in subject] != wanted or not cards:
            defects.append(f"{repo} has the commits {subjects}")
        if "error" in place.server.git(repo, "fsck", "--strict"):
            defects.append(f"git fsck of {repo}")
    return defects


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    hub = start_hub(tmp_path / "server")
    with FaultProxy(hub.url) as proxy:
        copy_recipe("tiny-world", tmp_path / "recipes" / "tiny-world")
        yield Place(tmp_path, {"RLHF_ZOO_HUB_TOKEN": hub.token}, server=hub, proxy=proxy)
    hub.stop()


@pytest.fixture
def trained(base: Run, place: Place) -> Place:
    """`place` with the undisturbed run up to PPO, of which nothing is published."""
    run = place.folder / "run"
    shutil.copytree(base.path, run)
    for stage in ("ppo", "eval"):
        shutil.rmtree(run / stage)
    (run / "summary.json").unlink()
    for note in run.rglob("published.json"):
        note.unlink()
    (place.home / "zoo").mkdir(parents=True, exist_ok=True)
    shutil.copy(base.home / "zoo" / KEY_FILE, place.home / "zoo")  # without it, the run would count as another user's
    return place


def assert_run_and_hub_are_complete(place: Place, base: Run) -> None:
    """Checks that training equals the undisturbed run and that everything is published."""
    for stage in STEPS:
        assert weight_digests(place.path / stage) == weight_digests(base.path / stage), stage
    assert publishing_defects(place) == []


def test_run_survives_every_hub_fault(base, trained):
    # The first three commits claim the repositories: if one fails, the run reports it and does not train.
    trained.proxy.inject(
        Fault("refuse", "commit", nth=4),
        Fault("refuse", "commit", nth=6, forwarded=True),
        Fault("refuse", "commit", nth=8, status=412),
        Fault("refuse", "preupload", nth=7, status=429, seconds=1),
        Fault("refuse", "commit", nth=10, status=429, seconds=1),
        Fault("refuse", "create_tag", nth=3, status=500),
        Fault("drop", "create_tag", nth=5, forwarded=True),
        Fault("drop", "commit", nth=12, forwarded=True),
        Fault("drop", "lfs_batch", nth=3),
        Fault("cut_upload", "lfs_upload", nth=2, size=100_000),
        Fault("cut_upload", "lfs_upload", nth=9, size=1_000),
        Fault("cut_upload", "commit", nth=14, size=2_000),
        Fault("refuse", "lfs_upload", nth=6),
        Fault("delay", "commit", nth=5, seconds=1),
    )
    done = trained.zoo(*trained.command("run", "--json"))
    assert done.returncode == 0, done.stderr
    counts = trained.proxy.counts.faults
    assert counts == {
        "refuse 500": 3, "refuse 500 forwarded": 1, "refuse 412": 1, "refuse 429": 2, "drop forwarded": 2, "drop": 1,
        "cut_upload": 3, "delay": 1,
    }  # fmt: skip
    assert_run_and_hub_are_complete(trained, base)
    assert set(json.loads(done.stdout)["repos"]["ppo"]["tags"]) == {*map(tag_name, STEPS["ppo"]), "best"}
    print(f"faults injected: {dict(counts)}; checkpoints saved: {SAVED}; lost: 0")


def test_push_delivers_after_hub_outage_during_ppo(base, trained):
    process = trained.start(*trained.command("run", "--patience", "0"))
    try:
        first = trained.record("sft").checkpoint_path(STEPS["sft"][0])
        wait_until((first / "published.json").is_file, process)
        trained.proxy.down()
        _, stderr = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 2, stderr
    assert errors(stderr)[-1].endswith("run `rlhf-zoo push --resume run` when the Hub answers.")
    assert "Traceback" not in stderr
    assert all(trained.record(stage).read()["status"] == "finished" for stage in (*STEPS, "eval"))
    assert (trained.folder / "run" / "summary.json").is_file()
    trained.proxy.up()
    done = trained.zoo("push", "--resume", "run")
    assert done.returncode == 0, done.stderr
    assert_run_and_hub_are_complete(trained, base)
    api = trained.server.api()
    ppo = json.loads(Path(api.hf_hub_download("local/tiny-world-ppo", "rlhf_card.json")).read_text())
    sft = {ref.name: ref.target_commit for ref in api.list_repo_refs("local/tiny-world-sft").tags}
    assert ppo["parents"]["sft"] == {"repo": "local/tiny-world-sft", "commit": sft[tag_name(STEPS["sft"][-1])]}
    assert all(parent["commit"] for parent in ppo["parents"].values()), "a late push also pins the lineage"
