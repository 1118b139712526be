"""What is not a number does not train: the step is skipped, and a run that keeps failing stops by name.

A non-finite loss or gradient norm skips its optimizer step in all processes: weights, moments and the optimizer's own
counters stay as they were, while the learning-rate schedule goes on. IN_A_ROW of them, or one weight that is not
finite, end the run with `NotFinite`, and no checkpoint is written of such weights.
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

IN_A_ROW = 3
#: The metric: optimizer steps skipped since the run began.
SKIPPED = "skipped_steps"
MEND = "lower learning_rate ({rate:g}), clip harder with max_grad_norm, or compute in float32 if bf16 or fp16 is on"


class StepGuard(TrainerCallback, ExportableState):
    """Decides of each optimizer step whether it is made. Its counts travel with a checkpoint, in trainer_state.json."""

    def __init__(self) -> None:
        self.skipped = 0
        self.in_a_row = 0
        self.loss_failed = False  # since the last log line
        self._wrong: list[str] = []

    def state(self) -> dict:
        kept = ("skipped", "in_a_row", "loss_failed")
        return {"args": {}, "attributes": {name: getattr(self, name) for name in kept}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        saved = state.stateful_callbacks[type(self).__name__]
        for name, value in saved["attributes"].items():
            setattr(self, name, value)

    def look(self, seen: Mapping[str, bool]) -> None:
        """Notes of the step under way what is finite and what is not, as all processes agree on it."""
        self._wrong += [name for name, finite in seen.items() if not finite]
        self.loss_failed |= not seen.get("loss", True)

    def keep(self, *, step: int, rate: float, expected: bool = False) -> bool:
        """Whether the optimizer step that was looked at is made.

        Args:
            step: its number, for the error.
            rate: the learning rate, for the error.
            expected: whether this overflow is how a gradient scaler finds its scale, so that it does not count towards
                the row.

        Raises:
            NotFinite: IN_A_ROW steps running are not finite.
        """
        wrong, self._wrong = self._wrong, []
        if not wrong:
            self.in_a_row = 0
            return True
        self.skipped += 1
        self.in_a_row += not expected
        if self.in_a_row >= IN_A_ROW:
            raise NotFinite(
                f"The {' and the '.join(wrong)} of step {step} {'is' if len(wrong) == 1 else 'are'} not finite, and "
                f"{IN_A_ROW} optimizer steps running were skipped for that: {MEND.format(rate=rate)}."
            )
        return False


class Guarded(Trainer):
    """A Trainer whose weights are numbers whenever they are saved, and whose failures name the last good checkpoint."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # With a mask the gradients of cuDNN's attention may be NaN, which torch takes first from 2.11 on:
        # https://github.com/pytorch/pytorch/issues/196678
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.add_callback(StepGuard())

    @property
    def guard(self) -> StepGuard:
        # Looked up, as Trainer makes a new one where it restores callbacks itself.
        return next(each for each in self.callback_handler.callbacks if isinstance(each, StepGuard))

    def agreed(self, seen: Mapping[str, Tensor]) -> dict[str, bool]:
        """Which of these tensors are finite in all processes. Takes one reduction and one copy from the device.

        Args:
            seen: by name; each process gives the same names.
        """
        wrong = torch.stack([(~each.detach().isfinite()).any().float().to(self.args.device) for each in seen.values()])
        votes = self.accelerator.reduce(wrong, "sum").tolist()
        return {name: vote == 0 for name, vote in zip(seen, votes, strict=True)}

    def check_weights(self) -> None:
        """Raises NotFinite in all processes if a weight that trains is NaN or infinite in one."""
        model: Any = self.model
        # Of what is sharded each process looks at its shard, which may be empty.
        weights = [_held(weight) for weight in model.parameters() if weight.requires_grad]
        if self.agreed({"weights": _norm([each for each in weights if each.numel()], math.inf)})["weights"]:
            return
        named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
        wrong = [name for name, weight in named if not _held(weight).isfinite().all()]
        if not wrong:
            raise NotFinite(
                f"After step {self.state.global_step} weights of another process are not finite: see there."
            )
        raise NotFinite(
            f"After step {self.state.global_step} {len(wrong)} of {len(named)} weight tensors are not finite "
            f"({wrong[0]} is the first): {MEND.format(rate=self.args.learning_rate)}."
        )

    def last_good(self) -> str | None:
        """The last checkpoint that was written whole."""
        directory = self.args.output_dir
        return get_last_checkpoint(directory) if directory and Path(directory).is_dir() else None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains. Raises NotFinite, with the last good checkpoint, where the run stops making numbers."""
        try:
            return super().train(*args, **kwargs)
        except NotFinite as error:
            last = self.last_good()
            where = f"the last good checkpoint is {last}" if last else "no checkpoint was saved before"
            raise NotFinite(f"{str(error).rstrip('.')}; {where}.") from error

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Saves the model. Raises NotFinite, and writes nothing, if its weights are not finite."""
        self.check_weights()
        super().save_model(*args, **kwargs)


class FiniteSteps(Guarded):
    """Guards the optimizer step of Trainer's own loop, for any trainer that leaves it in place.

    A skipped step finds no gradients: torch's optimizers then leave a parameter, its moments and its counter alone. A
    gradient scaler (fp16) skips by itself what is not finite.
    """

    _losses: Tensor | None = None

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Trainer's, and a look at loss and gradients once they are complete. Returns 0 for a loss that is no number:

        Trainer would count the mean of earlier ones in its place, and `log` says that it failed.
        """
        if self._losses is None:
            self.check_weights()
        loss = super().training_step(model, *args, **kwargs)
        self._losses = loss.detach() if self._losses is None else self._losses + loss.detach()
        if self.accelerator.sync_gradients:
            self._decide(model, self._losses)
            self._losses = None
        return torch.where(loss.isfinite(), loss, 0)

    def _decide(self, model: nn.Module, losses: Tensor) -> None:
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        scaler = self.accelerator.scaler
        # Scaled gradients are large, and only an element that overflowed counts.
        norm = _norm(gradients, 2.0 if scaler is None else math.inf)
        self.guard.look(self.agreed({"loss": losses, "gradient norm": norm}))
        searching = scaler is not None and bool(losses.isfinite()) and scaler.get_scale() > 1
        if self.guard.keep(step=self.state.global_step + 1, rate=self.args.learning_rate, expected=searching):
            return
        for weight in model.parameters():
            if scaler is None:
                weight.grad = None
            elif weight.grad is not None:
                weight.grad.fill_(math.nan)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds how many steps were skipped, and says NaN of a loss or norm that failed since the last line."""
        if "loss" in logs:
            guard = self.guard
            logs = logs | {SKIPPED: guard.skipped}
            if guard.loss_failed:
                logs["loss"] = math.nan
            if guard.in_a_row and "grad_norm" in logs:
                logs["grad_norm"] = math.nan
            guard.loss_failed = False
        super().log(logs, *args, **kwargs)


def finite_steps(kind: type[Trainer]) -> type[Any]:
    """This kind of Trainer, with FiniteSteps around its optimizer step."""
    return type(kind.__name__, (FiniteSteps, kind), {})


def _held(weight: Any) -> Tensor:
    """What this process holds of a weight."""
    return weight.detach().to_local() if hasattr(weight, "to_local") else weight.detach()


def _norm(tensors: list[Tensor], order: float) -> Tensor:
    norm: Any = nn.utils.get_total_norm(tensors, order)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
