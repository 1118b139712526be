"""Runs of trackio and Weights & Biases that go on when a stage does."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Weights & Biases reads these; whoever set them means another run.
WANDB = {"WANDB_RUN_ID": "{}", "WANDB_RESUME": "allow"}
PROJECT = "huggingface"  # transformers', where nobody names one


@contextmanager
def one_run(args: Any, name: str, *, project: str) -> Iterator[None]:
    """Lets a trainer report to the run `name` while open, and go on with it where it exists.

    trackio knows a run by its project and name, and gets those that the keys `project` and `run_name` do not give;
    Weights & Biases knows it by an id.

    Args:
        args: The trainer's.
        name: The run's.
        project: The project, where `args` names none.
    """
    reporters = args.report_to or []
    if "trackio" in reporters:
        if args.run_name in (None, args.output_dir):
            args.run_name = name
        if args.project == PROJECT:
            args.project = project
    begins = "wandb" in reporters and "WANDB_RUN_ID" not in os.environ
    ours = {key: value.format(name) for key, value in WANDB.items()} if begins else {}
    before = {key: os.environ.get(key) for key in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        if ours and getattr(sys.modules.get("wandb"), "run", None) is not None:
            sys.modules["wandb"].finish()  # the next stage is another run
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
