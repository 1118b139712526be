"""Votes on a Hub, through the real client: none is lost or stored twice, despite concurrent voters and failures."""

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
result = {}
for configuration in ("default", "ties"):
    rows = datasets.load_dataset("local/votes", *([] if configuration == "default" else [configuration]))["train"]
    result[configuration] = {"types": {k: str(v.dtype) for k, v in rows.features.items()}, "rows": list(rows)}
print(json.dumps(result))
"""


def start(
    env: dict[str, str], journal: Path, name: str, *, voters: int, votes: int, interval: float = 0.0, pause: float = 0.0
) -> subprocess.Popen[str]:
    arguments = json.dumps([str(journal), name, voters, votes, interval, pause])
    return subprocess.Popen([*PYTHON, "-c", CAST, arguments], env=env, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)  # fmt: skip


def finish(process: subprocess.Popen[str]) -> list[str]:
    """Waits for the process; returns the ids of the votes that it has cast."""
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    return stdout.split()


def load(hub: RunningHub) -> dict[str, Any]:
    return json.loads(hub.python(LOAD))


def stored(hub: RunningHub) -> list[str]:
    """Returns the ids of all rows that `datasets` loads from both configurations."""
    return sorted(row["id"] for part in load(hub).values() for row in part["rows"])


@pytest.fixture
def proxy(hub: RunningHub) -> Iterator[FaultProxy]:
    with FaultProxy(hub.url) as proxy:
        yield proxy


@pytest.fixture
def proxied_env(hub: RunningHub, proxy: FaultProxy) -> dict[str, str]:
    """The environment of a client behind the proxy."""
    return {**hub.env, "HF_ENDPOINT": proxy.url}


# Concurrent voters


def test_concurrent_voters_store_each_vote_once(hub, tmp_path):
    """Three journals, one of them shared by two processes, commit independently to one repository."""
    spaces = [start(hub.env, tmp_path / f"space {i % 3}", f"space {i}", voters=4, votes=4) for i in range(4)]
    sent = [vote for space in spaces for vote in finish(space)]
    configurations = load(hub)
    rows = [row for part in configurations.values() for row in part["rows"]]
    assert len(sent) == len(set(sent)) == 64
    assert Counter(row["id"] for row in rows) == Counter(sent), "sent = stored"
    assert Counter(row["verdict"] for row in rows) == dict.fromkeys(("left", "right", "tie", "both_bad"), 16)
    assert not list(tmp_path.glob("space */batches/*"))
    for row in configurations["default"]["rows"]:
        won, lost = ("ppo", "sft") if row["verdict"] == "left" else ("sft", "ppo")
        assert row["chosen"].endswith(won) and row["rejected"].endswith(lost)
        assert (row["chosen_role"], row["rejected_role"]) == (won, lost)
    types = configurations["default"]["types"]
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
def test_votes_survive_fault_of_hub(hub, proxy, proxied_env, tmp_path, fault):
    proxy.inject(fault)
    sent = finish(start(proxied_env, tmp_path / "journal", "fault", voters=4, votes=5))
    assert stored(hub) == sorted(sent) and len(set(sent)) == 20
    assert sum(proxy.counts.faults.values()) == (fault.count or 1)


def test_votes_survive_kill_during_commit(hub, proxy, proxied_env, tmp_path):
    """The Hub has stored the votes, but the client does not know: they are not stored twice."""
    proxy.inject(Fault("hold", "commit", forwarded=True))
    process = start(proxied_env, tmp_path / "journal", "killed", voters=4, votes=10)
    proxy.wait_held()
    process.send_signal(signal.SIGKILL)
    cast = process.communicate(timeout=60)[0].split()
    proxy.release()
    proxy.clear()
    cast_later = finish(start(proxied_env, tmp_path / "journal", "again", voters=1, votes=1))
    stored_ids = stored(hub)
    assert len(stored_ids) == len(set(stored_ids)), "no vote is stored twice"
    assert set(cast) | set(cast_later) <= set(stored_ids), "no vote that was cast is lost"
    assert len(stored_ids) - len(cast) - len(cast_later) <= 4, "a thread may die between storing and printing a vote"


# Stored content, with a Hub in this process

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


def test_hostile_texts_round_trip(thread_hub, tmp_path, monkeypatch):
    store, votes = HubVotes(REPO), []
    assert store.read() == []
    for text in HOSTILE:  # one commit each, so that no other text in a file hides a defect
        sides = {"left": ShownCompletion(text, "ppo"), "right": ShownCompletion(text + ".", "sft", reward=None)}
        votes += [make_vote(verdict, prompt=text, **sides) for verdict in ("left", "tie")]
        cast(tmp_path / "journal", *votes[-2:], store=store)
    assert store.read() == HubVotes(REPO).read() == merge_votes(votes)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    assert store.read() == merge_votes(votes), "without new votes nothing is fetched"
    monkeypatch.undo()
    journal = Path(huggingface_hub.constants.HF_HOME) / "rlhf-zoo-votes" / "local--votes"
    assert default_journal(REPO) == journal


def test_card_of_votes_has_license_and_configurations(thread_hub, tmp_path):
    cast(tmp_path / "journal", make_vote(), make_vote("tie"))
    info = thread_hub.api().dataset_info(REPO)
    assert info.card_data.license == "cc-by-4.0" and {"rlhf-zoo", "votes"} <= set(info.tags)
    names = {config["config_name"]: config for config in info.card_data["configs"]}
    assert names["default"]["default"] is True and set(names) == {"default", "ties"}
    text = readme(thread_hub)
    assert "No personal data" in text and f"--dataset_name {REPO}" in text


def test_card_of_user_is_kept_and_completed(thread_hub, tmp_path):
    own = "---\nlicense: mit\ntags:\n- mine\npretty_name: Our votes\n---\n\n# Ours\n\nAs we say it.\n"
    thread_hub.make("votes", {"README.md": own}, kind="dataset")
    cast(tmp_path / "journal", make_vote())
    text = readme(thread_hub)
    assert "As we say it." in text and "license: mit" in text and "pretty_name: Our votes" in text
    cast(tmp_path / "other", make_vote())
    assert readme(thread_hub) == text and len(HubVotes(REPO).read()) == 2


@pytest.mark.parametrize(
    ("card", "message"),
    [
        ("---\nconfigs:\n- config_name: default\n  data_files: mine.csv\n---\n", "holds another data set"),
        ("---\nconfigs: [1]\n---\n", "configs that are not a list of mappings"),
        ("---\n- a\n---\n", "does not begin with a YAML mapping"),
        ("---\n: [\n---\n", "begins with invalid YAML"),
        (f"---\na: {'[' * 20_000}\n---\n", "begins with invalid YAML .line 1: it is nested more than 63 deep"),
        ("---\nconfigs: 5\n---\n", "configs that are not a list of mappings"),
    ],
)
def test_append_rejects_other_data_set(thread_hub, card, message):
    head = thread_hub.make("votes", {"README.md": card}, kind="dataset")
    with pytest.raises(ZooError, match=message):
        HubVotes(REPO).append("2030-01-01/first", [make_vote()])
    assert thread_hub.api().dataset_info(REPO).sha == head


def test_read_skips_rows_that_are_not_votes(thread_hub, tmp_path, caplog):
    """Everyone with write access may push any rows."""
    vote, foreign_file = make_vote(), io.BytesIO()
    cast(tmp_path / "journal", vote)
    parquet.write_table(pa.table({"prompt": ["a"], "verdict": ["left"]}), foreign_file)
    files = {"default/x/a.parquet": foreign_file.getvalue(), "ties/x/b.parquet": b"no parquet"}
    changes = [CommitOperationAdd(name, content) for name, content in files.items()]
    thread_hub.api().create_commit(REPO, changes, commit_message="Strange", repo_type="dataset")
    assert HubVotes(REPO).read() == [vote]
    assert "holds 1 rows that are not votes" in caplog.text


@pytest.mark.attack
def test_malicious_file_hides_no_votes(tmp_path, caplog):
    """Invalid UTF-8, a time zone that is a path, wrong types, and a table that is too large when unpacked."""
    table = pa.Table.from_pylist([make_vote().to_row()])
    prompt_index = table.schema.get_field_index("prompt")
    two_bytes = [None, pa.py_buffer(bytes(4) + bytes([2, 0, 0, 0])), pa.py_buffer(bytes([255, 254]))]
    files = [
        table,
        table.set_column(prompt_index, "prompt", pa.Array.from_buffers(pa.string(), 1, two_bytes)),
        table.set_column(
            table.schema.get_field_index("time"), "time", pa.array([1], pa.timestamp("s", tz="../../etc/passwd"))
        ),
        pa.table({"prompt": [{"b": 1}]}),
        pa.table({"prompt": pa.nulls(2**20 + 1, pa.string())}),
    ]
    counts = []
    for number, file_table in enumerate(files):
        parquet.write_table(file_table, tmp_path / f"{number}.parquet")
        votes, foreign = _read_votes(tmp_path / f"{number}.parquet")
        counts.append((len(votes), foreign))
    assert counts == [(1, 0), (0, 0), (0, 1), (0, 1), (0, 0)]
    assert "can't decode byte" in caplog.text and "1048577 rows" in caplog.text
