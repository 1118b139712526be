"""A resumed run equals an uninterrupted run bit for bit: metrics, weights, optimizer, controller."""

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_fixture import (
    digests,
    good,
    make_policy,
    make_reward_model,
    make_trainer,
    prompt_rows,
    timeless,
)
from warm import PYTHON

from rlhf_zoo.runs.record import StageRecord

SIGKILL = -9


def fingerprint(checkpoint: Path) -> dict[str, str]:
    """Hashes each file of a checkpoint; for torch's files it hashes the tensors, because the zip holds dates."""
    hashes = {}
    for name in ("model.safetensors", "critic/model.safetensors", "ppo_state.json"):
        hashes[name] = hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
    for name in ("optimizer.pt", "scheduler.pt"):
        digest = hashlib.sha256()
        _add_to_hash(torch.load(checkpoint / name, weights_only=True), digest)
        hashes[name] = digest.hexdigest()
    return hashes


def _add_to_hash(value: Any, digest: Any) -> None:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(repr(key).encode())
            _add_to_hash(value[key], digest)
    elif isinstance(value, list | tuple):
        for item in value:
            _add_to_hash(item, digest)
    else:
        digest.update(value.cpu().numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all at once": {
        "kl_target": 0.3, "kl_horizon": 32, "kl_coef": 0.2, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4, "train_dataset": prompt_rows(13), "whiten_rewards": True,
        "max_tokens_per_micro_batch": 40,
        "eval_dataset": prompt_rows(8), "eval_strategy": "steps", "eval_steps": 1,
    },
    "by-length": {"train_dataset": prompt_rows(13), "train_sampling_strategy": "group_by_length"},
    "log-every-3": {"logging_steps": 3, "kl_target": 0.3, "kl_horizon": 32, "padding_free": True},
}  # fmt: skip


def build(directory: Path, **overrides: Any) -> Any:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 5}
    return make_trainer(
        directory, reward_model=make_reward_model(), reward_funcs=good, ref_model=make_policy(seed=2),
        **settings | overrides,
    )  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_resumed_run_equals_uninterrupted_run(tmp_path: Path, variant: str) -> None:
    uninterrupted = build(tmp_path / "whole", **VARIANTS[variant])
    uninterrupted.train()
    expected, history = digests(uninterrupted), timeless(uninterrupted.state.log_history)
    last = fingerprint(tmp_path / "whole" / "checkpoint-5")
    assert len({row["step"] for row in history}) == (1 if "logging_steps" in VARIANTS[variant] else 5)
    # Update 2 ends a pass over 13 prompts; update 3 is within the second pass.
    for step in {"all at once": (1, 2, 4), "by-length": (2, 3)}.get(variant, (2,)):
        directory = tmp_path / f"from-{step}"
        resumed = build(directory, **VARIANTS[variant])
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert digests(resumed) == expected, step
        assert timeless(resumed.state.log_history) == history, step
        assert fingerprint(directory / "checkpoint-5") == last, step
        assert resumed.controller == uninterrupted.controller
    if variant == "all at once":
        assert len({row["kl_coef"] for row in history if "kl_coef" in row}) == 5


def run_attempts(directory: Path, plan: dict[str, list[list[Any] | None]]) -> Any:
    process = subprocess.run(
        [*PYTHON, str(Path(__file__).with_name("killed_run.py")), str(directory), json.dumps(plan)],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def assert_same_run(first: Path, second: Path) -> None:
    """Checks that two directories have the same checkpoints and metrics."""
    records = StageRecord(first), StageRecord(second)
    assert [p.name for p in records[0].checkpoints()] == [p.name for p in records[1].checkpoints()] != []
    for left, right in zip(*(record.checkpoints() for record in records), strict=True):
        assert fingerprint(left) == fingerprint(right), left.name
    rows = [timeless(record.metrics()) for record in records]
    assert rows[0] == rows[1] and rows[0]


def test_killed_and_resumed_run_equals_uninterrupted_run(tmp_path: Path) -> None:
    plan = [["sampling", 1], ["sampling", 4], ["saving", 4], ["update", 5], ["saving", 6], None]
    attempts = run_attempts(tmp_path, {"alone": [None], "killed": plan})
    assert attempts["alone"] == [{"status": 0, "complete": [2, 4, 6], "incomplete": []}]
    killed = attempts["killed"]
    assert [attempt["status"] for attempt in killed] == [SIGKILL] * 5 + [0]
    assert [attempt["complete"] for attempt in killed] == [[], [2], [2], [2, 4], [2, 4], [2, 4, 6]]
    assert [attempt["incomplete"] for attempt in killed] == [[], [], [4], [], [6], []]
    assert_same_run(tmp_path / "alone", tmp_path / "killed")
