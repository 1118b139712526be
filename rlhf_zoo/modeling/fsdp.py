"""FSDP2: every process holds a shard of each weight, and of its optimizer state, and gathers a layer when it is due.

Policy, critic, reference and reward model are sharded apart, layer by layer: each is called by itself. What is saved is
what one process saves.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

#: glibc's number of this option of mallopt, and the size from which on a block is mapped by itself.
M_MMAP_THRESHOLD, MAPPED = -3, 2**20


def shard(model: nn.Module) -> None:
    """Shards a model's layers, then what is left of it, in place. All processes hold the same weights before."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    for layer in [module for module in model.modules() if type(module).__name__ in kinds]:
        fully_shard(layer)
    fully_shard(model)


def return_memory() -> None:
    """Has glibc give blocks from MAPPED bytes on back to the system when they are freed.

    Left to itself it keeps what a CPU gathered and freed, layer by layer, in its heap: a process of two that trained a
    model of 135M weights grew to 7.5 GiB, as large as one that has no shards. Elsewhere this changes nothing.
    """
    libc = ctypes.CDLL(None)
    mallopt, trim = (getattr(libc, name, None) for name in ("mallopt", "malloc_trim"))
    if mallopt is not None and trim is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED)
        trim(0)  # and what was freed before


@contextmanager
def whole(*models: Any) -> Iterator[None]:
    """While open, these models hold all of their weights: for loops that are not as long in every process."""
    parts = [each for model in models if model is not None for each in model.modules() if isinstance(each, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(True, recurse=False)


def full(tensor: Any) -> Tensor:
    """All of a tensor, of which this process may hold a shard."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else torch.as_tensor(tensor)


def full_weights(model: nn.Module) -> dict[str, Any] | None:
    """All weights of a sharded model, in the first process on the CPU; None for one that is not sharded."""
    if not isinstance(model, FSDPModule):
        return None
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    # Gathered apart, tied weights would be saved twice.
    tied = getattr(model, "all_tied_weights_keys", {})
    return weights | {name: weights[of] for name, of in tied.items() if of in weights}


def load_full(model: nn.Module, weights: dict[str, Any]) -> None:
    """Loads all weights of a model, of which this process may hold shards."""
    if isinstance(model, FSDPModule):
        set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    else:
        model.load_state_dict(weights)


def full_optimizer(optimizer: Any, *, keep: bool) -> dict[str, Any] | None:
    """The state of an optimizer as one process has it, on the CPU.

    Args:
        optimizer: of which this process may hold shards. All processes take part.
        keep: whether this process wants it; the others hold one tensor at a time.

    Returns:
        The state, or None where `keep` is False.
    """
    found = optimizer.state_dict()
    state: dict[Any, dict[str, Any]] = {}
    for place, of in found["state"].items():
        for name, value in of.items():
            whole_value = full(value) if isinstance(value, Tensor) else value
            if keep:
                state.setdefault(place, {})[name] = (
                    whole_value.cpu() if isinstance(whole_value, Tensor) else whole_value
                )
    return {**found, "state": state} if keep else None


def shard_optimizer(optimizer: Any) -> None:
    """Shards a state that was loaded as one process has it, as its weights are sharded."""
    for weight, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == weight.shape and not isinstance(value, DTensor):
                state[name] = distribute_tensor(value, weight.device_mesh, weight.placements)
