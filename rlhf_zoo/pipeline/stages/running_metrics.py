"""Saves trl's running averages with each checkpoint, so that a resumed run logs the same metrics."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ...errors import ZooError
from ...fileio import write_text
from ...modeling import distributed

RUNNING_METRICS = "running_metrics.json"


class RunningMetrics(TrainerCallback):
    """Writes a trainer's running sums into each checkpoint, and restores them when training resumes.

    Add this callback before the callback that marks a checkpoint complete.

    Args:
        trainer: A trl trainer. Its loss and metrics are sums since the last log line; its token count is a total.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        trainer = self._trainer
        losses = distributed.gather(trainer._tr_loss.item())
        if not distributed.is_main_process():
            return
        sums = {
            "loss": sum(losses) / len(losses),
            "logged": trainer._globalstep_last_logged,
            "metrics": dict(trainer._metrics["train"]),
            "tokens": trainer._total_train_tokens,
        }
        write_text(_metrics_path(args, state), json.dumps(sums) + "\n")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        path = _metrics_path(args, state)
        if not path.is_file():  # training starts from the beginning
            return
        trainer = self._trainer
        try:
            sums = json.loads(path.read_bytes())
            trainer._tr_loss.fill_(sums["loss"])
            trainer._globalstep_last_logged = int(sums["logged"])
            trainer._metrics["train"] = defaultdict(list, sums["metrics"])
            trainer._total_train_tokens = int(sums["tokens"])
        except (ValueError, KeyError, TypeError) as error:
            raise ZooError(f"{path} cannot be read ({error!r}): remove {path.parent}, or use --restart.") from error


def _metrics_path(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}" / RUNNING_METRICS
