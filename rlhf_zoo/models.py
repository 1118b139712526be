"""The models of PPO: policy, reference, reward model and critic, loaded, prepared and saved."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .errors import ZooError
from .sampling import Samples, response_logits

__all__ = [
    "CRITIC_DIR",
    "ActorCritic",
    "Reference",
    "build_causal",
    "critic_from",
    "disable_dropout",
    "is_peft",
    "load_causal",
    "load_classifier",
    "response_values",
    "score_statistics",
    "set_score_statistics",
]

CRITIC_DIR = "critic"


def load_causal(path: str | Path, **kwargs: Any) -> PreTrainedModel:
    """A causal language model in float32; an adapter checkpoint is merged into its base."""
    kwargs.setdefault("dtype", torch.float32)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, **kwargs)
    except (OSError, ValueError) as error:
        raise ZooError(
            f"The model {path} cannot be loaded as a causal language model ({_first_line(error)})."
        ) from error
    if getattr(model, "peft_config", None):
        from peft import AutoPeftModelForCausalLM

        model = AutoPeftModelForCausalLM.from_pretrained(path, **kwargs).merge_and_unload()
    return model


def build_causal(architecture: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A causal language model with random weights. architecture: `model_type` and fields of its configuration.

    Raises ZooError for an architecture that transformers does not know or cannot build.
    """
    fields = dict(architecture)
    kind = fields.pop("model_type", None)
    try:
        config = AutoConfig.for_model(
            kind,
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=tokenizer.bos_token_id,
            **fields,
        )
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise ZooError(f"The architecture {dict(architecture)} cannot be built ({_first_line(error)}).") from error


def load_classifier(path: str | Path, **kwargs: Any) -> PreTrainedModel:
    """A reward model: one score per sequence, in float32. Raises ZooError if it has another number of outputs."""
    kwargs.setdefault("dtype", torch.float32)
    try:
        model = AutoModelForSequenceClassification.from_pretrained(path, **kwargs)
    except (OSError, ValueError) as error:
        raise ZooError(f"The reward model {path} cannot be loaded ({_first_line(error)}).") from error
    if model.config.num_labels != 1:
        raise ZooError(
            f"The reward model {path} has {model.config.num_labels} outputs, and a reward model has one: give a model "
            "with num_labels=1."
        )
    return model


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__


def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout probability to 0, in modules and in the attributes that functional dropout reads.

    N+ (arXiv:2403.17031) detail 20: with dropout on, the ratio of the first pass is not 1.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def is_peft(model: nn.Module) -> bool:
    return hasattr(model, "disable_adapter") and hasattr(model, "peft_config")


def score_statistics(model: PreTrainedModel) -> tuple[float, float]:
    """(μ, σ) of a reward model's raw scores, kept in its config; (0, 1) when they were never measured."""
    kept = getattr(model.config, "rlhf_zoo", None) or {}
    return float(kept.get("score_mean", 0.0)), float(kept.get("score_std", 1.0))


def set_score_statistics(model: PreTrainedModel, *, mean: float, std: float, over: str) -> None:
    """Stores (μ, σ) and the texts that they were measured over in the model's config, saved with it."""
    model.config.rlhf_zoo = {"score_mean": mean, "score_std": std, "score_statistics_over": over}


class Reference:
    """The frozen policy that KL is measured against: a copy, or the policy with its adapter switched off."""

    def __init__(self, policy: PreTrainedModel, model: PreTrainedModel | None = None) -> None:
        """`model` None makes it: the base under the policy's adapter if it has one, else a copy of the policy.

        Raises ZooError if `model` is the policy itself, which would be frozen with it.
        """
        if model is policy:
            raise ZooError("ref_model is the policy itself, so nothing could train: leave it out, or give a copy.")
        self._adapter_off: PreTrainedModel | None = None
        if model is None and is_peft(policy):
            self._adapter_off, model = policy, policy
        elif model is None:
            model = copy.deepcopy(policy)
        if self._adapter_off is None:
            disable_dropout(model)
            model.requires_grad_(False).eval()
        self._model = model

    @contextmanager
    def model(self) -> Iterator[PreTrainedModel]:
        """The model to run, while the context is open."""
        adapted: Any = self._adapter_off
        switch: AbstractContextManager = nullcontext() if adapted is None else adapted.disable_adapter()
        with switch:
            yield self._model

    def to(self, device: torch.device | str) -> None:
        if self._adapter_off is None:
            move: Any = self._model.to
            move(device)


def _head(model: PreTrainedModel) -> nn.Linear:
    for name in ("score", "classifier"):
        head = getattr(model, name, None)
        if isinstance(head, nn.Linear):
            return head
    raise ZooError(
        f"{type(model).__name__} has no linear head named 'score' or 'classifier': it cannot serve as critic; give a "
        "value_model."
    )


