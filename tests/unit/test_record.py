"""The run directory survives kills, and refuses what it cannot go on with."""

import json
import math
import multiprocessing
import os
import signal
import string
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_zoo.errors import ZooError
from rlhf_zoo.fileio import folder_bytes, write_json, write_text
from rlhf_zoo.runs import record
from rlhf_zoo.runs.dataset import DataSource
from rlhf_zoo.runs.record import StageRecord, checkpoint_step, fingerprint, first_difference


def checkpoint(stage: StageRecord, step: int, *, complete: bool = True) -> Path:
    path = stage.checkpoint_path(step)
    (path / "critic").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights")
    (path / "critic" / "model.safetensors").write_bytes(b"critic")
    if complete:
        stage.mark_complete(path)
    return path


# run.json


def test_write_merges_and_read_creates_nothing(tmp_path):
    stage = StageRecord(tmp_path / "runs" / "ppo")
    assert stage.read() == {} and stage.metrics() == [] and stage.checkpoints() == []
    assert stage.last_checkpoint() is None and stage.remove_incomplete_files() == []
    assert not stage.path.exists()
    stage.write(stage="ppo", status="running", parents={"sft": {"repo": "local/x-sft"}})
    created = stage.read()["created"]
    document = stage.write(status="finished")
    assert document == stage.read() == json.loads(stage.run_file.read_text())
    assert document["schema"] == 1 and document["stage"] == "ppo" and document["status"] == "finished"
    assert document["created"] == created
    assert list(stage.path.iterdir()) == [stage.run_file]


def test_read_rejects_malformed_records(tmp_path):
    stage = StageRecord(tmp_path)
    for content, message in [("{", "not valid JSON"), ("[]", "JSON object"), ('{"schema": 2}', "schema 2")]:
        stage.run_file.write_text(content)
        with pytest.raises(ZooError, match=message):
            stage.read()


def test_failed_write_keeps_old_file(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    write_json(path, {"a": 1})

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record.os, "fsync", full)
    with pytest.raises(ZooError, match=r"run\.json could not be written \(No space left on device\)"):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_write_replaces_file_that_another_process_deletes(tmp_path, monkeypatch):
    """As with a vote that is cast again while its first copy is sent and deleted."""
    path, stat = tmp_path / "vote.json", Path.stat

    def deleted_first(self, **options):
        path.unlink(missing_ok=True)
        return stat(self, **options)

    write_text(path, "1")
    monkeypatch.setattr(Path, "exists", lambda self: True)
    monkeypatch.setattr(Path, "stat", deleted_first)
    write_text(path, "2")
    monkeypatch.undo()
    assert path.read_text() == "2"


def test_size_of_folder_leaves_out_file_that_another_thread_deletes(tmp_path, monkeypatch):
    """As the outbox does in the checkpoint that it sends, while training checks the room for the next one."""
    walk = os.walk

    def delete_first(folder):
        for path, folders, names in walk(folder):
            (tmp_path / "sub" / "SENDING").unlink(missing_ok=True)
            yield path, folders, [*names, "SENDING"]

    write_text(tmp_path / "a", "12")
    write_text(tmp_path / "sub" / "b", "345")
    monkeypatch.setattr(os, "walk", delete_first)
    assert folder_bytes(tmp_path) == 5


def test_concurrent_writes_follow_umask_and_keep_it(tmp_path, monkeypatch):
    """It can be read only by setting it, so two readers at once would leave the process with none."""
    real = os.umask

    def slow(mask):
        before = real(mask)
        time.sleep(0.002)
        return before

    old = real(0o027)
    try:
        monkeypatch.setattr(os, "umask", slow)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda k: write_text(tmp_path / f"{k}.txt", "x"), range(40)))
        monkeypatch.undo()
        assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}
        (tmp_path / "0.txt").chmod(0o600)
        write_text(tmp_path / "0.txt", "y")
        assert (tmp_path / "0.txt").stat().st_mode & 0o777 == 0o600, "a file that is replaced keeps its own"
        assert real(0o027) == 0o027
    finally:
        real(old)


