"""Votes on a Hub, by the real client: none is lost, none comes twice, whoever votes at the same time and fails when."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import Fault, FaultProxy
from hub_fixture import RunningHub
from huggingface_hub import CommitOperationAdd
from warm import PYTHON

from rlhf_zoo.hub.votes import LONGEST_TEXT

REPO = "local/votes"
# Casts votes from several threads, and prints the id of each once cast() has returned.
CAST = """
import json, os, sys, threading, time
from pathlib import Path
from rlhf_zoo.hub import vote_box
from rlhf_zoo.hub.vote_box import VoteBox
from rlhf_zoo.hub.vote_data import HubVotes
from rlhf_zoo.hub.votes import Shown, Vote
journal, name, voters, votes, interval, pause = json.loads(sys.argv[1])
vote_box.FIRST_PAUSE, vote_box.LONGEST_PAUSE = 0.05, 0.5

def visit(box, voter):
    for number in range(votes):
        verdict = ("left", "right", "tie", "both_bad")[number % 4]
        ppo = Shown(f" {voter} {number} ppo", "ppo", "local/toy-ppo", "a" * 40, "best", 0.5 * number, True)
        sft = Shown(f" {voter} {number} sft", "sft", "local/toy-sft", "b" * 40, None)
        vote = Vote(f"{name}", ppo, sft, verdict, 1, 0.9, number, 20)
        box.cast(vote)
        os.write(1, (vote.id + "\\n").encode())
        time.sleep(pause)

