"""The reference policy, against which KL is measured."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from ..errors import ZooError
from ..modeling.models import disable_dropout, is_peft

if TYPE_CHECKING:
    from peft import PeftModel


class Reference:
    """The frozen reference for KL: a separate model, or the policy with another adapter or without its adapter."""

    def __init__(
        self,
        policy: PreTrainedModel,
        model: PreTrainedModel | None = None,
        *,
        adapter: str | None = None,
        in_8bit: bool = False,
        in_bf16: bool = False,
    ) -> None:
        """Uses `model`. If it is None, uses a policy with an adapter itself, and copies any other policy.

        Args:
            policy: The policy.
            model: The reference; None to make one.
            adapter: The adapter with which the policy is the reference; None to turn the policy's adapter off.
            in_8bit: Whether to quantize the reference's linear layers to 8 bit.
            in_bf16: Whether to keep the copy in bfloat16 if that type represents each weight exactly, as it does for a
                policy that was saved in bfloat16.

        Raises:
            ZooError: `model` shares trained weights with the policy, the adapter is missing or in training, or 8 bit
                is not possible.
        """
        if model is not None and _shares_trained_weights(policy, model):
            raise ZooError("ref_model is the policy itself, which would be frozen: remove it, or pass a copy.")
        if adapter is not None and model is not None:
            raise ZooError(f"ref_adapter_name is {adapter!r} and ref_model is passed too: remove one of them.")
        if adapter is not None and (not is_peft(policy) or adapter not in policy.peft_config):
            raise ZooError(
                f"ref_adapter_name is {adapter!r}, but the policy has no such adapter: load it, or remove the key."
            )
        peft_policy: Any = policy
        if adapter is not None and adapter in peft_policy.active_adapters:
            raise ZooError(f"ref_adapter_name is {adapter!r}, the adapter in training: choose another.")
        self._adapter, self._is_policy = adapter, model is None and is_peft(policy)
        if self._is_policy:
            if in_8bit:
                raise ZooError("ref_load_in_8bit needs a separate reference: remove it, or pass ref_model.")
            model = policy
        elif in_8bit:
            model = _quantize_to_8bit(policy if model is None else model)
        elif model is None:
            # The copy is made before training starts, so the reference is the SFT policy.
            model = copy.deepcopy(policy)
            if in_bf16 and all(torch.equal(weight.bfloat16().to(weight), weight) for weight in model.parameters()):
                untyped_model: Any = model
                model = untyped_model.to(torch.bfloat16)
        # If the policy itself is the reference, its adapter is in training, so do not freeze it.
        if not self._is_policy:
            disable_dropout(model)
            model.requires_grad_(False).eval()
        self._model = model

    @contextmanager
    def model(self) -> Iterator[PreTrainedModel]:
        """Yields the model to run. The policy with another adapter is the reference only within this context."""
        model: Any = self._model
        if not self._is_policy:
            yield model
        else:
            with model.disable_adapter() if self._adapter is None else _switch_adapter(model, self._adapter):
                yield model

    @property
    def separate_model(self) -> PreTrainedModel | None:
        """The reference if it is a separate model; otherwise None."""
        return None if self._is_policy else self._model

    def to(self, device: torch.device | str) -> None:
        """Moves a separate reference, unless it is in 8 bit."""
        if not self._is_policy and not getattr(self._model, "is_loaded_in_8bit", False):
            move: Any = self._model.to
            move(device)


def _shares_trained_weights(policy: PreTrainedModel, model: PreTrainedModel) -> bool:
    """Whether `model` has a trained weight of the policy. Frozen weights, such as an adapter's base, may be shared."""
    reference_ids = {id(parameter) for parameter in model.parameters()}
    return model is policy or any(
        parameter.requires_grad and id(parameter) in reference_ids for parameter in policy.parameters()
    )


@contextmanager
def _switch_adapter(policy: PeftModel, adapter: str) -> Iterator[None]:
    """Activates an adapter in this context. peft's set_adapter also changes requires_grad, which is restored too."""
    trained_adapter = policy.active_adapter
    gradient_flags = [(parameter, parameter.requires_grad) for parameter in policy.parameters()]
    policy.set_adapter(adapter)
    try:
        yield
    finally:
        policy.set_adapter(trained_adapter)
        for parameter, requires_grad in gradient_flags:
            parameter.requires_grad_(requires_grad)


def _quantize_to_8bit(model: PreTrainedModel) -> PreTrainedModel:
    """Copies a model with 8-bit linear layers (LLM.int8(), arXiv:2208.07339), by saving and loading it."""
    from transformers import BitsAndBytesConfig
    from transformers.utils import is_bitsandbytes_available  # type: ignore[attr-defined]

    if not is_bitsandbytes_available():
        raise ZooError("ref_load_in_8bit needs bitsandbytes, which is not installed: pip install bitsandbytes.")
    if is_peft(model):
        # Merging changes the weights, so merge a copy of the user's model.
        peft_model: Any = copy.deepcopy(model)
        model = peft_model.merge_and_unload()
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        model_class: Any = type(model)
        return model_class.from_pretrained(directory, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
