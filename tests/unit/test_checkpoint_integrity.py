"""Damaged checkpoints are neither loaded, resumed nor published, and the error names the file."""

import hashlib
import json
import logging
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from toy_run import make_context, make_recipe, save_start
from trainer_fixture import make_policy

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.connect import DEFAULT_HUB
from rlhf_zoo.modeling import integrity as wholeness
from rlhf_zoo.modeling.integrity import check_integrity, weights_digest
from rlhf_zoo.modeling.models import load_causal, load_classifier
from rlhf_zoo.pipeline import run_recipe as pipeline
from rlhf_zoo.pipeline.inspect.trace import find_traced_policy
from rlhf_zoo.pipeline.stages import ppo, reward
from rlhf_zoo.pipeline.stages.callbacks import StageCallback
from rlhf_zoo.runs.context import RunContext
from rlhf_zoo.runs.metrics_file import without_times
from rlhf_zoo.runs.recipe import Recipe
from rlhf_zoo.runs.record import COMPLETE, StageRecord, fingerprint

pytestmark = [pytest.mark.attack, pytest.mark.usefixtures("quick_plots")]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 7)


def flip_bit(path: Path) -> None:
    """Flips one bit in the middle of the file."""
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def save_checkpoint(stage: Path, step: int) -> Path:
    """A checkpoint as training leaves it, with what is added later."""
    path = StageRecord(stage).checkpoint_path(step)
    make_policy(seed=step).save_pretrained(path)
    torch.save({"state": torch.zeros(9)}, path / "optimizer.pt")
    (path / "critic").mkdir()
    shutil.copy(path / "model.safetensors", path / "critic" / "model.safetensors")
    StageRecord(stage).mark_complete(path)
    (path / "published.json").write_text("{}")
    (path / "merged").mkdir()
    return path


def test_complete_lists_every_file_and_hashes_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    real = hashlib.file_digest
    monkeypatch.setattr(
        wholeness.hashlib, "file_digest", lambda file, kind: (read.append(file.name), real(file, kind))[1]
    )
    path = save_checkpoint(tmp_path, 4)
    document = json.loads((path / COMPLETE).read_text())
    names = {"config.json", "generation_config.json", "model.safetensors", "optimizer.pt", "critic/model.safetensors"}
    assert set(document["files"]) == names and len(read) == len(names)
    for name in names:
        content = (path / name).read_bytes()
        assert document["files"][name] == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    for _ in range(3):
        check_integrity(path, for_resuming=True)
        load_causal(path)
    assert len(read) == len(names), "a file is read again only when it has changed"
    (path / "optimizer.pt").unlink()
    check_integrity(path)  # a model is loaded without it
    with pytest.raises(ZooError, match=r"optimizer\.pt cannot be read \(No such file or directory\)"):
        check_integrity(path, for_resuming=True)


@pytest.mark.parametrize(
    ("harm", "name"),
    [(truncate, "model.safetensors"), (flip_bit, "critic/model.safetensors"), (flip_bit, "config.json")],
)
def test_damaged_file_is_named_with_last_intact_checkpoint(tmp_path: Path, harm: Any, name: str) -> None:
    whole, last, path = (save_checkpoint(tmp_path / "ppo", step) for step in (5, 10, 100))
    flip_bit(last / "model.safetensors")
    harm(path / name)
    message = rf"^{re.escape(str(path / name))} has .*; {re.escape(str(whole))} is intact\.$"
    for use in (
        lambda: check_integrity(path),
        lambda: load_causal(path),
        lambda: load_classifier(path),
    ):
        with pytest.raises(ZooError, match=message):
            use()


