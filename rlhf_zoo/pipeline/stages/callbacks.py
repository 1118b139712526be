"""Callbacks of a stage's trainer: metrics on disk, a progress bar, complete checkpoints, publishing, Ctrl-C."""

import shutil
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Any

from transformers import IntervalStrategy, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ...errors import ZooError
from ...fileio import folder_bytes
from ...modeling import distributed
from ...modeling.remote_code import copy_code
from ...runs.record import COMPLETE, StageRecord
from ...runs.status_line import Progress
from .interrupt import EvaluationInterrupted, Interruptible

#: Metric -> its label in the progress bar.
BAR_LABELS = {
    "loss": "loss",
    "accuracy": "accuracy",
    "objective/score": "reward",
    "objective/kl": "kl",
    "completions/eos_rate": "eos",
}
#: Phase of an update -> its label in the progress bar.
PHASE_LABELS = {
    "rollout": "sampling",
    "values": "computing values",
    "reference": "running the reference",
    "reward": "scoring",
    "update": "learning",
}
#: Metrics with one of these endings are not recorded, because they may differ between a resumed and an uninterrupted
#: run, whose metrics must be the same.
UNREPRODUCIBLE = (
    "runtime",
    "preparation_time",
    "samples_per_second",
    "steps_per_second",
    "total_flos",
    "train_loss",
    "num_tokens",
)


class NoRoom(ZooError):
    """The disk cannot hold the next checkpoint."""


def check_room(record: StageRecord, *, min_bytes: int = 0) -> None:
    """Checks that the disk can hold the next checkpoint, which is expected to be as large as the last checkpoint.

    Args:
        record: The stage's files.
        min_bytes: The size to expect if there is no checkpoint yet.

    Raises:
        NoRoom: The disk has less free space.
    """
    checkpoint = record.last_checkpoint()
    needed_bytes = min_bytes if checkpoint is None else folder_bytes(checkpoint)
    free_bytes = shutil.disk_usage(record.path).free
    if free_bytes < needed_bytes:
        raise NoRoom(
            f"The disk of {record.path} has {free_bytes / 2**20:,.1f} MiB free, but a checkpoint takes "
            f"{needed_bytes / 2**20:,.1f}: free some space, then run the same command again to resume from the last "
            "checkpoint."
        )


