"""An SFT or reward stage that was interrupted between two log lines logs what an uninterrupted one logs."""

import hashlib
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from toy_run import make_context, make_recipe, save_stage, trained_policy
from trainer_fixture import make_tokenizer

from rlhf_zoo.record import timeless
from rlhf_zoo.runs.context import RunContext
from rlhf_zoo.stages import reward, sft
from rlhf_zoo.stages.callbacks import StageCallback
from rlhf_zoo.stages.interrupt import Stopped

pytestmark = pytest.mark.attack

COMMON = {
    "per_device_train_batch_size": 2, "max_steps": 8, "logging_steps": 5, "save_strategy": "steps", "save_steps": 4,
    "learning_rate": 1e-3, "use_cpu": True, "eval_strategy": "no",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    make_recipe(tmp_path)
    base = save_stage(tmp_path, "sft", trained_policy(), make_tokenizer())
    base.rename(tmp_path / "base")
    (tmp_path / "run").rename(tmp_path / "not-a-run")
    return tmp_path


def _sft(folder: Path, name: str) -> tuple[Callable[[RunContext], bool], RunContext]:
    own = {**COMMON, "model_name_or_path": str(folder / "base"), "dataset_test_split": None, "max_length": 16}
    return sft.run, replace(make_context(folder), directory=folder / name, flags={"sft": own})


def _reward(folder: Path, name: str) -> tuple[Callable[[RunContext], bool], RunContext]:
    save_stage(folder, "sft", trained_policy(), make_tokenizer())
    (folder / "run").rename(folder / name)
    own = {**COMMON, "dataset_test_split": None, "score_samples": 4, "max_length": 16}
    return reward.run, replace(make_context(folder), directory=folder / name, flags={"reward": own})


def _rows(context: RunContext, stage: str) -> list[dict[str, Any]]:
    return [*map(timeless, context.record(stage).metrics())]


def _weights(context: RunContext, stage: str) -> str:
    path = context.record(stage).checkpoint_path(8) / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(("stage", "start"), [("sft", _sft), ("reward", _reward)])
def test_an_interruption_leaves_no_trace_in_the_metrics(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stage: str, start: Callable[..., Any]
) -> None:
    run, whole = start(folder, "whole")
    assert run(whole)
    run, parts = start(folder, "parts")

    def interrupt(self: StageCallback, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in (2, 5):  # before step 3, and, resumed, before step 6
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as interrupted:
        interrupted.setattr(StageCallback, "on_step_begin", interrupt)
        for step in (3, 6):
            with pytest.raises(Stopped):
                run(parts)
            assert parts.record(stage).last_checkpoint() == parts.record(stage).checkpoint_path(step)
    assert [row["step"] for row in _rows(parts, stage)] == [5], "no row is of the interruption"
    assert run(parts)
    assert _weights(parts, stage) == _weights(whole, stage)
    assert _rows(parts, stage) == _rows(whole, stage)
    metrics = {"sft": {"entropy", "mean_token_accuracy"}, "reward": {"accuracy", "margin", "mean_reward"}}
    assert [row["step"] for row in _rows(whole, stage)] == [5, 8]
    assert _rows(whole, stage)[0].keys() >= {"loss", "grad_norm", *metrics[stage]}
