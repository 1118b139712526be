"""FSDP2: each process holds a shard of each weight and of its optimizer state, and gathers a layer when it is needed.

Policy, critic, reference and reward model are sharded separately, layer by layer, because each is called by itself.
What is saved is the same as what one process saves.
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

#: glibc's number of this mallopt option, and the block size from which on mmap is used.
M_MMAP_THRESHOLD, MAPPED = -3, 2**20


def shard(model: nn.Module) -> None:
    """Shards a model's layers, then its remaining weights, in place.

    Args:
        model: The model. All processes must hold the same weights before.
    """
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    for layer in [module for module in model.modules() if type(module).__name__ in kinds]:
        fully_shard(layer)
    # Last, because it takes what no layer took: embeddings, the final norm and the head.
    fully_shard(model)


def return_memory() -> None:
    """Makes glibc return blocks of MAPPED bytes or more to the system when they are freed.

    By default it keeps what a CPU gathered and freed, layer by layer, in its heap: one of two processes that trained a
    model of 135M weights grew to 7.5 GiB, as much as without shards. On other systems this changes nothing.
    """
    libc = ctypes.CDLL(None)
    mallopt, trim = (getattr(libc, name, None) for name in ("mallopt", "malloc_trim"))
    if mallopt is not None and trim is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED)
        trim(0)  # returns what was freed before


@contextmanager
def unsharded(*models: Any) -> Iterator[None]:
    """Keeps all weights of models gathered while this context is open.

    A loop of sampling needs this: it ends earlier in some processes, and gathering needs all of them.

    Args:
        *models: The models; None is skipped.
    """
    parts = [each for model in models if model is not None for each in model.modules() if isinstance(each, FSDPModule)]
    for part in parts:
        # Otherwise the first forward pass would shard the weights again.
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(True, recurse=False)


def gather_tensor(tensor: Any) -> Tensor:
    """Gathers all of a tensor.

    Args:
        tensor: A tensor, or this process's shard of one.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else torch.as_tensor(tensor)


def gather_weights(model: nn.Module) -> dict[str, Any] | None:
    """Gathers all weights of a sharded model.

    Args:
        model: The model. All processes take part.

    Returns:
        The weights, in the first process, on the CPU; None for a model that is not sharded.
    """
    if not isinstance(model, FSDPModule):
        return None
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    # Tied weights are gathered separately, and would be saved twice.
    tied = getattr(model, "all_tied_weights_keys", {})
    return weights | {name: weights[of] for name, of in tied.items() if of in weights}


def load_gathered(model: nn.Module, weights: dict[str, Any]) -> None:
    """Loads all weights into a model that may be sharded.

    Args:
        model: The model.
        weights: All of its weights.
    """
    if isinstance(model, FSDPModule):
        set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    else:
        model.load_state_dict(weights)


def gather_optimizer(optimizer: Any, *, keep: bool) -> dict[str, Any] | None:
    """Gathers the state of an optimizer, as one process has it, on the CPU.

    Args:
        optimizer: An optimizer that may be sharded. All processes take part.
        keep: Whether this process wants it; the others hold one tensor at a time.

    Returns:
        The state, or None where `keep` is False.
    """
    sharded = optimizer.state_dict()
    state: dict[Any, dict[str, Any]] = {}
    for place, of in sharded["state"].items():
        for name, value in of.items():
            gathered = gather_tensor(value) if isinstance(value, Tensor) else value
            if keep:
                state.setdefault(place, {})[name] = gathered.cpu() if isinstance(gathered, Tensor) else gathered
    return {**sharded, "state": state} if keep else None


def shard_optimizer(optimizer: Any) -> None:
    """Shards an optimizer's state that was loaded as one process has it, in the way that its weights are sharded.

    Args:
        optimizer: The optimizer.
    """
    for weight, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == weight.shape and not isinstance(value, DTensor):
                state[name] = distribute_tensor(value, weight.device_mesh, weight.placements)
