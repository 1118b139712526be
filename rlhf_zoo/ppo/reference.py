"""The reference policy: what KL is measured against."""

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import ZooError
from ..modeling.models import disable_dropout, is_peft


class Reference:
    """The frozen policy that KL is measured against: a copy, or the policy with another adapter or none."""

    def __init__(
        self,
        policy: PreTrainedModel,
        model: PreTrainedModel | None = None,
        *,
        adapter: str | None = None,
        in_8bit: bool = False,
        in_bf16: bool = False,
    ) -> None:
        """Makes the reference where none is given: a PeftModel's other adapter or base, else a copy of the policy.

        Args:
            policy: the model in training.
            model: the reference; None makes one.
            adapter: of the policy, which then is the reference with this adapter.
            in_8bit: whether its linear layers are held in 8 bit.
            in_bf16: whether a copy is held in bfloat16, if that holds each of its weights exactly, as where the policy
                was saved so.

        Raises:
            ZooError: `model` is the policy itself, or the base that its adapter was put into, which would be frozen
                with it; the adapter is missing or is the one in training; or 8 bit has no bitsandbytes or nothing to
                hold.
        """
        if model is not None and _share(policy, model):
            raise ZooError("ref_model is the policy itself, so nothing could train: leave it out, or give a copy.")
        if adapter is not None and model is not None:
            raise ZooError(f"ref_adapter_name is {adapter!r} and ref_model is given too: give one reference.")
        if adapter is not None and (not is_peft(policy) or adapter not in policy.peft_config):
            raise ZooError(
                f"ref_adapter_name is {adapter!r}, and the policy has no such adapter: load it, or leave it out."
            )
        adapted: Any = policy
        if adapter is not None and adapter in adapted.active_adapters:
            raise ZooError(f"ref_adapter_name is {adapter!r}, the adapter in training: give the reference another.")
        self._adapted: Any = None
        self._adapter = adapter
        if model is None and is_peft(policy):
            if in_8bit:
                raise ZooError("ref_load_in_8bit is for a reference of its own: leave it out, or give ref_model.")
            self._adapted, model = policy, policy
        elif in_8bit:
            model = _in_8bit(policy if model is None else model)
        elif model is None:
            model = copy.deepcopy(policy)
            if in_bf16 and all(torch.equal(weight.bfloat16().to(weight), weight) for weight in model.parameters()):
                half: Any = model
                model = half.to(torch.bfloat16)
        if self._adapted is None:
            disable_dropout(model)
            model.requires_grad_(False).eval()
        self._model = model

    @contextmanager
    def model(self) -> Iterator[PreTrainedModel]:
        """The model to run, while the context is open."""
        if self._adapted is None:
            yield self._model
        elif self._adapter is None:
            with self._adapted.disable_adapter():
                yield self._model
        else:
            with _switched(self._adapted, self._adapter):
                yield self._model

    @property
    def own(self) -> PreTrainedModel | None:
        """The reference where it is a model of its own."""
        return self._model if self._adapted is None else None

    def to(self, device: torch.device | str) -> None:
        if self._adapted is None and not getattr(self._model, "is_loaded_in_8bit", False):
            move: Any = self._model.to
            move(device)


def _share(policy: PreTrainedModel, model: PreTrainedModel) -> bool:
    """Whether a weight that trains is one of `model`'s too; a frozen base may serve both."""
    theirs = {id(parameter) for parameter in model.parameters()}
    return model is policy or any(p.requires_grad and id(p) in theirs for p in policy.parameters())


@contextmanager
def _switched(policy: Any, adapter: str) -> Iterator[None]:
    """The policy with `adapter` active; set_adapter also decides what trains, so that is put back as it was."""
    trained = policy.active_adapter
    flags = [(parameter, parameter.requires_grad) for parameter in policy.parameters()]
    policy.set_adapter(adapter)
    try:
        yield
    finally:
        policy.set_adapter(trained)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def _in_8bit(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of `model` with linear layers in 8 bit (LLM.int8(), arXiv:2208.07339), by way of a file."""
    from transformers import BitsAndBytesConfig
    from transformers.utils import is_bitsandbytes_available  # type: ignore[attr-defined]

    if not is_bitsandbytes_available():
        raise ZooError("ref_load_in_8bit needs bitsandbytes, which is not installed: pip install bitsandbytes.")
    if is_peft(model):
        adapted: Any = copy.deepcopy(model)
        model = adapted.merge_and_unload()
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        kind: Any = type(model)
        return kind.from_pretrained(directory, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
