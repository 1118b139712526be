"""Continues the run of trackio or Weights & Biases when a stage is resumed."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: Environment variables of Weights & Biases -> value, unless the user has set a run id. {} stands for the run's name.
WANDB_VARIABLES = {"WANDB_RUN_ID": "{}", "WANDB_RESUME": "allow"}
#: The default of transformers for trackio's project.
DEFAULT_PROJECT = "huggingface"


@contextmanager
def report_to_one_run(args: Any, name: str, *, project: str) -> Iterator[None]:
    """A context in which a trainer reports to the run `name`, and continues that run if it exists.

    trackio identifies a run by its project and name, which the keys `project` and `run_name` override. Weights & Biases
    identifies a run by an id.

    Args:
        args: The trainer's arguments, which are changed.
        name: Name of the run, unless `args` has one.
        project: Project of the run, unless `args` has one.
    """
    reporters = args.report_to or []
    if "trackio" in reporters:
        if args.run_name in (None, args.output_dir):
            args.run_name = name
        if args.project == DEFAULT_PROJECT:
            args.project = project
    sets_id = "wandb" in reporters and "WANDB_RUN_ID" not in os.environ
    variables = {key: value.format(name) for key, value in WANDB_VARIABLES.items()} if sets_id else {}
    previous_values = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        if variables and getattr(sys.modules.get("wandb"), "run", None) is not None:
            sys.modules["wandb"].finish()  # otherwise the next stage would report to the same run
        for key, value in previous_values.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
