"""Moves models between devices, and halves batches that do not fit into memory."""

import ctypes
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ..errors import ZooError

log = logging.getLogger(__name__)

#: The exceptions of a failed allocation. CPU and MPS raise a RuntimeError, which only its message identifies.
MEMORY_ERRORS = (torch.OutOfMemoryError, MemoryError, RuntimeError)
_OOM_PHRASES = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")

T = TypeVar("T")
Model = TypeVar("Model", bound=torch.nn.Module)


def best_device(*, use_cpu: bool = False) -> torch.device:
    """Returns the device on which this process trains, or would train: an accelerator, or the CPU if there is none.

    Args:
        use_cpu: Whether to use the CPU even if there is an accelerator. The environment variable ACCELERATE_USE_CPU has
            the same effect.
    """
    from accelerate import PartialState

    if use_cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        return torch.device("cpu")
    if PartialState._shared_state:  # with several processes, each has its own device
        return PartialState().device
    if torch.cuda.is_available():  # true on ZeroGPU even before a device is attached
        return torch.device("cuda")
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def has_bfloat16() -> bool:
    """Whether this machine has an accelerator that supports bfloat16."""
    from transformers.utils import is_torch_bf16_gpu_available

    return bool(is_torch_bf16_gpu_available())


def move_to_best_device(model: Model, *, use_cpu: bool = False) -> Model:
    """Moves a model to `best_device`.

    Args:
        model: The model.
        use_cpu: As for `best_device`.
    """
    return move(model, best_device(use_cpu=use_cpu))


def move(model: Model, device: torch.device) -> Model:
    """Moves a model to a device. A quantized model stays on the accelerator on which it was loaded."""
    return model if getattr(model, "is_quantized", False) else model.to(device)


@contextmanager
def temporarily_on_device(device: torch.device, *models: Any) -> Iterator[None]:
    """Keeps models on a device while this context is open, then moves them back to their previous devices.

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
        for model, original_device in to_move:
            model.to(original_device)


class MicroBatches:
    """Calls a function on batches of `size` rows. Halves `size` when a batch does not fit into memory."""

    def __init__(self, size: int) -> None:
        self.size = size

    def run(self, step: Callable[[Sequence[int]], T], rows: Sequence[int]) -> Iterator[T]:
        """Calls `step` on all rows, batch by batch.

        Halved batches change results only by rounding: kernels may sum in another order for another batch size.

        Args:
            step: Called with the rows of a batch.
            rows: Row indices.

        Yields:
            The result of each call.

        Raises:
            ZooError: A single row does not fit.
        """
        start = 0
        while start < len(rows):
            batch = rows[start : start + self.size]
            result = try_or_free_memory(step, batch)
            if result is not None:
                yield result[0]
                start += len(batch)
                continue
            if len(batch) == 1:
                raise row_too_large_error()
            # Later batches keep the new size, because a size that did not fit once will not fit again.
            self.size = len(batch) // 2
            log.warning("%d rows do not fit into memory: continuing with %d at a time.", len(batch), self.size)


def row_too_large_error() -> ZooError:
    """Returns the error for a single row that does not fit into memory."""
    return ZooError(
        f"A single row does not fit into the memory of {best_device()}: shorten prompts or completions, use a smaller "
        "model, or free memory that other programs use."
    )


def try_or_free_memory(step: Callable[..., T], *arguments: Any) -> tuple[T] | None:
    """Calls a function. If memory runs out, frees the memory of the failed call and returns None.

    Args:
        step: The function.
        *arguments: Its arguments.

    Returns:
        (result,); None if memory ran out.
    """
    try:
        return (step(*arguments),)
    except MEMORY_ERRORS as error:
        if not is_out_of_memory(error):
            raise
    # Free memory after the except block, because within it the error still refers to the tensors of the failed call.
    free_cache()
    return None


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error is a failed allocation, on any device."""
    message = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(phrase in message for phrase in _OOM_PHRASES)


def free_cache() -> None:
    """Collects garbage, and returns freed memory that the allocators of the accelerator and of glibc have kept."""
    from accelerate.utils.memory import clear_device_cache

    clear_device_cache(garbage_collection=True)
    # Windows has no library without a name, and C libraries other than glibc have no malloc_trim.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def as_memory_error(error: Exception, *, fix: str) -> ZooError | None:
    """Converts an error about a failed allocation into a ZooError, and frees the memory of the failed call.

    Args:
        error: Any error.
        fix: The end of the message: an instruction for the user.

    Returns:
        The error to raise; None if `error` is not a failed allocation.
    """
    if not is_out_of_memory(error):
        return None
    # The frames of the traceback refer to the tensors that filled the memory.
    error.__traceback__ = None
    free_cache()
    return ZooError(f"The memory of this machine is full: {fix}")
