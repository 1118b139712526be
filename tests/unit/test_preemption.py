"""Runs on machines that are taken back, or too small: room on the disk, and reports that go on."""

import json
import os
import shutil
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from thread_hub import send_all
from toy_run import make_context, make_recipe, save_start
from trainer_fixture import SAVED, digests, make_policy, make_trainer, trained, updates_of
from transformers import AutoModelForCausalLM

from rlhf_zoo.cli.main import cli
from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.connect import Hub
from rlhf_zoo.hub.client.publish import folders_have_same_weights
from rlhf_zoo.modeling.integrity import check_integrity
from rlhf_zoo.pipeline.inspect import reproduce
from rlhf_zoo.pipeline.inspect.differences import compare_files, compare_weights
from rlhf_zoo.pipeline.stages import ppo
from rlhf_zoo.pipeline.stages.callbacks import NoRoom, StageCallback
from rlhf_zoo.pipeline.stages.interrupt import Interruptible
from rlhf_zoo.pipeline.stages.reporting import report_to_one_run
from rlhf_zoo.ppo.config import PPOConfig
from rlhf_zoo.ppo.key_checks import has_reference
from rlhf_zoo.publishing.adapters import file_overrides
from rlhf_zoo.publishing.cards.card import make_card
from rlhf_zoo.publishing.sender import Sender
from rlhf_zoo.runs.context import RunContext
from rlhf_zoo.runs.record import StageRecord

pytestmark = pytest.mark.usefixtures("quick_plots")

SENT_LITTLE = {
    "max_steps": 5, "push_steps": 2, "push_dtype": "bfloat16", "push_critic": False, "save_optimizer_limit": 2,
}  # fmt: skip
Usage = namedtuple("Usage", "total used free")


