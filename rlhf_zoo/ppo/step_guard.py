"""Skips optimizer steps whose loss or gradients are not finite, and stops a run that keeps failing.

If a loss or gradient norm is not finite, all processes skip the optimizer step: weights, moments and the optimizer's
counters do not change, but the learning-rate schedule continues. MAX_SKIPPED_IN_A_ROW skipped steps in a row, or a
single weight that is not finite, ends the run with `NotFinite`. Weights that are not finite are never saved.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

from ..errors import NotFinite

#: The number of skipped steps in a row that ends the run.
MAX_SKIPPED_IN_A_ROW = 3
#: The metric that counts optimizer steps skipped since the run began.
SKIPPED = "skipped_steps"
HOW_TO_FIX = "lower learning_rate ({learning_rate:g}), lower max_grad_norm, or switch bf16 or fp16 off"


class StepGuard(TrainerCallback, ExportableState):
    """Decides whether to make each optimizer step. Its counts are saved in trainer_state.json."""

    def __init__(self) -> None:
        self.skipped = 0
        self.in_a_row = 0
        self.loss_failed = False  # since the last log line
        self._not_finite: list[str] = []

    def state(self) -> dict:
        """Returns the counts, which Trainer saves with a checkpoint."""
        names = ("skipped", "in_a_row", "loss_failed")
        return {"args": {}, "attributes": {name: getattr(self, name) for name in names}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: object) -> None:
        """Restores the counts of a checkpoint.

        Args:
            args: Not used.
            control: Not used.
            state: Trainer's state, which has the saved counts.
        """
        state_dict = state.stateful_callbacks[type(self).__name__]
        for name, value in state_dict["attributes"].items():
            setattr(self, name, value)

    def record(self, finite: Mapping[str, bool]) -> None:
        """Records which quantities of the current step are finite.

        Args:
            finite: {quantity: whether it is finite}, the same in all processes.
        """
        self._not_finite += [name for name, is_finite in finite.items() if not is_finite]
        self.loss_failed |= not finite.get("loss", True)

    def should_step(self, *, step: int, learning_rate: float, is_searching_scale: bool = False) -> bool:
        """Decides whether to make the optimizer step, from the recorded quantities.

        Args:
            step: The number of the step, for the error.
            learning_rate: The learning rate, for the error.
            is_searching_scale: Whether a gradient scaler is still searching for its scale. Overflows are expected then,
                so the step does not count toward the skipped steps in a row.

        Raises:
            NotFinite: MAX_SKIPPED_IN_A_ROW steps in a row were not finite.
        """
        not_finite, self._not_finite = self._not_finite, []
        if not not_finite:
            self.in_a_row = 0
            return True
        self.skipped += 1
        self.in_a_row += not is_searching_scale
        if self.in_a_row >= MAX_SKIPPED_IN_A_ROW:
            fix = HOW_TO_FIX.format(learning_rate=learning_rate)
            raise NotFinite(
                f"The {' and the '.join(not_finite)} of step {step} {'is' if len(not_finite) == 1 else 'are'} not "
                f"finite, and {MAX_SKIPPED_IN_A_ROW} optimizer steps in a row were skipped: {fix}."
            )
        return False


class GuardedTrainer(Trainer):
    """A Trainer that saves only finite weights, and whose errors name the last good checkpoint."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # With a mask, cuDNN's attention may have NaN gradients, and torch prefers this attention from 2.11 on:
        # https://github.com/pytorch/pytorch/issues/196678
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.add_callback(StepGuard())

    @property
    def guard(self) -> StepGuard:
        """The guard. It is looked up each time, because Trainer replaces the guard when it restores callbacks."""
        return next(callback for callback in self.callback_handler.callbacks if isinstance(callback, StepGuard))

    def finite_on_all_processes(self, tensors: Mapping[str, Tensor]) -> dict[str, bool]:
        """Finds which tensors are finite in all processes, with a single reduction and a single copy from the device.

        Args:
            tensors: {name: tensor}. Each process passes the same names.
        """
        flags = torch.stack([(~x.detach().isfinite()).any().float().to(self.args.device) for x in tensors.values()])
        # All processes must make the same decision. If only some made the step, weights would diverge.
        failure_counts = self.accelerator.reduce(flags, "sum").tolist()
        return {name: count == 0 for name, count in zip(tensors, failure_counts, strict=True)}

    def check_weights(self) -> None:
        """Checks that all trained weights are finite.

        Raises:
            NotFinite: A weight is NaN or infinite. Raised in all processes, even if only one has such a weight.
        """
        model: Any = self.model
        # Each process checks its own shard, which may be empty.
        weights = [_local_shard(weight) for weight in model.parameters() if weight.requires_grad]
        norm = _norm([weight for weight in weights if weight.numel()], math.inf)
        if self.finite_on_all_processes({"weights": norm})["weights"]:
            return
        trained_weights = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
        # Check single tensors only after a failure, because each check waits for the GPU.
        not_finite = [name for name, weight in trained_weights if not _local_shard(weight).isfinite().all()]
        if not not_finite:
            raise NotFinite(
                f"After step {self.state.global_step} weights of another process are not finite: see that process's "
                "error."
            )
        raise NotFinite(
            f"After step {self.state.global_step} {len(not_finite)} of {len(trained_weights)} weight tensors are not "
            f"finite ({not_finite[0]} is the first): {HOW_TO_FIX.format(learning_rate=self.args.learning_rate)}."
        )

    def last_complete_checkpoint(self) -> str | None:
        """Returns the last checkpoint; None if there is none. PPO overrides this, to skip incomplete checkpoints."""
        directory = self.args.output_dir
        return get_last_checkpoint(directory) if directory and Path(directory).is_dir() else None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains, and adds the last good checkpoint to the error of a failed run.

        Args:
            *args: As in Trainer.
            **kwargs: As in Trainer.

        Raises:
            NotFinite: The run failed; the error names the last good checkpoint.
        """
        try:
            return super().train(*args, **kwargs)
        except NotFinite as error:
            checkpoint = self.last_complete_checkpoint()
            note = f"the last good checkpoint is {checkpoint}" if checkpoint else "no checkpoint was saved before"
            raise NotFinite(f"{str(error).rstrip('.')}; {note}.") from error

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Saves the model if its weights are finite.

        Args:
            *args: As in Trainer.
            **kwargs: As in Trainer.

        Raises:
            NotFinite: Weights are not finite. Nothing is written.
        """
        self.check_weights()
        super().save_model(*args, **kwargs)


