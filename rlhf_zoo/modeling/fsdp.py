"""FSDP2: each process holds a shard of each weight and of its optimizer state, and gathers a layer before using it.

Policy, critic, reference and reward model are sharded separately, layer by layer, because each is called on its own.
Checkpoints are the same as those of a single process.
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

#: glibc's number for this option of mallopt, and its value: the size in bytes from which malloc uses mmap.
M_MMAP_THRESHOLD, MMAP_BYTES = -3, 2**20


def shard(model: nn.Module) -> None:
    """Shards a model's layers, then its remaining weights, in place.

    Args:
        model: The model. All processes must hold the same weights.
    """
    layer_classes = set(getattr(model, "_no_split_modules", None) or ())
    for layer in [module for module in model.modules() if type(module).__name__ in layer_classes]:
        fully_shard(layer)
    # Shard the model last: this shards the weights that are outside all layers (embeddings, final norm and head).
    fully_shard(model)


def return_freed_blocks() -> None:
    """Makes glibc return blocks of MMAP_BYTES bytes or more to the system when they are freed.

    By default, glibc may keep freed blocks in its heap. On a CPU, these include every gathered layer: one of two
    processes that trained a model of 135M weights grew to 7.5 GiB, as much as without sharding. Without glibc, this
    does nothing.
    """
    libc = ctypes.CDLL(None)
    mallopt, trim = (getattr(libc, name, None) for name in ("mallopt", "malloc_trim"))
    if mallopt is not None and trim is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
        trim(0)  # returns blocks that were freed earlier


@contextmanager
def unsharded(*models: nn.Module | None) -> Iterator[None]:
    """Keeps all weights of models gathered while this context is open.

    Sampling needs this: its loop ends earlier in some processes, but all processes must take part to gather a layer.

    Args:
        *models: The models; None is skipped.
    """
    every_module = (module for model in models if model is not None for module in model.modules())
    sharded_modules = [module for module in every_module if isinstance(module, FSDPModule)]
    for module in sharded_modules:
        # Otherwise the first forward pass would shard the weights again.
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in sharded_modules:
            module.reshard()
            module.set_reshard_after_forward(True, recurse=False)


def gather_tensor(tensor: Any) -> Tensor:
    """Gathers a tensor that may be sharded.

    Args:
        tensor: A tensor, or this process's shard of a tensor. All processes must take part.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else torch.as_tensor(tensor)


def gather_weights(model: nn.Module) -> dict[str, Any] | None:
    """Gathers all weights of a sharded model.

    Args:
        model: The model. All processes must take part.

    Returns:
        {name: weight} on the CPU in the main process, {} in the others; None for a model that is not sharded.
    """
    if not isinstance(model, FSDPModule):
        return None
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    # Tied weights were gathered separately. Make them the same tensor again, or they would be saved twice.
    tied_names = getattr(model, "all_tied_weights_keys", {})
    return weights | {name: weights[source] for name, source in tied_names.items() if source in weights}


def load_gathered(model: nn.Module, weights: dict[str, Any]) -> None:
    """Loads a complete state dict into a model that may be sharded."""
    if isinstance(model, FSDPModule):
        set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    else:
        model.load_state_dict(weights)


def gather_optimizer(optimizer: Any, *, keep: bool) -> dict[str, Any] | None:
    """Gathers the state of an optimizer on the CPU, in the form of a single process's state.

    Args:
        optimizer: An optimizer that may be sharded. All processes must take part.
        keep: Whether this process returns the state. If not, it holds only one gathered tensor at a time.

    Returns:
        The state, or None where `keep` is False.
    """
    sharded_state_dict = optimizer.state_dict()
    state: dict[Any, dict[str, Any]] = {}
    for index, parameter_state in sharded_state_dict["state"].items():
        for name, value in parameter_state.items():
            value = gather_tensor(value) if isinstance(value, Tensor) else value
            if keep:
                state.setdefault(index, {})[name] = value.cpu() if isinstance(value, Tensor) else value
    return {**sharded_state_dict, "state": state} if keep else None


def shard_optimizer(optimizer: Any) -> None:
    """Shards an optimizer's state in the same way as its weights.

    Args:
        optimizer: The optimizer, into which the state of a single process was loaded.
    """
    for weight, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == weight.shape and not isinstance(value, DTensor):
                state[name] = distribute_tensor(value, weight.device_mesh, weight.placements)