def _write_for_ever(path: str) -> None:
    stage = StageRecord(path)
    size = 0
    while True:
        size += 1
        stage.write(payload="x" * (size % 50_000), size=size % 50_000)
        stage.append_metrics({"step": size, "text": "y" * 5_000})


def test_sigkill_leaves_complete_documents(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_write_for_ever, args=(str(tmp_path),))
    process.start()
    stage = StageRecord(tmp_path)
    while len(stage.metrics()) < 20:
        assert process.is_alive()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    document = stage.read()
    assert len(document["payload"]) == document["size"]
    steps = [row["step"] for row in stage.metrics()]
    assert steps == list(range(1, len(steps) + 1))
    stage.remove_incomplete_files()
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "metrics.jsonl"}


def test_cleanup_spares_files_another_thread_is_writing(tmp_path, monkeypatch):
    """The sender of checkpoints writes run.json while the stage that resumes removes what a kill left."""
    stage = StageRecord(tmp_path)
    stage.write(sent=1)
    stranded = tmp_path / ".run.json.killed.tmp"
    stranded.write_text("{")
    writing, tidied, real = threading.Event(), threading.Event(), os.replace

    def slow(source, target):
        writing.set()
        tidied.wait(0.3)
        real(source, target)

    monkeypatch.setattr(record.os, "replace", slow)
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(stage.write, sent=2)
        assert writing.wait(5)
        assert stage.remove_incomplete_files() == [stranded]
        tidied.set()
        assert written.result()["sent"] == 2
    assert stage.read()["sent"] == 2


