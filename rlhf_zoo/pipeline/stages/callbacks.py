"""What a stage adds to any trainer: metrics on disk, a progress bar, whole checkpoints, sending them, Ctrl-C."""

import shutil
import time
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import IntervalStrategy, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ...errors import ZooError
from ...modeling import distributed
from ...modeling.remote_code import add_code
from ...runs.record import COMPLETE, StageRecord
from .interrupt import EvaluationEnded, Interruptible

SHOWN = {
    "loss": "loss",
    "accuracy": "accuracy",
    "objective/score": "reward",
    "objective/kl": "kl",
    "completions/eos_rate": "eos",
}
SHOWN_EVERY = 0.5  # seconds
# Times differ from run to run, and a resumed run must have the metrics of an uninterrupted one.
LEFT_OUT = (
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


def check_room(record: StageRecord, *, least: int = 0) -> None:
    """Checks that the disk can hold the next checkpoint.

    Args:
        record: The stage's files. The last checkpoint says how large the next one will be.
        least: Bytes to ask for before there is a checkpoint.

    Raises:
        NoRoom: The disk has fewer bytes left.
    """
    last = record.last_checkpoint()
    size = least if last is None else sum(path.stat().st_size for path in last.rglob("*") if path.is_file())
    free = shutil.disk_usage(record.path).free
    if free < size:
        raise NoRoom(
            f"The disk of {record.path} has {free / 2**20:,.1f} MiB left and a checkpoint takes {size / 2**20:,.1f}: "
            "make room, and the same command goes on from the last checkpoint."
        )


class ProgressCallback(TrainerCallback):
    """Metrics on disk and a progress bar, which begins with `desc` and with what is done between two steps."""

    def __init__(self, record: StageRecord, desc: str) -> None:
        self._record = record
        self._desc = desc
        self._bar: tqdm | None = None
        self._described = desc
        self._batches = 0  # of the evaluation under way
        self._shown = 0.0

    def _say(self, what: str = "") -> None:
        """Shows what is being done before the next step; nothing while one is trained."""
        described = f"{self._desc}, {what}" if what else self._desc
        if self._bar is not None and described != self._described:
            self._described, self._shown = described, time.monotonic()
            self._bar.set_description(described)

    def _say_next(self, control: TrainerControl) -> None:
        self._batches = 0
        self._say("evaluating" if control.should_evaluate else "saving" if control.should_save else "")

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: Any = None,
        **_: Any,
    ) -> None:
        self._batches += 1
        if time.monotonic() - self._shown > SHOWN_EVERY:
            total = len(eval_dataloader) if isinstance(eval_dataloader, Sized) else None
            self._say(f"evaluating, batch {self._batches}{f' of {total}' if total else ''}")

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._batches = 0
        self._say("saving" if control.should_save else "")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._say()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._bar = tqdm(
            total=state.max_steps,
            initial=state.global_step,
            desc=self._desc,
            unit="step",
            disable=not distributed.first(),
        )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)
        self._say_next(control)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if "train_runtime" in (logs or {}) and state.global_step < state.max_steps:
            return  # the summary of an interrupted run: the run that goes on has another
        numbers = {name: value for name, value in (logs or {}).items() if not name.endswith(LEFT_OUT)}
        numbers.pop("epoch", None)
        if not numbers or not distributed.first():
            return
        self._record.append_metrics({"step": state.global_step, **numbers})
        if self._bar is not None:
            shown = {label: f"{numbers[name]:.3g}" for name, label in SHOWN.items() if name in numbers}
            self._bar.set_postfix(shown)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the bar's line, so that the next message starts on its own."""
        if self._bar is not None:
            self._bar.close()


class StageCallback(ProgressCallback):
    """Follows one `trainer.train()` of a stage: completes its checkpoints, and ends it after Ctrl-C.

    An evaluation under way ends with EvaluationEnded after its batch: it may take minutes, and changes no weight.

    Args:
        record: The stage's files.
        stop: Says whether Ctrl-C was pressed.
        finish_checkpoint: Takes a checkpoint's path, and adds to it before it counts as complete. Called in every
            process.
        saved: Called in the first process once a checkpoint is complete.
        stop_after: The step to end after.
    """

    def __init__(
        self,
        record: StageRecord,
        stop: Interruptible,
        *,
        finish_checkpoint: Callable[[Path], None] | None = None,
        saved: Callable[[], None] | None = None,
        stop_after: int | None = None,
    ) -> None:
        super().__init__(record, f"{record.path.name:>6}")
        self._stop = stop
        self._finish_checkpoint = finish_checkpoint
        self._saved = saved
        self._stop_after = stop_after
        self._evaluated: int | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        trained = [] if model is None else [each for each in model.parameters() if each.requires_grad]
        # At the least: the optimizer's state comes on top.
        check_room(self._record, least=sum(each.numel() * each.element_size() for each in trained))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        super().on_step_end(args, state, control)
        self._stop.requested = any(distributed.gathered(self._stop.requested))
        if self._stop.requested or state.global_step == self._stop_after:
            control.should_save = control.should_training_stop = True
        if state.global_step >= state.max_steps:
            # Now, and not at the end of the epoch, after the checkpoint is saved: its card has the figures then.
            control.should_evaluate |= args.eval_strategy != IntervalStrategy.NO
            control.should_save = True
        if control.should_save:
            check_room(self._record)
        self._say_next(control)
        return control

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_prediction_step(args, state, control, **kwargs)
        self._stop.requested = any(distributed.gathered(self._stop.requested))
        if self._stop.requested:
            raise EvaluationEnded

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        super().on_evaluate(args, state, control)
        self._evaluated = state.global_step

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        control.should_evaluate &= self._evaluated != state.global_step
        # A complete checkpoint may be on its way to the Hub: it is not written again.
        complete = self._record.checkpoint_path(state.global_step) / COMPLETE
        control.should_save &= not distributed.from_first(complete.is_file)
        self._say_next(control)
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        distributed.wait()  # what each of them adds to the checkpoint lies there
        checkpoint = self._record.checkpoint_path(state.global_step)
        if self._finish_checkpoint is not None:
            self._finish_checkpoint(checkpoint)
        if not distributed.first():
            return
        # peft writes an empty model card beside each adapter, with this machine's paths. Ours is made when it is sent.
        for template in checkpoint.rglob("README.md"):
            template.unlink()
        add_code(checkpoint)
        self._record.mark_complete(checkpoint)
        if self._saved is not None:
            self._saved()
        super().on_save(args, state, control)