def test_checkpoint_that_does_not_fit_on_disk_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one by the weights that train, the others by the one before; what is saved stays as it is."""
    record, rooms = StageRecord(tmp_path), [10**9]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, rooms.pop() if len(rooms) > 1 else rooms[0]))

    def train() -> None:
        callback = StageCallback(record, Interruptible("it"))
        make_trainer(tmp_path, callbacks=[callback], **SAVED).train()

    rooms[:] = [1000]
    with pytest.raises(NoRoom, match=r"has 0.0 MiB free, but a checkpoint takes 0.\d"):
        train()
    assert not record.checkpoints()
    rooms[:] = [1000, 10**9, 10**9]  # the start, the first checkpoint, the second
    with pytest.raises(NoRoom):
        train()
    assert [path.name for path in record.checkpoints()] == ["checkpoint-1"]
    assert not (tmp_path / "checkpoint-2").exists()


def test_reports_resume_under_the_run_name(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    wandb = SimpleNamespace(run=object(), finish=lambda: ended.append(os.environ["WANDB_RUN_ID"]))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    args = SimpleNamespace(report_to=["wandb", "trackio"], run_name=None, output_dir="runs/x/sft",
                           project="huggingface")  # fmt: skip
    with report_to_one_run(args, "tiny-world-sft-1a2b", project="tiny-world"):
        assert (os.environ["WANDB_RUN_ID"], os.environ["WANDB_RESUME"]) == ("tiny-world-sft-1a2b", "allow")
    assert (args.project, args.run_name) == ("tiny-world", "tiny-world-sft-1a2b") and ended == ["tiny-world-sft-1a2b"]
    assert "WANDB_RUN_ID" not in os.environ and "WANDB_RESUME" not in os.environ
    named = SimpleNamespace(report_to=["trackio"], run_name="mine", output_dir="runs/x/sft", project="own")
    monkeypatch.setenv("WANDB_RUN_ID", "of-the-user")
    with report_to_one_run(named, "tiny-world-sft-1a2b", project="tiny-world"):
        assert (named.project, named.run_name) == ("own", "mine") and os.environ["WANDB_RUN_ID"] == "of-the-user"
    assert len(ended) == 1


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    make_recipe(tmp_path, ppo=SENT_LITTLE)
    save_start(tmp_path)
    return tmp_path


def published(folder: Path, hub: Any, **fields: Any) -> RunContext:
    return replace(make_context(folder), hub=Hub("other", hub.url, "a test"), publish=True, **fields)


def test_push_steps_and_push_dtype_do_not_change_training(folder: Path, thread_hub: Any) -> None:
    """Every second step and the end, in half the bytes, without the critic; the disk keeps all but old optimizers."""
    stopped = published(folder, thread_hub, stop_after=3)
    assert ppo.run(stopped)
    sender = Sender(stopped, stages=("sft", "reward", "ppo"))
    send_all(sender)
    refs = thread_hub.api().list_repo_refs
    assert [tag.name for tag in refs("local/toy-ppo").tags] == ["step-000002"]
    record = stopped.record("ppo")
    kept = [(path / "optimizer.pt").is_file() for path in record.checkpoints()]
    assert kept == [False, True, True]
    for path in record.checkpoints():
        check_integrity(path)  # as a model; only the newest two can be gone on from

    assert ppo.run(make_context(folder))
    send_all(sender)
    assert sorted(tag.name for tag in refs("local/toy-ppo").tags) == [
        "step-000002",
        "step-000004",
        "step-000005",
    ]
    whole = folder / "whole"
    whole.mkdir()
    (folder / "toy").rename(whole / "toy")
    save_start(whole)
    assert ppo.run(make_context(whole))
    last = record.checkpoint_path(5)
    ours, undisturbed = (load_file(path / "model.safetensors") for path in (last, whole / "run/ppo/checkpoint-5"))
    assert all(torch.equal(ours[name], undisturbed[name]) and ours[name].dtype == torch.float32 for name in ours)

    pulled = Path(thread_hub.api().snapshot_download("local/toy-ppo"))
    assert not (pulled / "critic").exists() and (last / "critic").exists()
    sent = load_file(pulled / "model.safetensors")
    assert sent.keys() == ours.keys() and all(torch.equal(sent[name], ours[name].bfloat16()) for name in sent)
    assert AutoModelForCausalLM.from_pretrained(pulled).dtype == torch.bfloat16
    said = (pulled / "README.md").read_text()
    assert "The published weights are rounded to bfloat16. All figures here were measured before" in said
    assert json.loads((pulled / "rlhf_card.json").read_text())["dtype"] == "bfloat16" and "subfolder" not in said
    altered = file_overrides(stopped, record, last, folder / "altered")
    with reproduce._as_published(stopped, record, last) as made:
        assert not any(row["differing"] or row["problem"] for row in compare_weights(pulled, made))
        assert compare_files(pulled, made) == []
    assert folders_have_same_weights(pulled, last, altered) and not folders_have_same_weights(pulled, last)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"push_steps": 3, "save_steps": 2},
            r"push_steps of the stage ppo is 3, but checkpoints are saved by steps, ev",
        ),
        ({"push_steps": 2, "save_strategy": "epoch"}, r"saved by epoch: set push_steps to a multiple of save_steps"),
        ({"push_optimizer": True}, r"the state that resuming needs, but push_dtype omits a part of it: set only one"),
        ({"push_dtype": "int8"}, r"--ppo\.push_dtype is 'int8', but it takes one of bfloat16\."),
    ],
)
def test_bad_push_settings_are_rejected_before_training(folder: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ZooError, match=message):
        make_context(folder, **{name: str(value) for name, value in keys.items()}).settings("ppo")


def test_resume_auto_cannot_be_combined_with_restart(tmp_path: Path) -> None:
    """A job that is begun again by its scheduler gives the same command each time."""
    flags = [
        "run",
        "tiny-world",
        "--output_dir",
        str(tmp_path / "run"),
        "--hub",
        "http://127.0.0.1:9",
        "--resume",
        "auto",
    ]
    refused = CliRunner().invoke(cli, [*flags, "--restart"])
    assert isinstance(refused.exception, ZooError) and "--restart discards it: pass only one." in str(refused.exception)
    assert CliRunner().invoke(cli, [*flags[:-1], "never"]).exit_code == 2
    assert "--resume [auto]" in CliRunner().invoke(cli, ["sft", "--help"]).output


def test_training_without_reference_changes_only_kl_metrics(tmp_path: Path) -> None:
    """β = 0: the same weights, no second copy of the policy, and no figure that nobody measured."""
    with_one, without = (
        trained(tmp_path / str(held), kl_coef=0.0, reference=held or None, max_steps=3) for held in (True, False)
    )
    assert make_trainer(tmp_path / "given", kl_coef=0.0, ref_model=make_policy()).reference is not None
    assert without.reference is None and with_one.reference.separate_model is not None
    assert digests(without.policy) == digests(with_one.policy)
    logged = [updates_of(trainer) for trainer in (with_one, without)]
    assert len(logged[1]) == 3
    for row, same in zip(*logged, strict=True):
        assert row.keys() - same.keys() == {"objective/kl"}
        apart = {name for name in same if row[name] != same[name]}
        assert not apart, apart


@pytest.mark.parametrize(
    "keys", [{}, {"kl_target": 6.0}, {"kl_in": "loss", "kl_estimator": "k2"}, {"metric_for_best_model": "objective/kl"}]
)
def test_has_reference_is_true_when_settings_need_one(tmp_path: Path, keys: dict[str, Any]) -> None:
    given = PPOConfig(output_dir=str(tmp_path), use_cpu=True, **{"kl_coef": 0.0, **keys})
    assert has_reference(given, has_ref_model=False) is bool(keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kl_coef": 0.05}, r"reference is false, but kl_coef is 0.05, which needs a reference: set kl_coef to 0"),
        ({"kl_coef": 0.0, "kl_in": "loss", "kl_estimator": "k2"}, r"but kl_in 'loss' needs a reference"),
        ({"kl_coef": 0.0, "ref_load_in_8bit": True}, r"ref_load_in_8bit configures a reference: remove one of them"),
        ({"kl_coef": 0.0, "metric_for_best_model": "objective/kl"}, r"metric_for_best_model cannot be objective/kl"),
    ],
)
def test_config_rejects_leaving_out_a_needed_reference(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ZooError, match=message):
        PPOConfig(output_dir=str(tmp_path), reference=False, use_cpu=True, **keys)


def test_card_says_kl_was_not_measured_in_training(tmp_path: Path) -> None:
    record = StageRecord(tmp_path / "ppo")
    record.write(stage="ppo", recipe="toy", status="finished", resolved={"kl_coef": 0, "reference": False}, parents={})
    for step in (1, 2):
        record.append_metrics({"step": step, "objective/score": 0.5, "kl_coef": 0.0})
    said = make_card(record.path).read_text()
    assert "**It was not measured during training**: β was 0 and the run had no reference" in said