def test_data_set_loads_while_sender_writes_beside_it(tmp_path, monkeypatch):
    """Its folder holds the record of the run's data, in which the sender notes each commit."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "data"
    (folder / "prompts").mkdir(parents=True)
    (folder / "prompts" / "train.jsonl").write_text('{"prompt": "a"}\n')
    configuration = {"config_name": "prompts", "data_files": [{"split": "train", "path": "prompts/train.jsonl"}]}
    (folder / "README.md").write_text(f"---\n{json.dumps({'configs': [configuration]})}\n---\n")
    writing, read, real, real_bytes = threading.Event(), threading.Event(), os.replace, Path.read_bytes

    def slow(source, target):
        writing.set()
        read.wait(0.3)
        real(source, target)

    def unhurried(path):
        if path.name.endswith(".tmp"):
            time.sleep(0.6)  # by now it has its name
        return real_bytes(path)

    monkeypatch.setattr(record.os, "replace", slow)
    monkeypatch.setattr(Path, "read_bytes", unhurried)
    with ThreadPoolExecutor(1) as pool:
        noted = pool.submit(StageRecord(folder).write, repo={"id": "somewhere"})
        assert writing.wait(5)
        assert DataSource(str(folder), None, {}).load("prompts", "train", columns=["prompt"])["prompt"] == ["a"]
        read.set()
        assert noted.result()["repo"] == {"id": "somewhere"}


# metrics.jsonl


def test_metrics_round_trip_is_strict_json(tmp_path):
    stage = StageRecord(tmp_path)
    stage.append_metrics({"step": 1, "objective/kl": np.float32(0.5), "loss": math.nan, "episodes": np.int64(64)})
    stage.append_metrics({"step": 2, "loss": -math.inf, "time": "then"})
    first, second = stage.metrics()
    assert first.pop("time").endswith("+00:00")
    assert first == {"step": 1, "objective/kl": 0.5, "loss": None, "episodes": 64}
    assert second == {"step": 2, "time": "then", "loss": None}
    assert not {"NaN", "Infinity"} & set(stage.metrics_file.read_text().replace("-", " ").split())


@pytest.mark.parametrize("row", [{}, {"step": None}, {"step": 1.0}, {"step": True}])
def test_append_metrics_rejects_rows_without_integer_step(tmp_path, row):
    with pytest.raises(ValueError, match="integer step"):
        StageRecord(tmp_path).append_metrics(row)
    assert not (tmp_path / "metrics.jsonl").exists()


@given(cut=st.integers(min_value=0), text=st.text(max_size=5))
@settings(deadline=None, max_examples=60)
def test_truncated_last_line_is_dropped_and_overwritten(tmp_path_factory, cut, text):
    stage = StageRecord(tmp_path_factory.mktemp("torn"))
    for step in (1, 2, 3):
        stage.append_metrics({"step": step, "text": text, "time": "t"})
    content = stage.metrics_file.read_bytes()
    content = content[: cut % (len(content) + 1)]
    stage.metrics_file.write_bytes(content)
    # A line is whole without its newline: no proper prefix of a JSON object is a JSON object.
    whole = content.count(b"\n") + content.endswith(b"}")
    assert [row["step"] for row in stage.metrics()] == [1, 2, 3][:whole]
    stage.append_metrics({"step": 9})
    assert [row["step"] for row in stage.metrics()] == [*[1, 2, 3][:whole], 9]
    assert all(json.loads(line) for line in stage.metrics_file.read_text(encoding="utf-8").splitlines() if line)


def test_malformed_line_before_the_last_is_an_error(tmp_path):
    stage = StageRecord(tmp_path)
    stage.metrics_file.write_text('{"step": 1}\nnoise\n{"step": 2}\n')
    with pytest.raises(ZooError, match=r"Line 2 of .*metrics\.jsonl"):
        stage.metrics()


def test_truncate_metrics_prevents_duplicate_rows_after_resuming(tmp_path):
    stage = StageRecord(tmp_path)
    stage.truncate_metrics(0)
    assert not stage.metrics_file.exists()
    for step in range(1, 6):
        stage.append_metrics({"step": step})
    with open(stage.metrics_file, "ab") as file:
        file.write(b'{"step": 6, "lo')
    stage.truncate_metrics(3)
    for step in range(4, 6):
        stage.append_metrics({"step": step})
    assert [row["step"] for row in stage.metrics()] == [1, 2, 3, 4, 5]


# checkpoints


def test_checkpoints_are_complete_and_sorted_by_number(tmp_path):
    stage = StageRecord(tmp_path)
    for step in (10, 9, 100):
        checkpoint(stage, step)
    torn = checkpoint(stage, 200, complete=False)
    (tmp_path / "checkpoint-x").mkdir()
    (tmp_path / "checkpoint-300").write_text("a file")
    assert [path.name for path in stage.checkpoints()] == ["checkpoint-9", "checkpoint-10", "checkpoint-100"]
    assert stage.last_checkpoint() == tmp_path / "checkpoint-100"
    assert stage.remove_incomplete_files() == [torn]
    assert not torn.exists() and (tmp_path / "checkpoint-x").exists() and len(stage.checkpoints()) == 3


def test_complete_marker_is_written_last(tmp_path, monkeypatch):
    stage = StageRecord(tmp_path)
    path = checkpoint(stage, 1, complete=False)
    synced = []
    sync = os.fsync
    monkeypatch.setattr(record.os, "fsync", lambda fd: (synced.append((path / "COMPLETE").exists()), sync(fd)))
    folders = []
    sync_folder = record.sync_folder
    monkeypatch.setattr(record, "sync_folder", lambda folder: (folders.append(folder), sync_folder(folder)))
    stage.mark_complete(path)
    assert {path, path / "critic"} <= set(folders)
    assert (path / "COMPLETE").is_file()
    assert synced[:4] == [False] * 4 and synced[-1] is True
    with pytest.raises(ValueError, match="checkpoint-N"):
        stage.mark_complete(tmp_path)
    assert checkpoint_step("runs/x/checkpoint-40") == 40


def test_clear_removes_only_files_of_the_record(tmp_path):
    stage = StageRecord(tmp_path)
    stage.clear()
    stage.write(stage="ppo")
    stage.append_metrics({"step": 1})
    checkpoint(stage, 1)
    checkpoint(stage, 2, complete=False)
    (tmp_path / "notes.txt").write_text("mine")
    stage.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


# fingerprints

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(string.ascii_lowercase, max_size=3)
SETTINGS = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("xy"), inner)),
)


@given(a=SETTINGS, b=SETTINGS)
@settings(deadline=None)
def test_fingerprints_differ_exactly_when_first_difference_finds_one(a, b):
    key = first_difference(a, b)
    assert (key is None) == (fingerprint(a) == fingerprint(b))
    assert key == first_difference(b, a)


def test_fingerprint_matches_known_values_and_ignores_order():
    assert fingerprint({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"  # sha256 of "{}"
    assert fingerprint({"a": 1.0, "b": (1, 2)}) == fingerprint({"b": [1, 2], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": True}) != fingerprint({"a": "1"})
    assert fingerprint({"a": math.inf}) != fingerprint({"a": None})
    assert fingerprint({"a": Path("x"), "s": {"q", "p"}}) == fingerprint({"a": "x", "s": ["p", "q"]})
    assert first_difference({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}) == "a.c"
    assert first_difference({"a": 1, "b": 2}, {"a": 1}) == "b"
    assert first_difference({"a": None}, {}) == "a"
    with pytest.raises(TypeError, match="object cannot be written as JSON"):
        fingerprint({"a": object()})


def test_check_fingerprint_names_the_changed_setting(tmp_path):
    stage = StageRecord(tmp_path)
    resolved = {"kl_coef": 0.1, "max_grad_norm": math.inf, "model": {"hidden_size": 128}}
    stage.check_fingerprint(resolved, recipe="tiny-world")
    stage.write(stage="ppo", recipe="tiny-world", fingerprint=fingerprint(resolved), resolved=resolved)
    stage.check_fingerprint(dict(reversed(resolved.items())), recipe="tiny-world")
    with pytest.raises(ZooError, match=r"kl_coef = 0\.1, and this one has 0\.3"):
        stage.check_fingerprint({**resolved, "kl_coef": 0.3})
    with pytest.raises(
        ZooError, match=r"\(`rlhf-zoo ppo tiny-world --output_dir \S+ --restart`, with your other flags, leaves the"
    ):
        stage.check_fingerprint({**resolved, "kl_coef": 0.3}, recipe="tiny-world")
    spaced = StageRecord(tmp_path / "my run" / "ppo")
    spaced.write(stage="ppo", recipe="tiny-world", fingerprint=fingerprint(resolved), resolved=resolved)
    with pytest.raises(ZooError, match=r"--output_dir '\S+/my run' --restart`"):
        spaced.check_fingerprint({**resolved, "kl_coef": 0.3}, recipe="tiny-world")
    with pytest.raises(ZooError, match=rf"this one has \"{'x' * 76}\.\.\.: "):
        stage.check_fingerprint({**resolved, "kl_coef": "x" * 200})
    stage.write(fingerprint=fingerprint({"kinds": ["x" * 90, "a"]}), resolved={"kinds": ["x" * 90, "a"]})
    with pytest.raises(ZooError, match=r'kinds = \.\.\.x+", "a"\], and this one has \.\.\.x+", "b"\]: '):
        stage.check_fingerprint({"kinds": ["x" * 90, "b"]})
    stage.write(fingerprint=fingerprint(resolved), resolved=resolved)
    with pytest.raises(ZooError, match=r"model\.hidden_size = 128, and this one has nothing.*--restart"):
        stage.check_fingerprint({**resolved, "model": {}})
    with pytest.raises(ZooError, match=r"recipe 'tiny-world', not of 'product-remarks'.*--restart"):
        stage.check_fingerprint(resolved, recipe="product-remarks")
    stage.write(fingerprint="0" * 64)
    with pytest.raises(ZooError, match="has a fingerprint that does not match its settings"):
        stage.check_fingerprint(resolved)