def test_damaged_complete_file_raises_readable_error(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "ppo", 4)
    template = '{"files": {"%s": {"size": %s, "sha256": "x"}}}'
    nested = '{"files": ' + "[" * 10**5
    for content in (
        "",
        "{}",
        "x",
        '{"files": 5}',
        nested,
        template % ("a", "1e999"),
        template % ("a\\u0000b", 1),
        template % ("\\ud800", 1),
    ):
        (path / COMPLETE).write_text(content)
        with pytest.raises(ZooError, match=r"COMPLETE is damaged|cannot be read"):
            check_integrity(path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_recipe(tmp_path)
    save_start(tmp_path)
    return tmp_path


def test_failed_restart_keeps_earlier_run(folder: Path) -> None:
    assert ppo.run(make_context(folder))
    stage = folder / "run" / "ppo"
    before = {path: path.read_bytes() for path in stage.rglob("*") if path.is_file()}
    again = make_context(folder, use_peft="true", lora_target_modules="bogus")
    with pytest.raises(ZooError, match="The adapter does not fit the policy"):
        ppo.run(replace(again, restart=True))
    assert {path: path.read_bytes() for path in stage.rglob("*") if path.is_file()} == before
    assert ppo.run(replace(make_context(folder, max_steps="1"), restart=True))
    assert [path.name for path in make_context(folder).record("ppo").checkpoints()] == ["checkpoint-1"]


def test_run_resumes_from_last_intact_checkpoint(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    context = make_context(folder)
    assert ppo.run(context)
    record = context.record("ppo")
    rows = [*map(without_times, record.metrics())]
    weights = (record.checkpoint_path(3) / "model.safetensors").read_bytes()
    record.write(status="interrupted")
    shutil.rmtree(record.checkpoint_path(3))
    truncate(record.checkpoint_path(2) / "optimizer.pt")
    with caplog.at_level(logging.WARNING):
        assert ppo.run(context)
    (message,) = [log.getMessage() for log in caplog.records if "checkpoint-2" in log.getMessage()]
    assert message.startswith(str(record.checkpoint_path(2) / "optimizer.pt"))
    assert message.endswith("damaged-checkpoint-*, and training resumes from checkpoint-1.")
    assert (record.path / "damaged-checkpoint-2" / "model.safetensors").is_file()
    assert [path.name for path in record.checkpoints()] == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert (record.checkpoint_path(3) / "model.safetensors").read_bytes() == weights
    assert [*map(without_times, record.metrics())] == rows
    # Neither is it traced, nor evaluated.
    flip_bit(record.checkpoint_path(3) / "tokenizer.json")
    for use in (lambda: find_traced_policy(str(folder / "run")), lambda: context.checkpoint("ppo")):
        with pytest.raises(
            ZooError, match=r"checkpoint-3/tokenizer\.json has a different sha256.*checkpoint-2 is intact"
        ):
            use()
    record.clear()
    assert not any(record.path.glob("*checkpoint-*"))


def forbid_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        pytest.fail("it trained first")

    monkeypatch.setattr(StageCallback, "on_train_begin", refused)


def test_missing_checkpoint_of_finished_stage_fails_before_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_training(monkeypatch)
    context = make_context(folder)
    for stage in ("sft", "reward"):
        resolved = context.settings(stage).resolved
        context.record(stage).write(
            chosen={"step": 4, "rule": "last"}, resolved=resolved, fingerprint=fingerprint(resolved)
        )
    sft = context.record("sft")
    # Another checkpoint of the stage does not take its place.
    sft.checkpoint_path(4).rename(sft.checkpoint_path(2))
    message = (
        f"{sft.checkpoint_path(4)}, which the finished stage sft chose, is missing and cannot be loaded from "
        r"local/toy-sft@step-000004 \(.*\): restore it, or train it again with "
        r"`rlhf-zoo sft .*toy --output_dir .*run --restart` .*$"
    )
    for train in (
        lambda: pipeline.run(context, None),
        lambda: pipeline.run_stage(context, "reward"),
        lambda: pipeline.run_stage(context, "ppo"),
    ):
        with pytest.raises(ZooError, match=message):
            train()
    assert sft.chosen_checkpoint() is None


@pytest.mark.parametrize(
    ("command", "called"),
    [("rlhf-zoo run my/toy --hub local", "my/toy"), ("rlhf-zoo ppo 'my toy'", "'my toy'"), (None, "toy")],
)
def test_stage_command_names_recipe_of_recorded_command(tmp_path: Path, command: str | None, called: str) -> None:
    record = StageRecord(tmp_path / "run" / "ppo")
    record.write(stage="ppo", **({} if command is None else {"command": command}))
    sent = RunContext(
        recipe=Recipe("toy", tmp_path / "run", {}, {}), directory=tmp_path / "run", hub=DEFAULT_HUB,
        namespace="local", publish=True,
    )  # fmt: skip
    words = f"rlhf-zoo ppo {called} --output_dir {tmp_path / 'run'} --restart"
    assert sent.stage_command("ppo", "--restart") == words
    variant = replace(sent, directory=tmp_path / "variant", base=tmp_path / "run", own_stages=("eval",))
    assert variant.stage_command("ppo", "--restart") == words, "the variant reuses the stage of its base"


def test_missing_checkpoint_is_restored_from_hub(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import huggingface_hub

    context = make_context(folder)
    record = context.record("sft")
    published = folder / "snapshots" / ("a" * 40)
    chosen = record.checkpoint_path(4)
    shutil.copytree(chosen, published)
    (published / COMPLETE).unlink()
    (published / "recipe.json").write_text(json.dumps({"sft": 1}))
    record.write(chosen={"step": 4, "rule": "last"})
    weights = (chosen / "model.safetensors").read_bytes()
    shutil.rmtree(chosen)
    requests = []
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda repo, revision, **_: (requests.append((repo, revision)), str(published))[1],
    )
    context.restore_chosen_checkpoint("sft")
    context.restore_chosen_checkpoint("sft")
    assert requests == [("local/toy-sft", "step-000004")]
    checkpoint = context.checkpoint("sft")
    assert (checkpoint.path / "model.safetensors").read_bytes() == weights
    assert (checkpoint.lineage["repo"], checkpoint.lineage["commit"]) == ("local/toy-sft", "a" * 40)
    shutil.rmtree(chosen)
    (published / "recipe.json").write_text(json.dumps({"sft": 2}))
    with pytest.raises(ZooError, match=r"missing, and local/toy-sft@step-000004 belongs to another run: "):
        context.restore_chosen_checkpoint("sft")


def test_stage_rejects_recipe_edited_after_sft(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_training(monkeypatch)
    context = make_context(folder)
    before = context.settings("sft").resolved
    assert before["recipe"]["seed"] == 1
    context.record("sft").write(resolved=before)
    context.check_policy_keys_unchanged()
    path = folder / "toy" / "recipe.yaml"
    keys = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**keys, "description": "Another.", "evaluation": {"prompts": 5}}))
    make_context(folder).check_policy_keys_unchanged()
    path.write_text(yaml.safe_dump({**keys, "tokenizer": {"vocab_size": 300}}))
    for run in (reward.run, ppo.run):
        with pytest.raises(ZooError) as caught:
            run(make_context(folder))
        assert str(caught.value) == (
            f"tokenizer in {path} has changed since the policy in {folder / 'run' / 'sft'} was trained: restore it, "
            "pass the earlier value by --tokenizer, or choose another --output_dir."
        )
    assert not (folder / "run" / "ppo").exists()


def test_settings_reject_zero_max_steps(folder: Path) -> None:
    for steps in ("0", 0):
        with pytest.raises(ZooError, match="max_steps of the stage ppo is 0"):
            make_context(folder, max_steps=steps).settings("ppo")


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_checkpoint_with_weights_of_another_run_is_rejected(stage: str, folder: Path) -> None:
    """The checkpoint is intact and well named: only run.json knows the weights of the finished stage."""
    context = make_context(folder)
    path = context.record(stage).checkpoint_path(4)
    context.record(stage).write(weights=weights_digest(path))
    assert context.checkpoint(stage).path == path
    tensors = load_file(path / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    context.record(stage).mark_complete(path)  # as in the run that it came from
    with pytest.raises(ZooError, match=rf"recorded at the end of .*`rlhf-zoo {stage} .* --output_dir .*run --restart`"):
        context.checkpoint(stage)
    assert context.checkpoint(stage, step=4).path == path, "asked for by its step"
    context.record(stage).write(resolved={"push_dtype": "bfloat16"})
    assert context.checkpoint(stage).path == path, "it may have been restored, rounded"
