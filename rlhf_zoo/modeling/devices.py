"""Where models run that no trainer holds, and how many rows at a time: on the accelerator, as many as fit."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ..errors import ZooError

log = logging.getLogger(__name__)

# A CPU's allocator and that of MPS raise RuntimeError, and so does much else.
MEMORY_ERRORS = (torch.OutOfMemoryError, MemoryError, RuntimeError)
_SAID = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")

T = TypeVar("T")
Model = TypeVar("Model", bound=torch.nn.Module)


def best_device(*, use_cpu: bool = False) -> torch.device:
    """The accelerator that this process trains on or would; the CPU where there is none.

    use_cpu, the key of a recipe's stages, or ACCELERATE_USE_CPU in the environment takes the CPU.
    """
    from accelerate import PartialState

    if use_cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        return torch.device("cpu")
    if PartialState._shared_state:  # of several processes, each has its own
        return PartialState().device
    if torch.cuda.is_available():  # what ZeroGPU promises where no device is there yet
        return torch.device("cuda")
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def has_bfloat16() -> bool:
    """Whether the accelerator here computes in bfloat16."""
    from transformers.utils import is_torch_bf16_gpu_available

    return bool(is_torch_bf16_gpu_available())


def on_device(model: Model, *, use_cpu: bool = False) -> Model:
    """The model, moved to `best_device`."""
    return move(model, best_device(use_cpu=use_cpu))


def move(model: Model, device: torch.device) -> Model:
    """The model there. A quantized one stays where it was loaded, which is on an accelerator."""
    return model if getattr(model, "is_quantized", False) else model.to(device)


@contextmanager
def temporarily_on_device(device: torch.device, *models: Any) -> Iterator[None]:
    """While open, these models are on the device; afterwards each is where it was. None is no model."""
    away = [(model, model.device) for model in models if model is not None and model.device != device]
    try:
        for model, _ in away:
            model.to(device)
        yield
    finally:
        for model, home in away:
            model.to(home)


class MicroBatches:
    """Rows a few at a time: `size` of them, and half as many from where memory is too small for so many."""

    def __init__(self, size: int) -> None:
        self.size = size

    def run(self, step: Callable[[Sequence[int]], T], rows: Sequence[int]) -> Iterator[T]:
        """step(some of the rows), in their order. Raises ZooError where a single one does not fit.

        Halved batches give what whole ones give but for rounding: kernels add in an order that depends on the size.
        """
        start = 0
        while start < len(rows):
            some = rows[start : start + self.size]
            found = try_with_oom_fallback(step, some)
            if found is not None:
                yield found[0]
                start += len(some)
                continue
            if len(some) == 1:
                raise too_large()
            self.size = len(some) // 2
            log.warning("%d rows do not fit the memory: %d at a time from here on.", len(some), self.size)


def too_large() -> ZooError:
    return ZooError(
        f"A single row does not fit the memory of {best_device()}: shorten prompts or completions, take a smaller "
        "model, or free memory that other programs hold."
    )


def try_with_oom_fallback(step: Callable[..., T], *given: Any) -> tuple[T] | None:
    """(step(*given),), or None where the memory was too small: what the failed call held is free again then."""
    try:
        return (step(*given),)
    except MEMORY_ERRORS as error:
        if not is_out_of_memory(error):
            raise
    free_cache()
    return None


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error came of an allocation, on whatever device."""
    said = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in said for words in _SAID)


def free_cache() -> None:
    """Gives the memory back that the accelerator's allocator keeps for later."""
    from accelerate.utils.memory import clear_device_cache

    clear_device_cache(garbage_collection=True)


def out_of_memory(error: Exception, *, mend: str) -> ZooError | None:
    """The sentence for an error that came of an allocation, None for any other.

    The error lets go of the frames that it came through, which hold the tensors that filled the memory.
    """
    if not is_out_of_memory(error):
        return None
    error.__traceback__ = None
    free_cache()
    return ZooError(f"The memory of this machine is full: {mend}")
