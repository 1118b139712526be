"""Keeps frozen models (reference and reward models) on the device, or on the CPU between their passes."""

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


def place_frozen_models(
    reference: Reference | None,
    rewards: Sequence[RewardModel],
    *,
    device: torch.device,
    trained: nn.Module,
    offload: bool,
) -> None:
    """Moves frozen models to the device on which they stay between their passes: the CPU if they are offloaded.

    Args:
        reference: The reference; None without one.
        rewards: The reward models.
        device: The device on which the policy is trained.
        trained: The models in training.
        offload: Whether to offload frozen models, except quantized models and those that share weights with `trained`.

    Raises:
        ZooError: `offload` is True, but no model can be offloaded.
    """
    separate_reference = reference.separate_model if reference is not None else None
    frozen_models = [separate_reference, *(reward.model for reward in rewards)]
    offloaded_models = _offloadable_models(frozen_models, trained) if offload else []
    if offload and not offloaded_models:
        raise ZooError(
            "offload_frozen has no model to move, because every frozen model is quantized or shares weights with a "
            "model in training: remove it."
        )
    for owner, model in ((reference, separate_reference), *((reward, reward.model) for reward in rewards)):
        if owner is not None:
            owner.to("cpu" if model in offloaded_models else device)


def _offloadable_models(frozen_models: Sequence[PreTrainedModel | None], trained: nn.Module) -> list[PreTrainedModel]:
    """Returns the models that are not quantized and share no weight with the trained models."""
    # Offloading a shared weight would move a part of the policy off the device.
    trained_ids = {id(weight) for weight in trained.parameters()}
    models = [model for model in frozen_models if model is not None and not getattr(model, "is_quantized", False)]
    return [model for model in models if not trained_ids & {id(weight) for weight in model.parameters()}]


@contextmanager
def on_device(*models: PreTrainedModel | None, device: torch.device) -> Iterator[None]:
    """Keeps models on the device, unsharded, while this context is open.

    Args:
        *models: The models; None is skipped.
        device: The device on which the policy is trained.
    """
    with unsharded(*models), temporarily_on_device(device, *models):
        yield
