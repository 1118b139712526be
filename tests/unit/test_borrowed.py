"""Runs on machines that are taken back, or too small: room on the disk, and reports that go on."""

from __future__ import annotations

import os
import shutil
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
from trainer_fixture import SAVED, make_trainer

from rlhf_zoo.record import StageRecord
from rlhf_zoo.stages.callbacks import StageCallback
from rlhf_zoo.stages.interrupt import Interruptible
from rlhf_zoo.stages.reporting import one_run
from rlhf_zoo.stages.room import NoRoom

Usage = namedtuple("Usage", "total used free")


def test_a_checkpoint_that_would_not_fit_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one by the weights that train, the others by the one before; what is saved stays as it is."""
    record, rooms = StageRecord(tmp_path), [10**9]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, rooms.pop() if len(rooms) > 1 else rooms[0]))

    def train() -> None:
        callback = StageCallback(record, Interruptible("it"))
        make_trainer(tmp_path, callbacks=[callback], **SAVED).train()

    rooms[:] = [1000]
    with pytest.raises(NoRoom, match=r"has 0.0 MiB left and a checkpoint takes 0.\d: make room, and the same command"):
        train()
    assert not record.checkpoints()
    rooms[:] = [1000, 10**9, 10**9]  # the start, the first checkpoint, the second
    with pytest.raises(NoRoom):
        train()
    assert [path.name for path in record.checkpoints()] == ["checkpoint-1"]
    assert not (tmp_path / "checkpoint-2").exists()


def test_reports_go_on_under_the_name_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    wandb = SimpleNamespace(run=object(), finish=lambda: ended.append(os.environ["WANDB_RUN_ID"]))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    args = SimpleNamespace(report_to=["wandb", "trackio"], run_name=None, output_dir="runs/x/sft")
    with one_run(args, "tiny-world-sft-1a2b"):
        assert (os.environ["WANDB_RUN_ID"], os.environ["WANDB_RESUME"]) == ("tiny-world-sft-1a2b", "allow")
    assert args.run_name == "tiny-world-sft-1a2b" and ended == ["tiny-world-sft-1a2b"]
    assert "WANDB_RUN_ID" not in os.environ and "WANDB_RESUME" not in os.environ
    named = SimpleNamespace(report_to=["trackio"], run_name="mine", output_dir="runs/x/sft")
    monkeypatch.setenv("WANDB_RUN_ID", "of-the-user")
    with one_run(named, "tiny-world-sft-1a2b"):
        assert named.run_name == "mine" and os.environ["WANDB_RUN_ID"] == "of-the-user"
    assert len(ended) == 1
