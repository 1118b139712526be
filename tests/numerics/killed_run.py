"""Starts a PPO run, kills it with SIGKILL, and resumes it as a stage does, until it may finish.

    python killed_run.py DIRECTORY '{"alone": [null], "killed": [["sampling", 3], ["saving", 5], null]}'

Each attempt is a fork of this process, which has imported everything but computed nothing. The JSON maps a folder to
its attempts: each is the phase and the update in which the attempt kills itself, or null if it may finish. The last
line of the output is JSON: the exit code of each attempt (negative for a signal), and the checkpoints that it left.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from trainer_fixture import make_policy, make_reward_model, make_trainer  # noqa: E402

import rlhf_zoo.modeling.sampling.sampler  # noqa: E402
from rlhf_zoo.pipeline.stages.callbacks import StageCallback  # noqa: E402
from rlhf_zoo.pipeline.stages.interrupt import Interruptible  # noqa: E402
from rlhf_zoo.runs.record import StageRecord, checkpoint_step  # noqa: E402

UPDATES = 6


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_after(function: Callable[..., Any], condition: Callable[[], bool]) -> Callable[..., Any]:
    """Wraps `function` to kill the process after a call, if `condition()` holds."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if condition():
            kill_self()
        return result

    return wrapped


def attempt(directory: Path, phase: str | None, step: int) -> None:
    """Starts or resumes the run in `directory`, as a stage does. phase: Where to kill itself in update `step`."""
    record = StageRecord(directory)
    record.remove_incomplete_files()
    resume = record.last_checkpoint()
    record.truncate_metrics(checkpoint_step(resume) if resume else -1)
    trainer: Any = make_trainer(
        directory, reward_model=make_reward_model(), ref_model=make_policy(seed=2), max_steps=UPDATES,
        save_strategy="steps", save_steps=2, logging_steps=3, kl_target=0.5, kl_horizon=32,
    )  # fmt: skip
    trainer.add_callback(StageCallback(record, Interruptible("the run")))
    calls = iter(range(10**6))

    def is_fatal_update() -> bool:
        return trainer.state.global_step == step - 1

    if phase == "sampling":
        rlhf_zoo.modeling.sampling.sampler.draw_with_logprobs = kill_after(
            rlhf_zoo.modeling.sampling.sampler.draw_with_logprobs, lambda: is_fatal_update() and next(calls) == 3
        )
    elif phase == "update":
        trainer.optimizer_step = kill_after(trainer.optimizer_step, lambda: is_fatal_update() and next(calls) == 1)
    elif phase == "saving":
        trainer.save_model = kill_after(trainer.save_model, lambda: trainer.state.global_step == step)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)


def fork(directory: Path, phase: str | None, step: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        attempt(directory, phase, step)
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def outcome(child: int, directory: Path) -> dict[str, Any]:
    _, status = os.waitpid(child, 0)
    complete = [checkpoint_step(path) for path in StageRecord(directory).checkpoints()]
    saved = [checkpoint_step(path) for path in directory.glob("checkpoint-*")]
    incomplete = [step for step in saved if step not in complete]
    return {"status": os.waitstatus_to_exitcode(status), "complete": complete, "incomplete": incomplete}


def run_plan(directory: Path, plan: list[list[Any] | None]) -> list[dict[str, Any]]:
    return [outcome(fork(directory, *(entry or (None, 0))), directory) for entry in plan]


if __name__ == "__main__":
    root, plans = Path(sys.argv[1]), json.loads(sys.argv[2])
    print("\n" + json.dumps({name: run_plan(root / name, plan) for name, plan in plans.items()}))
