"""Two processes compute what one does: the same completions, metrics and weights up to the order of a sum.

Run as a script by torch.distributed it is one of those processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def train(directory: Path) -> None:
    """Trains in `directory` and leaves weights.pt and log.json there, written by the first process."""
    import torch
    from trainer_fixture import make_reward_model, make_trainer, prompt_rows, snapshot, timeless

    processes = int(os.environ["WORLD_SIZE"])
    trainer = make_trainer(
        directory, max_steps=4, per_device_train_batch_size=4 // processes, per_device_eval_batch_size=4 // processes,
        num_mini_batches=1, optim="sgd", learning_rate=0.2, critic_learning_rate=0.2, reward_model=make_reward_model(),
        kl_target=0.5, kl_horizon=32, train_dataset=prompt_rows(24), eval_dataset=prompt_rows(7),
        eval_strategy="steps", eval_steps=2, whiten_rewards=True, ddp_find_unused_parameters=False,
    )  # fmt: skip
    trainer.train()
    if trainer.is_world_process_zero():
        torch.save(snapshot(trainer), directory / "weights.pt")
        rows = [{name: float(value) for name, value in row.items()} for row in timeless(trainer.state.log_history)]
        (directory / "log.json").write_text(json.dumps(rows))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.full
def test_two_processes_are_one(tmp_path: Path) -> None:
    import torch
    from trainer_fixture import distance

    for n in ("1", "2"):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", n]
        done = subprocess.run(
            [*launch, __file__, str(tmp_path / n)], capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr
    one, two = (torch.load(tmp_path / n / "weights.pt", weights_only=True) for n in "12")
    assert distance(one, two) < 1e-6
    logs = [json.loads((tmp_path / n / "log.json").read_text()) for n in "12"]
    assert [row.keys() for row in logs[0]] == [row.keys() for row in logs[1]] and len(logs[0]) == 6
    for mine, theirs in zip(*logs, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
    train(Path(sys.argv[1]))
