"""Votes on a Hub, by the real client: none is lost, none comes twice, whoever votes at the same time and fails when."""

import io
import json
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from fault_proxy import Fault, FaultProxy
from hub_fixture import RunningHub
from huggingface_hub import CommitOperationAdd
from thread_hub import ThreadHub
from vote_store import make_vote
from warm import PYTHON

from rlhf_zoo.errors import ZooError
from rlhf_zoo.evaluation.votes.box import VoteBox, default_journal
from rlhf_zoo.evaluation.votes.data import HubVotes, _read_votes
from rlhf_zoo.evaluation.votes.vote import MAX_TEXT, ShownCompletion, Vote, merge_votes

REPO = "local/votes"
# Casts votes from several threads, and prints the id of each once cast() has returned.
CAST = """
import json, os, sys, threading, time
from pathlib import Path
from rlhf_zoo.hub.client import refusals
from rlhf_zoo.evaluation.votes.box import VoteBox
from rlhf_zoo.evaluation.votes.data import HubVotes
from rlhf_zoo.evaluation.votes.vote import ShownCompletion, Vote
journal, name, voters, votes, interval, pause = json.loads(sys.argv[1])
refusals.FIRST_PAUSE, refusals.MAX_PAUSE = 0.05, 0.5

def visit(box, voter):
    for number in range(votes):
        verdict = ("left", "right", "tie", "both_bad")[number % 4]
        ppo = ShownCompletion(f" {voter} {number} ppo", "ppo", "local/toy-ppo", "a" * 40, "best", 0.5 * number, True)
        sft = ShownCompletion(f" {voter} {number} sft", "sft", "local/toy-sft", "b" * 40, None)
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
    found[configuration] = {"types": {k: str(v.dtype) for k, v in rows.features.items()}, "rows": list(rows)}
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


# Concurrent voters


def test_voters_in_several_spaces_and_processes(hub, tmp_path):
    """Three journals, one of them of two processes; none knows of the others, and they commit to one repository."""
    spaces = [start(hub.env, tmp_path / f"space {i % 3}", f"space {i}", voters=4, votes=4) for i in range(4)]
    sent = [vote for space in spaces for vote in finish(space)]
    found = load(hub)
    there = [row for part in found.values() for row in part["rows"]]
    assert len(sent) == len(set(sent)) == 64
    assert Counter(row["id"] for row in there) == Counter(sent), "sent = stored"
    assert Counter(row["verdict"] for row in there) == dict.fromkeys(("left", "right", "tie", "both_bad"), 16)
    assert not list(tmp_path.glob("space */batches/*"))
    for row in found["default"]["rows"]:
        won, lost = ("ppo", "sft") if row["verdict"] == "left" else ("sft", "ppo")
        assert row["chosen"].endswith(won) and row["rejected"].endswith(lost)
        assert (row["chosen_role"], row["rejected_role"]) == (won, lost)
    types = found["default"]["types"]
    assert (types["prompt"], types["chosen_reward"], types["seed"], types["time"]) == (
        "string", "float64", "int64", "string",
    )  # fmt: skip
    assert "error" not in hub.git(REPO, "fsck", "--strict", kind="dataset")


# A Hub that fails


@pytest.mark.parametrize(
    "fault",
    [
        Fault("drop", "commit", forwarded=True),
        Fault("refuse", "commit", status=412, count=3),
        Fault("drop", "create_repo", forwarded=True),
        Fault("cut_upload", "lfs_upload", size=500),
    ],
    ids=lambda fault: f"{fault.name} {fault.operation}",
)
def test_every_fault_of_the_hub(hub, proxy, through, tmp_path, fault):
    proxy.inject(fault)
    sent = finish(start(through, tmp_path / "journal", "fault", voters=4, votes=5))
    assert stored(hub) == sorted(sent) and len(set(sent)) == 20
    assert sum(proxy.counts.faults.values()) == (fault.count or 1)


def test_a_kill_while_a_commit_is_under_way(hub, proxy, through, tmp_path):
    """The Hub has the votes and nobody here knows: they are not stored twice."""
    proxy.inject(Fault("hold", "commit", forwarded=True))
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


# What is stored, over a Hub in this process

HOSTILE = [
    "2024-01-01T00:00:00Z", "1", "null", "", " ", "a\u2028b\x85d\r\ne", "\x00", "\ufeff\u202e", "---\nconfigs: []\n---",
    "x" * (MAX_TEXT - 1),
]  # fmt: skip


def cast(journal: Path, *votes: Vote, store: HubVotes | None = None) -> None:
    with VoteBox(store or HubVotes(REPO), journal, interval=0) as box:
        for vote in votes:
            box.cast(vote)
        box.drain(20)


def readme(hub: ThreadHub) -> str:
    path = hub.api().hf_hub_download(REPO, "README.md", repo_type="dataset", force_download=True)
    return Path(path).read_text()


def test_hostile_texts_come_back_exactly(thread_hub, tmp_path, monkeypatch):
    store, votes = HubVotes(REPO), []
    assert store.read() == []
    for text in HOSTILE:  # a commit for each, so that no other text in a file saves it
        sides = {"left": ShownCompletion(text, "ppo"), "right": ShownCompletion(text + ".", "sft", reward=None)}
        votes += [make_vote(verdict, prompt=text, **sides) for verdict in ("left", "tie")]
        cast(tmp_path / "journal", *votes[-2:], store=store)
    assert store.read() == HubVotes(REPO).read() == merge_votes(votes)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    assert store.read() == merge_votes(votes), "nothing is fetched again where nothing was added"
    monkeypatch.undo()
    journal = Path(huggingface_hub.constants.HF_HOME) / "rlhf-zoo-votes" / "local--votes"
    assert default_journal(REPO) == journal


def test_the_card(thread_hub, tmp_path):
    cast(tmp_path / "journal", make_vote(), make_vote("tie"))
    info = thread_hub.api().dataset_info(REPO)
    assert info.card_data.license == "cc-by-4.0" and {"rlhf-zoo", "votes"} <= set(info.tags)
    names = {one["config_name"]: one for one in info.card_data["configs"]}
    assert names["default"]["default"] is True and set(names) == {"default", "ties"}
    text = readme(thread_hub)
    assert "No personal data" in text and f"--dataset_name {REPO}" in text


def test_a_card_of_the_users_own_is_kept_and_completed(thread_hub, tmp_path):
    own = "---\nlicense: mit\ntags:\n- mine\npretty_name: Our votes\n---\n\n# Ours\n\nAs we say it.\n"
    thread_hub.make("votes", {"README.md": own}, kind="dataset")
    cast(tmp_path / "journal", make_vote())
    text = readme(thread_hub)
    assert "As we say it." in text and "license: mit" in text and "pretty_name: Our votes" in text
    cast(tmp_path / "other", make_vote())
    assert readme(thread_hub) == text and len(HubVotes(REPO).read()) == 2


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ("---\nconfigs:\n- config_name: default\n  data_files: mine.csv\n---\n", "holds another data set"),
        ("---\nconfigs: [1]\n---\n", "configs that are not a list of mappings"),
        ("---\n- a\n---\n", "does not begin with a YAML mapping"),
        ("---\n: [\n---\n", "begins with invalid YAML"),
    ],
)
def test_another_data_set_is_left_alone(thread_hub, card, said):
    head = thread_hub.make("votes", {"README.md": card}, kind="dataset")
    with pytest.raises(ZooError, match=said):
        HubVotes(REPO).append("2030-01-01/first", [make_vote()])
    assert thread_hub.api().dataset_info(REPO).sha == head


def test_rows_of_strangers_are_left_out(thread_hub, tmp_path, caplog):
    """Whoever may write to the repository may write anything into it."""
    vote, strange = make_vote(), io.BytesIO()
    cast(tmp_path / "journal", vote)
    parquet.write_table(pa.table({"prompt": ["a"], "verdict": ["left"]}), strange)
    files = {"default/x/a.parquet": strange.getvalue(), "ties/x/b.parquet": b"no parquet"}
    changes = [CommitOperationAdd(name, content) for name, content in files.items()]
    thread_hub.api().create_commit(REPO, changes, commit_message="Strange", repo_type="dataset")
    assert HubVotes(REPO).read() == [vote]
    assert "holds 1 rows that are not votes" in caplog.text


@pytest.mark.attack
def test_no_file_of_a_stranger_hides_the_votes_of_others(tmp_path, caplog):
    """Text that is no UTF-8, a zone that is a path, types that votes have not, and what is too large unpacked."""
    table = pa.Table.from_pylist([make_vote().to_row()])
    place = table.schema.get_field_index("prompt")
    two_bytes = [None, pa.py_buffer(bytes(4) + bytes([2, 0, 0, 0])), pa.py_buffer(bytes([255, 254]))]
    files = [
        table,
        table.set_column(place, "prompt", pa.Array.from_buffers(pa.string(), 1, two_bytes)),
        table.set_column(
            table.schema.get_field_index("time"), "time", pa.array([1], pa.timestamp("s", tz="../../etc/passwd"))
        ),
        pa.table({"prompt": [{"b": 1}]}),
        pa.table({"prompt": pa.nulls(2**20 + 1, pa.string())}),
    ]
    found = []
    for number, odd in enumerate(files):
        parquet.write_table(odd, tmp_path / f"{number}.parquet")
        votes, strange = _read_votes(tmp_path / f"{number}.parquet")
        found.append((len(votes), strange))
    assert found == [(1, 0), (0, 0), (0, 1), (0, 1), (0, 0)]
    assert "can't decode byte" in caplog.text and "1048577 rows" in caplog.text