class FiniteStepsTrainer(GuardedTrainer):
    """Guards the optimizer step of Trainer's own loop, for any trainer that uses it.

    A step is skipped by removing the gradients: torch's optimizers then leave parameters, moments and counters as they
    are. A gradient scaler (fp16) itself skips a step with gradients that are not finite.
    """

    _loss_sum: Tensor | None = None

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Runs Trainer's step, and checks loss and gradients once they are complete.

        Args:
            model: The model, wrapped for training.
            *args: As in Trainer.
            **kwargs: As in Trainer.

        Returns:
            The loss; 0 if it is not finite, because Trainer would replace NaN with the mean of earlier losses. `log`
            reports the failure.
        """
        if self._loss_sum is None:
            self.check_weights()
        loss = super().training_step(model, *args, **kwargs)
        self._loss_sum = loss.detach() if self._loss_sum is None else self._loss_sum + loss.detach()
        if self.accelerator.sync_gradients:
            self._skip_if_not_finite(model, self._loss_sum)
            self._loss_sum = None
        return torch.where(loss.isfinite(), loss, 0)

    def _skip_if_not_finite(self, model: nn.Module, loss_sum: Tensor) -> None:
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        scaler = self.accelerator.scaler
        # A sum of squares of scaled gradients may overflow although no element does, so use the maximum norm.
        norm = _norm(gradients, 2.0 if scaler is None else math.inf)
        self.guard.record(self.finite_on_all_processes({"loss": loss_sum, "gradient norm": norm}))
        is_searching_scale = scaler is not None and bool(loss_sum.isfinite()) and scaler.get_scale() > 1
        if self.guard.should_step(
            step=self.state.global_step + 1,
            learning_rate=self.args.learning_rate,
            is_searching_scale=is_searching_scale,
        ):
            return
        for weight in model.parameters():
            if scaler is None:
                weight.grad = None
            # Under fp16 a NaN gradient makes the scaler skip the step and lower its scale.
            elif weight.grad is not None:
                weight.grad.fill_(math.nan)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds the number of skipped steps, and logs NaN where a number would hide a skipped step.

        The loss is NaN if any loss since the last line was not finite. The norm is NaN if the last step was skipped,
        except while a gradient scaler searches for its scale.

        Args:
            logs: Trainer's metrics.
            *args: As in Trainer.
            **kwargs: As in Trainer.
        """
        if "loss" in logs:
            guard = self.guard
            logs = logs | {SKIPPED: guard.skipped}
            # `training_step` returned 0 for a loss that is not finite, which would look like a perfect loss.
            if guard.loss_failed:
                logs["loss"] = math.nan
            if guard.in_a_row and "grad_norm" in logs:
                logs["grad_norm"] = math.nan
            guard.loss_failed = False
        super().log(logs, *args, **kwargs)


def _local_shard(weight: Any) -> Tensor:
    """Returns this process's shard of a weight, or all of it."""
    return weight.detach().to_local() if hasattr(weight, "to_local") else weight.detach()


def _norm(tensors: list[Tensor], order: float) -> Tensor:
    norm: Any = nn.utils.get_total_norm(tensors, order)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
