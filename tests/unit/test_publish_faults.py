"""The sender while the Hub fails: fake checkpoints go through a proxy by the real client, and all arrive, once each."""

from __future__ import annotations

import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import Fault, FaultProxy
from hub_fixture import RunningHub
from test_publish import PREAMBLE, REPO, commits, finish, save, send, tags
from warm import PYTHON
from zoo_process import wait_until

from rlhf_zoo.hub.publish import checkpoint_files, tag_name

WATCHED = """
import sys
with Outbox(sender(), hub="the Hub", mend="rlhf-zoo push --resume run", patience=60) as outbox:
    for line in sys.stdin:
        outbox.notify()
"""


@pytest.fixture
def proxy(hub: RunningHub) -> Iterator[FaultProxy]:
    with FaultProxy(hub.url) as proxy:
        yield proxy


def start(hub: RunningHub, proxy: FaultProxy, folder: Path, code: str) -> subprocess.Popen[str]:
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    env = hub.env | {"HF_ENDPOINT": proxy.url}
    return subprocess.Popen([*PYTHON, "-c", PREAMBLE + code], env=env, cwd=folder, text=True, bufsize=1, **pipes)


def check_nothing_lost(hub: RunningHub, folder: Path, steps: list[int]) -> None:
    """Each checkpoint is one commit and one tag, which hold its bytes."""
    assert commits(hub)[2:] == [f"toy ppo: step {step}" for step in steps]
    assert list(tags(hub)) == [tag_name(step) for step in steps]
    for step in steps:
        there = Path(hub.api().snapshot_download(REPO, revision=tag_name(step), cache_dir=folder / "cache"))
        files = checkpoint_files(folder / "run" / "ppo" / f"checkpoint-{step}")
        assert len(files) > 5
        for name, path in files.items():
            assert (there / name).read_bytes() == path.read_bytes()
    assert "error" not in hub.git(REPO, "fsck", "--strict")


@pytest.mark.parametrize("held", ["create_tag", "commit"])
@pytest.mark.parametrize("forwarded", [False, True])
def test_a_kill_while_the_hub_answers(hub, proxy, tmp_path, held, forwarded):
    for step in (5, 10, 15):
        save(tmp_path, step)
    # The first commit claims the repository.
    proxy.inject(Fault("hold", held, nth=3 if held == "commit" else 2, forwarded=forwarded))
    process = start(hub, proxy, tmp_path, "sender().send_all()")
    try:
        proxy.wait_held(seconds=60)
    finally:
        process.kill()
        process.communicate(timeout=60)
    proxy.release()
    wait_until(lambda: proxy.counts.faults in (Counter({"hold": 1}), Counter({"hold forwarded": 1})))
    send(hub, tmp_path)
    check_nothing_lost(hub, tmp_path, [5, 10, 15])


def test_a_hub_that_is_down_for_a_while(hub, proxy, tmp_path):
    first = save(tmp_path, 5)
    process = start(hub, proxy, tmp_path, WATCHED)
    lines: list[str] = []
    reading = threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True)
    reading.start()
    try:
        process.stdin.write("saved\n")
        wait_until((first / "published.json").is_file, process)
        proxy.down()
        for step in (10, 15):
            save(tmp_path, step)
            process.stdin.write("saved\n")
        wait_until(lambda: any("was not sent to" in line for line in lines), process)
        proxy.up()
        process.stdin.close()
        assert process.wait(60) == 0, lines
    finally:
        process.kill()
    reading.join(30)
    said = "".join(lines)
    assert said.count("was not sent to") == said.count("answers again: ") == 1 and "Traceback" not in said
    assert proxy.counts.faults["down"] == 1
    check_nothing_lost(hub, tmp_path, [5, 10, 15])


def test_a_finished_run_is_whole_after_every_fault(hub, proxy, tmp_path):
    """A hundred requests, of which every ninth fails in one of the ways there are."""
    kinds = [
        Fault("refuse"), Fault("refuse", forwarded=True), Fault("drop"), Fault("drop", forwarded=True),
        Fault("refuse", status=429, seconds=0.01), Fault("cut_upload", size=500), Fault("cut_download", size=50),
    ]  # fmt: skip
    steps = [5, 10, 15, 20, 25, 30]
    for step in steps:
        save(tmp_path, step)
    finish(tmp_path, 20)
    proxy.inject(*(type(kind)(**{**vars(kind), "nth": 9 * place}) for place, kind in enumerate(kinds, start=1)))
    process = start(hub, proxy, tmp_path, WATCHED)
    _, said = process.communicate("saved\n", timeout=120)
    assert process.returncode == 0, said
    assert sum(proxy.counts.faults.values()) == len(kinds), proxy.counts.faults
    # The commit after the last checkpoint is the chosen one with the final card.
    assert commits(hub)[2:-1] == [f"toy ppo: step {step}" for step in steps]
    assert set(tags(hub)) == {*map(tag_name, steps), "best"}
