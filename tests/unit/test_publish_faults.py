"""The sender while the Hub fails: fake checkpoints go through a proxy by the real client, and all arrive, once each."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_proxy import Fault, FaultProxy
from hub_fixture import base_environment
from test_publish import REPO, commits, finish, save, send, sender, tags
from thread_hub import ThreadHub
from warm import PYTHON
from zoo_process import wait_until

from rlhf_zoo.hub.publish import checkpoint_files, tag_name
from rlhf_zoo.hub_server.cli import client_environment
from rlhf_zoo.release.outbox import Outbox

SEND = """
from pathlib import Path
from types import SimpleNamespace
from test_publish import send
send(SimpleNamespace(url={url!r}), Path("."))
"""


@pytest.fixture
def proxy(thread_hub: ThreadHub, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """The clients of this process talk to it."""
    from huggingface_hub import constants

    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    with FaultProxy(thread_hub.url) as proxy:
        monkeypatch.setattr(constants, "ENDPOINT", proxy.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template.replace(thread_hub.url, proxy.url))
        monkeypatch.setattr("rlhf_zoo.release.card._plots", lambda *_: {})
        yield proxy


def test_a_kill_while_the_hub_answers(thread_hub, proxy, tmp_path):
    """The commit of the second of three checkpoints is made, and its answer never heard: it is found again."""
    steps = [5, 10, 15]
    for step in steps:
        save(tmp_path, step)
    proxy.inject(Fault("hold", "commit", nth=3, forwarded=True))  # the first commit claims the repository
    env = base_environment() | client_environment(proxy.url, thread_hub.token, tmp_path / "home")
    here = Path(__file__).parent
    env["PYTHONPATH"] = os.pathsep.join([str(here), str(here.parent), env["PYTHONPATH"]])
    process = subprocess.Popen([*PYTHON, "-c", SEND.format(url=proxy.url)], env=env, cwd=tmp_path)
    try:
        proxy.wait_held(seconds=240)
    finally:
        process.kill()
        process.wait(60)
    proxy.release()
    wait_until(lambda: proxy.counts.faults == {"hold forwarded": 1})
    send(thread_hub, tmp_path)
    assert commits(thread_hub) == [f"toy ppo: step {step}" for step in steps]
    assert list(tags(thread_hub)) == [tag_name(step) for step in steps]
    for step in steps:
        there = Path(thread_hub.api().snapshot_download(REPO, revision=tag_name(step)))
        files = checkpoint_files(tmp_path / "run" / "ppo" / f"checkpoint-{step}")
        assert len(files) > 5 and all((there / name).read_bytes() == path.read_bytes() for name, path in files.items())


def test_a_finished_run_is_whole_after_every_fault(thread_hub, proxy, tmp_path):
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
    with Outbox(sender(proxy, tmp_path), hub="the Hub", mend="rlhf-zoo push --resume run", patience=60):
        pass
    assert sum(proxy.counts.faults.values()) == len(kinds), proxy.counts.faults
    # The commit after the last checkpoint is the chosen one with the final card.
    assert commits(thread_hub)[:-1] == [f"toy ppo: step {step}" for step in steps]
    assert set(tags(thread_hub)) == {*map(tag_name, steps), "best"}