def critic_from(source: PreTrainedModel | str | Path) -> PreTrainedModel:
    """A critic, one value per token: a token classifier with one output, so that any transformers release loads it.

    From a reward model it takes trunk and head; scores shaped as (s−μ)/σ make the head W/σ and its bias −μ/σ. N+
    (arXiv:2403.17031) detail 22. From a causal model it takes the trunk, and its head starts at 0. A path or Hub id is
    loaded, as a critic where it is one. Raises ZooError for a model without a token classifier.
    """
    if not isinstance(source, PreTrainedModel):
        config = AutoConfig.from_pretrained(source)
        architecture = (config.architectures or [""])[0]
        if architecture.endswith("ForTokenClassification"):
            return AutoModelForTokenClassification.from_pretrained(source, dtype=torch.float32)
        loader = load_classifier if architecture.endswith("ForSequenceClassification") else load_causal
        return critic_from(loader(source))
    if type(source).__name__.endswith("ForSequenceClassification") and source.config.num_labels != 1:
        raise ZooError(
            f"A critic needs one output, and this {type(source).__name__} has {source.config.num_labels}: give a "
            "value_model with num_labels=1."
        )
    config = copy.deepcopy(source.config)
    config.num_labels = 1
    try:
        critic = AutoModelForTokenClassification.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise ZooError(
            f"transformers has no token classifier for {config.model_type}, which the critic needs: give a value_model "
            "of another architecture with the same tokenizer."
        ) from error
    critic.base_model.load_state_dict(source.base_model.state_dict())
    target = _head(critic)
    with torch.no_grad():
        target.weight.zero_()
        if target.bias is not None:
            target.bias.zero_()
        if type(source).__name__.endswith("ForSequenceClassification"):
            mean, std = score_statistics(source)
            target.weight.copy_(_head(source).weight / std)
            if target.bias is not None:
                target.bias.fill_(-mean / std)
    config.rlhf_zoo = None
    return critic


def response_values(critic: PreTrainedModel, samples: Samples) -> Tensor:
    """V of the state before each response token. Returns (B, T) float32; what lies outside the mask is meaningless."""
    length = samples.mask.shape[1]
    seen = torch.cat([samples.prompt_mask, samples.mask], dim=1)
    out = critic(
        input_ids=torch.cat([samples.prompt_ids, samples.completion_ids], dim=1),
        attention_mask=seen.long(),
        position_ids=(seen.long().cumsum(-1) - 1).clamp(min=0),
        use_cache=False,
    )
    return out.logits[:, -length - 1 : -1, 0].float()


class ActorCritic(nn.Module):
    """Policy and critic as one module, so that one wrapper (DDP, FSDP) and one optimizer serve both."""

    def __init__(self, policy: PreTrainedModel, critic: PreTrainedModel) -> None:
        super().__init__()
        self.policy = policy
        self.value_model = critic
        disable_dropout(self)

    def forward(self, samples: Samples, temperature: float) -> tuple[Tensor, Tensor]:
        """Policy logits (B, T, V) at `temperature` and values (B, T) of the response positions."""
        return response_logits(self.policy, samples, temperature=temperature), response_values(
            self.value_model, samples
        )

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        for model in (self.policy, self.value_model):
            model.activation_checkpointing_enable(**kwargs)

    def save_pretrained(self, directory: str | Path) -> None:
        """The policy as a plain checkpoint in `directory`, the critic in `directory/critic`."""
        self.policy.save_pretrained(directory)
        self.value_model.save_pretrained(Path(directory) / CRITIC_DIR)

    def load_checkpoint(self, directory: str | Path) -> None:
        """Loads what `save_pretrained` wrote into these very modules, bit for bit."""
        _load_into(self.policy, Path(directory))
        _load_into(self.value_model, Path(directory) / CRITIC_DIR)


def _load_into(model: PreTrainedModel, directory: Path) -> None:
    """Copies a checkpoint's weights into `model`, whose parameters an optimizer may hold already.

    `from_pretrained` reads them: some architectures are saved under other names than their modules have.
    """
    if is_peft(model):
        from peft import load_peft_weights, set_peft_model_state_dict

        set_peft_model_state_dict(model, load_peft_weights(str(directory), device="cpu"))
        return
    kind: Any = type(model)
    try:
        loaded, info = kind.from_pretrained(
            directory,
            config=model.config,
            dtype=model.dtype,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except OSError as error:
        raise ZooError(f"{directory} holds no model*.safetensors: it is not a checkpoint; choose another.") from error
    misfits = [key for name in ("unexpected_keys", "missing_keys", "mismatched_keys") for key in sorted(info[name])]
    if misfits:
        names = ", ".join(key if isinstance(key, str) else key[0] for key in misfits[:3])
        raise ZooError(
            f"{directory} does not fit this {type(model).__name__} ({names}): it is another model's checkpoint."
        )
    model.load_state_dict(loaded.state_dict())
