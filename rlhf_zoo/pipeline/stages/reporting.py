"""Continues the run of trackio or Weights & Biases when a stage is resumed."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: Environment variables of Weights & Biases, set unless the user has set a run id; {} stands for the run's name.
WANDB_VARIABLES = {"WANDB_RUN_ID": "{}", "WANDB_RESUME": "allow"}
#: transformers' default project of trackio.
DEFAULT_PROJECT = "huggingface"


@contextmanager
def report_to_one_run(args: Any, name: str, *, project: str) -> Iterator[None]:
    """A context in which a trainer reports to the run `name`, and continues that run if it exists.

    trackio identifies a run by its project and name, which the keys `project` and `run_name` override; Weights & Biases
    identifies it by an id.

    Args:
        args: The trainer's arguments, which are changed.
        name: The name of the run.
        project: The project of the run, if `args` has the default project.
    """
    reporters = args.report_to or []
    if "trackio" in reporters:
        if args.run_name in (None, args.output_dir):
            args.run_name = name
        if args.project == DEFAULT_PROJECT:
            args.project = project
    sets_id = "wandb" in reporters and "WANDB_RUN_ID" not in os.environ
    variables = {key: value.format(name) for key, value in WANDB_VARIABLES.items()} if sets_id else {}
    before = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        if variables and getattr(sys.modules.get("wandb"), "run", None) is not None:
            sys.modules["wandb"].finish()  # so that the next stage gets its own run
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
