"""FSDP2: every process holds a shard of each weight, and of its optimizer state, and gathers a layer when it is due.

Policy, critic, reference and reward model are sharded apart, layer by layer: each is called by itself. What is saved is
what one process saves.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(model: nn.Module) -> None:
    """Shards a model's layers, then what is left of it, in place. All processes hold the same weights before."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    for layer in [module for module in model.modules() if type(module).__name__ in kinds]:
        fully_shard(layer)
    fully_shard(model)


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


def full_optimizer(optimizer: Any) -> dict[str, Any]:
    """The state of an optimizer as one process has it."""
    found = optimizer.state_dict()
    state = {
        place: {name: full(value).cpu() if isinstance(value, Tensor) else value for name, value in of.items()}
        for place, of in found["state"].items()
    }
    return {**found, "state": state}


def shard_optimizer(optimizer: Any) -> None:
    """Shards a state that was loaded as one process has it, as its weights are sharded."""
    for weight, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == weight.shape and not isinstance(value, DTensor):
                state[name] = distribute_tensor(value, weight.device_mesh, weight.placements)
