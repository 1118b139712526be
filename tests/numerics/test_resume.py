"""A run that was stopped and went on is the run left alone, bit for bit: metrics, weights, optimizer, controller."""

import hashlib
import json
import subprocess
import sys
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

from rlhf_zoo.runs.record import StageRecord

SIGKILL = -9


def fingerprint(checkpoint: Path) -> dict[str, str]:
    """sha256 of what a checkpoint holds, by file; torch's own files by their tensors (a zip holds dates)."""
    found = {}
    for name in ("model.safetensors", "critic/model.safetensors", "ppo_state.json"):
        found[name] = hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
    for name in ("optimizer.pt", "scheduler.pt"):
        content = hashlib.sha256()
        _absorb(torch.load(checkpoint / name, weights_only=True), content)
        found[name] = content.hexdigest()
    return found


def _absorb(value: Any, content: Any) -> None:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            content.update(repr(key).encode())
            _absorb(value[key], content)
    elif isinstance(value, list | tuple):
        for item in value:
            _absorb(item, content)
    else:
        content.update(value.cpu().numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())


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


def build(directory: Path, **given: Any) -> Any:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 5}
    return make_trainer(
        directory, reward_model=make_reward_model(), reward_funcs=good, ref_model=make_policy(seed=2),
        **settings | given,
    )  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_resumed_from_any_checkpoint_is_the_run_left_alone(tmp_path: Path, variant: str) -> None:
    whole = build(tmp_path / "whole", **VARIANTS[variant])
    whole.train()
    wanted, history = digests(whole), timeless(whole.state.log_history)
    last = fingerprint(tmp_path / "whole" / "checkpoint-5")
    assert len({row["step"] for row in history}) == (1 if "logging_steps" in VARIANTS[variant] else 5)
    # 2 ends a pass over 13 prompts; 3 lies within the second pass.
    for step in {"all at once": (1, 2, 4), "by-length": (2, 3)}.get(variant, (2,)):
        directory = tmp_path / f"from-{step}"
        resumed = build(directory, **VARIANTS[variant])
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert digests(resumed) == wanted, step
        assert timeless(resumed.state.log_history) == history, step
        assert fingerprint(directory / "checkpoint-5") == last, step
        assert resumed.controller == whole.controller
    if variant == "all at once":
        assert len({row["kl_coef"] for row in history if "kl_coef" in row}) == 5


def kill(directory: Path, plan: dict[str, list[list[Any] | None]]) -> Any:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("killed_run.py")), str(directory), json.dumps(plan)],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def same_run(one: Path, other: Path) -> None:
    """The two directories hold the same checkpoints and the same metrics."""
    records = StageRecord(one), StageRecord(other)
    assert [p.name for p in records[0].checkpoints()] == [p.name for p in records[1].checkpoints()] != []
    for mine, theirs in zip(*(record.checkpoints() for record in records), strict=True):
        assert fingerprint(mine) == fingerprint(theirs), mine.name
    rows = [timeless(record.metrics()) for record in records]
    assert rows[0] == rows[1] and rows[0]


def test_a_run_killed_while_sampling_updating_and_saving_is_the_run_left_alone(tmp_path: Path) -> None:
    plan = [["sampling", 1], ["sampling", 4], ["saving", 4], ["update", 5], ["saving", 6], None]
    both = kill(tmp_path, {"alone": [None], "killed": plan})
    assert both["alone"] == [{"status": 0, "complete": [2, 4, 6], "torn": []}]
    told = both["killed"]
    assert [attempt["status"] for attempt in told] == [SIGKILL] * 5 + [0]
    assert [attempt["complete"] for attempt in told] == [[], [2], [2], [2, 4], [2, 4], [2, 4, 6]]
    assert [attempt["torn"] for attempt in told] == [[], [], [4], [], [6], []]
    same_run(tmp_path / "alone", tmp_path / "killed")
