"""Where the frozen models are, reference and reward models: on the device, or on the CPU while they do not run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import ZooError
from ..modeling.devices import temporarily_on_device
from ..modeling.fsdp import whole
from ..rewards import RewardModel
from .reference import Reference


def place(
    reference: Reference | None, rewards: Sequence[RewardModel], *, device: torch.device, training: nn.Module | None
) -> None:
    """Moves frozen models to the device, or with `training`, what trains, to the CPU: those that share nothing with it.

    Raises ZooError where none can wait there.
    """
    own = reference.own if reference is not None else None
    waiting = [] if training is None else _alone([own, *(reward.model for reward in rewards)], training)
    if training is not None and not waiting:
        raise ZooError(
            "offload_frozen has no model to move: none is frozen, in all of its bits, and without a weight of those in "
            "training; leave it out."
        )
    for part, model in ((reference, own), *((reward, reward.model) for reward in rewards)):
        if part is not None:
            part.to("cpu" if model in waiting else device)


def _alone(frozen: Sequence[PreTrainedModel | None], training: nn.Module) -> list[PreTrainedModel]:
    """Those that may move: a quantized one stays where it was loaded, one that shares weights stays with them."""
    taken = {id(weight) for weight in training.parameters()}
    models = [model for model in frozen if model is not None and not getattr(model, "is_quantized", False)]
    return [model for model in models if not taken & {id(weight) for weight in model.parameters()}]


@contextmanager
def at_hand(*frozen: PreTrainedModel | None, device: torch.device) -> Iterator[None]:
    """While open, these models hold all of their weights, on the device; afterwards each is where it was."""
    with whole(*frozen), temporarily_on_device(device, *frozen):
        yield
