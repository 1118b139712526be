"""Devices of models outside a trainer, and how many rows fit at a time."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ..errors import ZooError

log = logging.getLogger(__name__)

#: What a failed allocation raises. On a CPU and on MPS that is RuntimeError, which `is_out_of_memory` examines.
MEMORY_ERRORS = (torch.OutOfMemoryError, MemoryError, RuntimeError)
_PHRASES = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")

T = TypeVar("T")
Model = TypeVar("Model", bound=torch.nn.Module)


def best_device(*, use_cpu: bool = False) -> torch.device:
    """Returns the accelerator that this process trains on or would train on; the CPU if there is none.

    Args:
        use_cpu: Whether to use the CPU, as the key of the same name in a stage says. ACCELERATE_USE_CPU in the
            environment does the same.
    """
    from accelerate import PartialState

    if use_cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        return torch.device("cpu")
    if PartialState._shared_state:  # each of several processes has its own
        return PartialState().device
    if torch.cuda.is_available():  # on ZeroGPU this is true before a device is attached
        return torch.device("cuda")
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def has_bfloat16() -> bool:
    """Whether the accelerator here computes in bfloat16."""
    from transformers.utils import is_torch_bf16_gpu_available

    return bool(is_torch_bf16_gpu_available())


def on_device(model: Model, *, use_cpu: bool = False) -> Model:
    """Moves a model to `best_device`.

    Args:
        model: The model.
        use_cpu: As for `best_device`.
    """
    return move(model, best_device(use_cpu=use_cpu))


def move(model: Model, device: torch.device) -> Model:
    """Moves a model to a device. A quantized one stays on the accelerator where it was loaded.

    Args:
        model: The model.
        device: The device.
    """
    return model if getattr(model, "is_quantized", False) else model.to(device)


@contextmanager
def temporarily_on_device(device: torch.device, *models: Any) -> Iterator[None]:
    """Moves models to a device while this context is open. Afterwards each is back where it was.

    Args:
        device: The device.
        *models: The models; None is skipped.
    """
    to_move = [(model, model.device) for model in models if model is not None and model.device != device]
    try:
        for model, _ in to_move:
            model.to(device)
        yield
    finally:
        for model, home in to_move:
            model.to(home)


class MicroBatches:
    """Processes rows in batches of `size`, and halves the size when a batch does not fit into memory."""

    def __init__(self, size: int) -> None:
        self.size = size

    def run(self, step: Callable[[Sequence[int]], T], rows: Sequence[int]) -> Iterator[T]:
        """Runs a step over all rows, batch by batch.

        Halved batches give the same results except for rounding: the summation order of kernels depends on the size.

        Args:
            step: Called with some of the rows, in their order.
            rows: The rows.

        Yields:
            What each call returns.

        Raises:
            ZooError: A single row does not fit.
        """
        start = 0
        while start < len(rows):
            some = rows[start : start + self.size]
            result = try_with_oom_fallback(step, some)
            if result is not None:
                yield result[0]
                start += len(some)
                continue
            if len(some) == 1:
                raise too_large()
            # The following batches keep this size, because a size that did not fit once will not fit again.
            self.size = len(some) // 2
            log.warning("%d rows do not fit into memory: continuing with %d at a time.", len(some), self.size)


def too_large() -> ZooError:
    """Returns the error for a single row that does not fit into memory."""
    return ZooError(
        f"A single row does not fit into the memory of {best_device()}: shorten prompts or completions, use a smaller "
        "model, or free memory that other programs use."
    )


def try_with_oom_fallback(step: Callable[..., T], *arguments: Any) -> tuple[T] | None:
    """Calls a step, and recovers if the memory is too small.

    Args:
        step: The step.
        *arguments: Its arguments.

    Returns:
        A tuple of the step's result; None if the memory was too small. What the failed call used is then free again.
    """
    try:
        return (step(*arguments),)
    except MEMORY_ERRORS as error:
        if not is_out_of_memory(error):
            raise
    # Outside the except block, because its error still refers to the tensors of the failed call.
    free_cache()
    return None


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error came from an allocation, on any device.

    Args:
        error: The error.
    """
    message = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(phrase in message for phrase in _PHRASES)


def free_cache() -> None:
    """Returns the memory that the accelerator's allocator keeps in reserve."""
    from accelerate.utils.memory import clear_device_cache

    clear_device_cache(garbage_collection=True)


def out_of_memory(error: Exception, *, fix: str) -> ZooError | None:
    """Converts an error that came from an allocation.

    The error drops the frames that it came through, which hold the tensors that filled the memory.

    Args:
        error: Any error.
        fix: The end of the message, which says what to do.

    Returns:
        The error to raise; None for any other error.
    """
    if not is_out_of_memory(error):
        return None
    # Frames refer to the tensors that filled the memory.
    error.__traceback__ = None
    free_cache()
    return ZooError(f"The memory of this machine is full: {fix}")
