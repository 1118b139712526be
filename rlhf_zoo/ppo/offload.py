"""Keeps frozen models (reference and reward models) on the device, or on the CPU while they do not run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import ZooError
from ..modeling.devices import temporarily_on_device
from ..modeling.fsdp import unsharded
from ..rewards import RewardModel
from .reference import Reference


def place(
    reference: Reference | None, rewards: Sequence[RewardModel], *, device: torch.device, training: nn.Module | None
) -> None:
    """Moves frozen models to the device, or to the CPU for offloading.

    Args:
        reference: The reference; None for none.
        rewards: The reward models.
        device: The device.
        training: The models in training, to offload frozen models that share no weight with them; None offloads none.

    Raises:
        ZooError: Nothing can be offloaded.
    """
    separate_reference = reference.own if reference is not None else None
    offloaded = (
        [] if training is None else _separate([separate_reference, *(reward.model for reward in rewards)], training)
    )
    if training is not None and not offloaded:
        raise ZooError(
            "offload_frozen has no model to move: every frozen model is quantized or shares weights with one in "
            "training; remove it."
        )
    for part, model in ((reference, separate_reference), *((reward, reward.model) for reward in rewards)):
        if part is not None:
            part.to("cpu" if model in offloaded else device)


def _separate(frozen: Sequence[PreTrainedModel | None], training: nn.Module) -> list[PreTrainedModel]:
    """Returns the models that may be moved: not quantized, and without shared weights."""
    # Moving a shared weight would move the policy off the device as well.
    trained_ids = {id(weight) for weight in training.parameters()}
    models = [model for model in frozen if model is not None and not getattr(model, "is_quantized", False)]
    return [model for model in models if not trained_ids & {id(weight) for weight in model.parameters()}]


@contextmanager
def on_device(*frozen: PreTrainedModel | None, device: torch.device) -> Iterator[None]:
    """Keeps models on the device with all of their weights while this context is open.

    Args:
        *frozen: The models; None is skipped.
        device: The device.
    """
    with unsharded(*frozen), temporarily_on_device(device, *frozen):
        yield