class ProgressCallback(TrainerCallback):
    """Writes metrics to disk, and shows a progress bar.

    Args:
        record: The stage's files.
        desc: Label of the bar, to which the activity between two steps is appended.
    """

    def __init__(self, record: StageRecord, desc: str) -> None:
        self._record = record
        self._desc = desc
        self._bar: Progress | None = None
        self._batch_count = 0  # batches of the current evaluation so far

    def _describe(self, activity: str = "") -> None:
        """Shows the current activity after the bar's label; "" shows only the label."""
        if self._bar is not None:
            self._bar.describe(f"{self._desc}, {activity}" if activity else self._desc)

    def show_phase(self, phase: str) -> None:
        """Shows a phase of an update.

        Args:
            phase: Name of the phase; "" at the end of the update.
        """
        self._describe(PHASE_LABELS.get(phase, ""))

    def _describe_next(self, control: TrainerControl) -> None:
        self._batch_count = 0
        self._describe("evaluating" if control.should_evaluate else "saving" if control.should_save else "")

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: Any = None,
        **_: object,
    ) -> None:
        self._batch_count += 1
        total = len(eval_dataloader) if isinstance(eval_dataloader, Sized) else None
        self._describe(f"evaluating, batch {self._batch_count}{f' of {total}' if total else ''}")

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self._batch_count = 0
        self._describe("saving" if control.should_save else "")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self._describe()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        self._bar = Progress(state.max_steps, self._desc, "step", initial=state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if not control.should_log:  # otherwise `on_log` follows, with the metrics of this step
            self._advance(state)
        self._describe_next(control)

    def _advance(self, state: TrainerState) -> None:
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: object,
    ) -> None:
        if "train_runtime" in (logs or {}) and state.global_step < state.max_steps:
            return  # this is the summary of an interrupted run; the resumed run logs its own summary
        metrics = {name: value for name, value in (logs or {}).items() if not name.endswith(UNREPRODUCIBLE)}
        metrics.pop("epoch", None)
        if not metrics or not distributed.is_main_process():
            return
        self._record.append_metrics({"step": state.global_step, **metrics})
        if self._bar is not None:
            postfix = {label: f"{metrics[name]:.3g}" for name, label in BAR_LABELS.items() if name in metrics}
            self._bar.show_metrics(postfix)
            self._advance(state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the bar's line, so that the next message starts on a new line."""
        if self._bar is not None:
            self._bar.close()


class StageCallback(ProgressCallback):
    """Completes the checkpoints of a stage's trainer, and stops training after Ctrl-C.

    Ctrl-C ends a running evaluation after the current batch, with EvaluationInterrupted, because an evaluation may take
    minutes and does not change the weights.

    Args:
        record: The stage's files.
        stop: Records whether Ctrl-C was pressed.
        finish_checkpoint: Takes the path of a checkpoint and adds files before the checkpoint counts as complete.
            Called in every process; None adds no files.
        after_save: Called in the main process after a checkpoint is complete; None calls nothing.
        stop_after: The step to stop after; None trains to the last step.
    """

    def __init__(
        self,
        record: StageRecord,
        stop: Interruptible,
        *,
        finish_checkpoint: Callable[[Path], None] | None = None,
        after_save: Callable[[], None] | None = None,
        stop_after: int | None = None,
    ) -> None:
        super().__init__(record, f"{record.path.name:>6}")
        self._stop = stop
        self._finish_checkpoint = finish_checkpoint
        self._after_save = after_save
        self._stop_after = stop_after
        self._last_evaluated: int | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        weights = [] if model is None else [weight for weight in model.parameters() if weight.requires_grad]
        # This is a lower bound, because the optimizer's state also needs space.
        check_room(self._record, min_bytes=sum(weight.numel() * weight.element_size() for weight in weights))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> TrainerControl:
        super().on_step_end(args, state, control)
        # Ctrl-C may reach the processes at different steps, but all must save and stop at the same step.
        self._stop.requested = any(distributed.gather(self._stop.requested))
        if self._stop.requested or state.global_step == self._stop_after:
            control.should_save = control.should_training_stop = True
        if state.global_step >= state.max_steps:
            # Evaluate now rather than at the end of the epoch, because the last checkpoint's card needs the figures.
            control.should_evaluate |= args.eval_strategy != IntervalStrategy.NO
            control.should_save = True
        if control.should_save:
            check_room(self._record)
        self._describe_next(control)
        return control

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_prediction_step(args, state, control, **kwargs)
        self._stop.requested = any(distributed.gather(self._stop.requested))
        if self._stop.requested:
            raise EvaluationInterrupted

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        super().on_evaluate(args, state, control)
        self._last_evaluated = state.global_step

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> TrainerControl:
        # An epoch's last step may have been evaluated already.
        control.should_evaluate &= self._last_evaluated != state.global_step
        # A complete checkpoint is not written again, because the outbox may be sending its files.
        marker = self._record.checkpoint_path(state.global_step) / COMPLETE
        control.should_save &= not distributed.call_on_main_process(marker.is_file)
        self._describe_next(control)
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        distributed.wait()  # until all processes have written their files
        checkpoint = self._record.checkpoint_path(state.global_step)
        if self._finish_checkpoint is not None:
            self._finish_checkpoint(checkpoint)
        if not distributed.is_main_process():
            return
        # peft writes an empty card with local paths next to each adapter. Publishing writes rlhf-zoo's own card.
        for card in checkpoint.rglob("README.md"):
            card.unlink()
        copy_code(checkpoint)
        self._record.mark_complete(checkpoint)
        if self._after_save is not None:
            self._after_save()
        super().on_save(args, state, control)
