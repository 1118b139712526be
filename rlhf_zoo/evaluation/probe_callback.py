"""`ProbeCallback`: probes the completions that a trainer logs during training."""

import logging
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..errors import ZooError
from .rollout_files import Rollouts, read_completion_log
from .trackers import log_numbers
from .watch import Watcher

log = logging.getLogger(__name__)


class ProbeCallback(TrainerCallback):
    """Runs the probes on the completions that a trainer logs, against those of the SFT model.

    At the beginning of each step, it reads new files `OUTPUT_DIR/completions/completions_STEP.parquet`, which TRL's
    GRPO and RLOO write with `log_completions=True`. Such a file has only the last batch of completions before it was
    written, so `logging_steps` determines how many completions are probed. Otherwise the callback works like `watch`.
    Only the main process reads and probes.

    Args:
        against: SFT's completions, in a file or as rows as `rlhf-zoo probe` reads them; None for the first
            completions that are logged, as for `watch`.
        size: As for `watch`.
        every: Number of completions between two probes.
        stop: Whether to raise `Hacked` if a family that destroys text has an effect of five times its threshold.

    Raises:
        ZooError: `size` or `every` is too small, or `against` cannot be read.
    """

    def __init__(
        self, *, against: Rollouts | None = None, size: int = 256, every: int = 256, stop: bool = False
    ) -> None:
        self._watcher = Watcher(against, size, every, stop=stop)
        self._versions: dict[Path, tuple[int, int]] = {}  # (time, size); they differ if an evaluation rewrote the file
        self._last_rows: list[tuple[Any, Any]] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Skips existing files; if a run without `against` is resumed, its earliest completions may serve as SFT's."""
        if getattr(args, "log_completions", True) is False:
            raise ZooError(
                "ProbeCallback probes the completions that the trainer logs: set log_completions=True in its "
                "configuration."
            )
        if not state.is_world_process_zero:
            return
        for path in self._new_files(args):
            if _step_of_file(path) <= state.global_step and self._watcher.sft is None:
                self._collect(path, state.global_step)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Probes what the previous step logged; a trainer writes its file after the callbacks of that step."""
        if state.is_world_process_zero:
            for path in self._new_files(args):
                self._collect(path, state.global_step)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Probes what the last step logged, and warns if nothing was logged at all."""
        self.on_step_begin(args, state, control)
        if state.is_world_process_zero and not self._versions:
            log.warning("Nothing was probed: the trainer wrote no completions into %s.", _completions_folder(args))

    def _new_files(self, args: TrainingArguments) -> list[Path]:
        new_paths = []
        for path in sorted(_completions_folder(args).glob("completions_*.parquet"), key=_step_of_file):
            stat = path.stat()
            version = (stat.st_mtime_ns, stat.st_size)
            if self._versions.get(path) != version:
                self._versions[path] = version
                new_paths.append(path)
        return new_paths

    def _collect(self, path: Path, step: int) -> None:
        rows = read_completion_log(path)
        # A trainer logs its last batch of completions, so a file may begin with the last rows of the previous file.
        overlap = next(
            count
            for count in range(min(len(rows), len(self._last_rows)), -1, -1)
            if self._last_rows[len(self._last_rows) - count :] == rows[:count]
        )
        self._last_rows, new_rows = rows, rows[overlap:]
        effects: dict[str, float] = {}  # filled by the watcher, whose `log_metric` is the dict's own setter
        try:
            self._watcher.collect(
                [prompt for prompt, _ in new_rows], [text for _, text in new_rows], effects.__setitem__
            )
        finally:  # effects are logged even if they stop training
            if effects:
                log_numbers(effects, step=step)


def _step_of_file(path: Path) -> int:
    digits = path.stem.removeprefix("completions_")
    return int(digits) if digits.isdecimal() else 0


def _completions_folder(args: TrainingArguments) -> Path:
    return Path(args.output_dir or ".") / "completions"