with VoteBox(HubVotes("local/votes"), Path(journal), interval=interval) as box:
    threads = [threading.Thread(target=visit, args=(box, voter)) for voter in range(voters)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    box.drain(60)
"""
LOAD = """
import json, datasets
datasets.disable_progress_bars()
found = {}
for configuration in ("default", "ties"):
    rows = datasets.load_dataset("local/votes", *([] if configuration == "default" else [configuration]))["train"]
    found[configuration] = {"columns": rows.column_names, "types": {k: str(v.dtype) for k, v in rows.features.items()},
                            "rows": [dict(row) for row in rows]}
print(json.dumps(found))
"""


def start(
    env: dict[str, str], journal: Path, name: str, *, voters: int, votes: int, interval: float = 0.0, pause: float = 0.0
) -> subprocess.Popen[str]:
    told = json.dumps([str(journal), name, voters, votes, interval, pause])
    return subprocess.Popen([*PYTHON, "-c", CAST, told], env=env, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)  # fmt: skip


def finish(process: subprocess.Popen[str]) -> list[str]:
    """The ids that a process has cast."""
    said, wrong = process.communicate(timeout=300)
    assert process.returncode == 0, wrong
    return said.split()


def load(hub: RunningHub) -> dict[str, Any]:
    return json.loads(hub.python(LOAD))


def stored(hub: RunningHub) -> list[str]:
    """The ids of all rows, as `datasets` loads both configurations."""
    return sorted(row["id"] for part in load(hub).values() for row in part["rows"])


@pytest.fixture
def proxy(hub: RunningHub) -> Iterator[FaultProxy]:
    with FaultProxy(hub.url) as proxy:
        yield proxy


@pytest.fixture
def through(hub: RunningHub, proxy: FaultProxy) -> dict[str, str]:
    """The environment of a client behind the proxy."""
    return {**hub.env, "HF_ENDPOINT": proxy.url}


def until(ready: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


# Concurrent voters


def test_forty_voters_in_four_spaces(hub, tmp_path):
    """Each Space has its own journal; none knows of the others, and they commit to one repository."""
    spaces = [start(hub.env, tmp_path / f"space {i}", f"space {i}", voters=10, votes=8) for i in range(4)]
    sent = [vote for space in spaces for vote in finish(space)]
    found = load(hub)
    there = [row for part in found.values() for row in part["rows"]]
    assert len(sent) == len(set(sent)) == 320
    assert Counter(row["id"] for row in there) == Counter(sent), "sent = stored"
    assert Counter(row["verdict"] for row in there) == dict.fromkeys(("left", "right", "tie", "both_bad"), 80)
    for row in found["default"]["rows"]:
        won, lost = ("ppo", "sft") if row["verdict"] == "left" else ("sft", "ppo")
        assert row["chosen"].endswith(won) and row["rejected"].endswith(lost)
        assert (row["chosen_role"], row["rejected_role"]) == (won, lost)
    commits = hub.api().list_repo_commits(REPO, repo_type="dataset")
    refused = hub.log.read_text().count(" 412 ")
    print(f"{len(sent)} votes, {len(commits) - 1} commits, {refused} refused with 412; lost 0, twice 0")
    assert "error" not in hub.git(REPO, "fsck", "--strict", kind="dataset")


def test_forty_voters_in_four_processes_over_one_journal(hub, tmp_path):
    workers = [start(hub.env, tmp_path / "journal", f"{i}", voters=10, votes=4) for i in range(4)]
    sent = [vote for worker in workers for vote in finish(worker)]
    assert len(set(sent)) == 160 and stored(hub) == sorted(sent)
    assert not list((tmp_path / "journal" / "batches").iterdir())


# A Hub that fails


def test_a_hub_that_is_away_for_a_while(hub, proxy, through, tmp_path):
    proxy.down()
    process = start(through, tmp_path / "journal", "away", voters=4, votes=10)
    until(lambda: len(list((tmp_path / "journal").glob("votes/*.json"))) >= 20)
    time.sleep(0.5)
    proxy.up()
    assert stored_after(hub, process) and proxy.counts.faults == {"down": 1}


def stored_after(hub: RunningHub, process: subprocess.Popen[str]) -> bool:
    sent = finish(process)
    assert stored(hub) == sorted(sent)
    return len(sent) == len(set(sent)) == 40


@pytest.mark.parametrize(
    "fault",
    [
        Fault("drop", "commit", forwarded=True),
        Fault("refuse", "commit", forwarded=True),
        Fault("refuse", "commit", status=412, count=3),
        Fault("refuse", "commit", status=429, seconds=1),
        Fault("cut_upload", "commit", size=500),
        Fault("drop", "create_repo", forwarded=True),
        Fault("refuse", "preupload"),
        Fault("drop", "lfs_batch"),
        Fault("cut_upload", "lfs_upload", size=500),
        Fault("drop", "refs"),
    ],
    ids=lambda fault: f"{fault.name} {fault.operation}",
)
def test_every_fault_of_the_hub(hub, proxy, through, tmp_path, fault):
    proxy.inject(fault)
    assert stored_after(hub, start(through, tmp_path / "journal", "fault", voters=4, votes=10))
    assert sum(proxy.counts.faults.values()) == (fault.count or 1)


@pytest.mark.parametrize("forwarded", [False, True])
def test_a_kill_while_a_commit_is_under_way(hub, proxy, through, tmp_path, forwarded):
    """Where it was forwarded, the Hub has the votes and nobody here knows: they are not stored twice."""
    proxy.inject(Fault("hold", "commit", forwarded=forwarded))
    process = start(through, tmp_path / "journal", "killed", voters=4, votes=10)
    proxy.wait_held()
    process.send_signal(signal.SIGKILL)
    cast = process.communicate(timeout=60)[0].split()
    proxy.release()
    proxy.clear()
    again = finish(start(through, tmp_path / "journal", "again", voters=1, votes=1))
    there = stored(hub)
    assert len(there) == len(set(there)), "no vote is stored twice"
    assert set(cast) | set(again) <= set(there), "no vote that was cast is lost"
    assert len(there) - len(cast) - len(again) <= 4, "those are votes whose thread died before it could say so"


def test_kills_at_random_moments(hub, tmp_path):
    """Eight times, in the middle of casting and sending."""
    cast: list[str] = []
    for turn in range(8):
        process = start(hub.env, tmp_path / "journal", f"turn {turn}", voters=4, votes=1000, pause=0.005)
        assert process.stdout is not None
        cast.append(process.stdout.readline().strip())
        time.sleep(0.07 * turn)
        process.send_signal(signal.SIGKILL)
        cast += process.communicate(timeout=60)[0].split()
    cast += finish(start(hub.env, tmp_path / "journal", "last", voters=1, votes=1))
    there = stored(hub)
    assert len(there) == len(set(there)) and set(cast) <= set(there)
    print(f"8 kills, {len(cast)} votes acknowledged to their voters, {len(there)} stored; lost 0, twice 0")


# What is stored

HOSTILE = [
    "2024-01-01", "12:00:00", "2024-01-01T00:00:00Z", "1", "null", "", " ", "a\u2028b\u2029c\x85d\x0be", "a\r\nb\tc\rd",
    "\x00", "\x1b[31m", "\ufeff", "\u202e", "\U0001f600", '<script>alert("x")</script>', "---\nconfigs: []\n---", '"\\',
    "x" * LONGEST_TEXT,
]  # fmt: skip
STORE = """
import json, sys
from pathlib import Path
from rlhf_zoo.hub.vote_box import VoteBox, journal_of
from rlhf_zoo.hub.vote_data import HubVotes
from rlhf_zoo.hub.votes import Shown, Vote, merged
texts = json.loads(Path("texts.json").read_text())
store = HubVotes("local/votes", license="apache-2.0", tags=["simulated"])
assert store.read() == []
cast = []
with VoteBox(store, interval=0) as box:
    for text in texts:  # a commit for each, so that no other text in a file saves it
        for verdict in ("left", "tie"):
            cast.append(Vote(text, Shown(text, "ppo"), Shown(text + ".", "sft", reward=None), verdict, 1, 1, 1, 1))
            box.cast(cast[-1])
        box.drain()
    assert box.votes() == merged(cast)
assert store.read() == merged(cast)
import huggingface_hub
fetch, huggingface_hub.snapshot_download = huggingface_hub.snapshot_download, None
assert store.read() == merged(cast), "nothing is fetched again where nothing was added"
huggingface_hub.snapshot_download = fetch
other = HubVotes("local/other")
later = [Vote(text, Shown("a", "ppo"), Shown("b", "sft"), "left", 1, 1, 1, 1) for text in "ab"]
other.append("2030-01-01/first", later[:1])
assert other.read() == later[:1]
HubVotes("local/other").append("2030-01-01/second", later[1:])
assert other.read() == merged(later)
print(journal_of("local/votes"))
"""


def test_hostile_texts_come_back_exactly(hub, tmp_path):
    texts = [text[:-1] if len(text) == LONGEST_TEXT else text for text in HOSTILE]  # a point is added
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    journal = hub.python(STORE, cwd=tmp_path).strip()
    assert journal == str(Path(hub.env["HF_HOME"]) / "rlhf-zoo-votes" / "local--votes")
    found = load(hub)
    assert sorted((row["prompt"], row["chosen"], row["rejected"]) for row in found["default"]["rows"]) == sorted(
        (text, text, text + ".") for text in texts
    )
    assert sorted((row["prompt"], row["left"], row["right"]) for row in found["ties"]["rows"]) == sorted(
        (text, text, text + ".") for text in texts
    )
    types = found["default"]["types"]
    assert (types["prompt"], types["chosen_reward"], types["seed"], types["time"]) == (
        "string", "float64", "int64", "string",
    )  # fmt: skip


def test_the_card(hub, tmp_path):
    finish(start(hub.env, tmp_path / "journal", "card", voters=1, votes=4))
    api = hub.api()
    info = api.dataset_info(REPO)
    assert info.card_data is not None and info.card_data.license == "cc-by-4.0"
    assert {"rlhf-zoo", "votes"} <= set(info.tags or [])
    names = {one["config_name"]: one for one in info.card_data["configs"]}
    assert names["default"]["default"] is True and set(names) == {"default", "ties"}
    text = Path(api.hf_hub_download(REPO, "README.md", repo_type="dataset")).read_text()
    assert "No personal data" in text and f"--dataset_name {REPO}" in text
    files = api.list_repo_files(REPO, repo_type="dataset")
    assert all(name.startswith(("default/20", "ties/20", "README", ".git")) for name in files), files


def readme(hub: RunningHub, text: str) -> None:
    hub.api().create_repo(REPO, repo_type="dataset")
    change = CommitOperationAdd("README.md", text.encode())
    hub.api().create_commit(REPO, [change], commit_message="Mine", repo_type="dataset")


def test_a_card_of_the_users_own_is_kept_and_completed(hub, tmp_path):
    readme(hub, "---\nlicense: mit\ntags:\n- mine\npretty_name: Our votes\n---\n\n# Ours\n\nAs we say it.\n")
    finish(start(hub.env, tmp_path / "journal", "card", voters=1, votes=4))
    text = Path(hub.api().hf_hub_download(REPO, "README.md", repo_type="dataset")).read_text()
    assert "As we say it." in text and "license: mit" in text and "pretty_name: Our votes" in text
    assert len(stored(hub)) == 4
    head = hub.api().dataset_info(REPO).sha
    finish(start(hub.env, tmp_path / "other", "card", voters=1, votes=4))
    again = Path(hub.api().hf_hub_download(REPO, "README.md", repo_type="dataset")).read_text()
    assert again == text and hub.api().dataset_info(REPO).sha != head


def test_another_data_set_is_left_alone(hub, tmp_path):
    readme(hub, "---\nconfigs:\n- config_name: default\n  data_files: mine.csv\n---\n")
    head = hub.api().dataset_info(REPO).sha
    code = CAST.replace("box.drain(60)", "box.drain(2)")
    told = json.dumps([str(tmp_path / "journal"), "x", 1, 1, 0, 0])
    done = subprocess.run([*PYTHON, "-c", code, told], env=hub.env, capture_output=True, text=True, check=False)
    assert "local/votes holds another data set: give votes a repository of their own" in done.stderr
    assert hub.api().dataset_info(REPO).sha == head
    assert len(list((tmp_path / "journal").glob("*/*.json"))) == 1, "the vote is kept"


def test_rows_of_strangers_are_left_out(hub, tmp_path):
    """Whoever may write to the repository may write anything into it."""
    sent = finish(start(hub.env, tmp_path / "journal", "x", voters=1, votes=4))
    code = """
import io, pyarrow as pa, pyarrow.parquet as pq
from huggingface_hub import CommitOperationAdd, HfApi
from rlhf_zoo.hub.vote_data import HubVotes
strange = io.BytesIO()
pq.write_table(pa.table({"prompt": ["a"], "verdict": ["left"]}), strange)
files = {"default/x/a.parquet": strange.getvalue(), "ties/x/b.parquet": b"no parquet"}
changes = [CommitOperationAdd(name, content) for name, content in files.items()]
HfApi().create_commit("local/votes", changes, commit_message="Strange", repo_type="dataset")
print(*(vote.id for vote in HubVotes("local/votes").read()))
"""
    assert sorted(hub.python(code).split()) == sorted(sent)
