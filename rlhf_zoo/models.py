"""The models of PPO, loaded and made: policy, reward model and critic."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
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
from .sampling import Samples

__all__ = [
    "CRITIC_DIR",
    "build_causal",
    "critic_from",
    "disable_dropout",
    "is_peft",
    "load_causal",
    "load_classifier",
    "matrix_parameters",
    "response_values",
    "score_statistics",
    "set_score_statistics",
    "with_adapter",
]

CRITIC_DIR = "critic"
ADAPTER_CONFIG = "adapter_config.json"
HEADS = ("score", "classifier")
CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")


def load_causal(path: str | Path, **kwargs: Any) -> PreTrainedModel:
    """A causal language model in float32; an adapter checkpoint is merged into its base.

    Raises ZooError for what is none, also for a reward model, whose trunk alone would load.
    """
    kwargs.setdefault("dtype", torch.float32)
    adapter = Path(path) / ADAPTER_CONFIG
    if adapter.is_file() and not json.loads(adapter.read_text()).get("base_model_name_or_path"):
        raise ZooError(f"The adapter in {path} names no base model: put it on its base and give the two merged.")
    try:
        model = AutoModelForCausalLM.from_pretrained(path, **kwargs)
    except (OSError, ValueError) as error:
        raise ZooError(
            f"The model {path} cannot be loaded as a causal language model ({_first_line(error)})."
        ) from error
    kinds = getattr(model.config, "architectures", None) or []
    if kinds and all(str(kind).endswith(CLASSIFIERS) for kind in kinds):
        raise ZooError(f"The model {path} is a {kinds[0]}, which writes nothing: give a policy, not a reward model.")
    if getattr(model, "peft_config", None):
        from peft import AutoPeftModelForCausalLM

        model = AutoPeftModelForCausalLM.from_pretrained(path, **kwargs).merge_and_unload()
        model.name_or_path = ""  # its base lies there, and these are other weights: no adapter may name it
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
        model, info = AutoModelForSequenceClassification.from_pretrained(path, output_loading_info=True, **kwargs)
    except (OSError, ValueError) as error:
        raise ZooError(f"The reward model {path} cannot be loaded ({_first_line(error)}).") from error
    if model.config.num_labels != 1:
        raise ZooError(
            f"The reward model {path} has {model.config.num_labels} outputs, and a reward model has one: give a model "
            "with num_labels=1."
        )
    if fresh := sorted(key for key in info["missing_keys"] if key.split(".")[0] in HEADS):
        raise ZooError(
            f"The reward model {path} has no trained head ({fresh[0]} is missing from its weights), so its scores "
            "would be random: train it first, or give another."
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


def matrix_parameters(model: PreTrainedModel) -> int:
    """N, the parameters that a token is multiplied by: all but a table of embeddings, which is only looked up.

    Embeddings that are tied to the output count once, as the matrix of logits.
    """
    count = sum(parameter.numel() for parameter in model.parameters())
    table: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    if table is None or (head is not None and head.weight is table.weight):
        return count
    return count - table.weight.numel()


def is_peft(model: nn.Module) -> bool:
    return hasattr(model, "disable_adapter") and hasattr(model, "peft_config")


def score_statistics(model: PreTrainedModel) -> tuple[float, float]:
    """(μ, σ) of a reward model's raw scores, kept in its config; (0, 1) when they were never measured."""
    kept = getattr(model.config, "rlhf_zoo", None) or {}
    return float(kept.get("score_mean", 0.0)), float(kept.get("score_std", 1.0))


def set_score_statistics(model: PreTrainedModel, *, mean: float, std: float, over: str) -> None:
    """Stores (μ, σ) and the texts that they were measured over in the model's config, saved with it."""
    model.config.rlhf_zoo = {"score_mean": mean, "score_std": std, "score_statistics_over": over}


def _head(model: PreTrainedModel) -> nn.Linear:
    for name in HEADS:
        head = getattr(model, name, None)
        if isinstance(head, nn.Linear):
            return head
    raise ZooError(
        f"{type(model).__name__} has no linear head named 'score' or 'classifier': it cannot serve as critic; give a "
        "value_model."
    )


def critic_from(source: PreTrainedModel | str | Path, *, center: bool = True, scale: bool = True) -> PreTrainedModel:
    """A critic, one value per token: a token classifier with one output, so that any transformers release loads it.

    From a reward model it takes trunk and head; scores shaped as (s−μ)/σ make the head W/σ and its bias −μ/σ, with μ
    only if they are centred and σ only if they are scaled. N+ (arXiv:2403.17031) detail 22. From a causal model it
    takes the trunk, and its head starts at 0. A path or Hub id is loaded, as a critic where it is one; a critic's
    adapter is merged into its base. Raises ZooError for a model without a token classifier.
    """
    if not isinstance(source, PreTrainedModel):
        if (Path(source) / ADAPTER_CONFIG).is_file():
            return _merged_critic(Path(source))
        try:
            config = AutoConfig.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise ZooError(f"The critic {source} cannot be loaded ({_first_line(error)}).") from error
        architecture = (config.architectures or [""])[0]
        if architecture.endswith("ForTokenClassification"):
            return AutoModelForTokenClassification.from_pretrained(source, dtype=torch.float32)
        loader = load_classifier if architecture.endswith("ForSequenceClassification") else load_causal
        return critic_from(loader(source), center=center, scale=scale)
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
    critic.name_or_path = source.name_or_path  # what an adapter of the critic will name as its base
    target = _head(critic)
    with torch.no_grad():
        target.weight.zero_()
        if target.bias is not None:
            target.bias.zero_()
        if type(source).__name__.endswith("ForSequenceClassification"):
            mean, std = score_statistics(source)
            mean, std = mean if center else 0.0, std if scale else 1.0
            target.weight.copy_(_head(source).weight / std)
            if target.bias is not None:
                target.bias.fill_(-mean / std)
    config.rlhf_zoo = None
    return critic


def _merged_critic(directory: Path) -> PreTrainedModel:
    from peft import PeftConfig, PeftModel

    base = PeftConfig.from_pretrained(str(directory)).base_model_name_or_path
    if not base:
        raise ZooError(f"The critic's adapter in {directory} names no base model: give value_model its base instead.")
    return PeftModel.from_pretrained(critic_from(base), str(directory)).merge_and_unload()


def with_adapter(model: PreTrainedModel, peft_config: Any) -> Any:
    """A critic under an adapter like the policy's, whose head trains in full beside it.

    peft_config: the policy's, which is left as it is. Returns a PeftModel. Raises ZooError if it does not fit the
    critic.
    """
    from peft import get_peft_model

    head = next(name for name in HEADS if hasattr(model, name))
    config = copy.deepcopy(peft_config)
    config.task_type = "TOKEN_CLS"
    config.inference_mode = False
    config.base_model_name_or_path = None  # peft takes the critic's own
    config.modules_to_save = sorted({*(config.modules_to_save or ()), head} - {"lm_head", "embed_out"})
    if getattr(config, "exclude_modules", head) is None:
        config.exclude_modules = [head]
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise ZooError(
            f"The policy's adapter does not fit the critic, a {type(model).__name__} "
            f"({_first_line(error).split('. ')[0]}): set critic_lora=False, or give a value_model of the policy's "
            "architecture."
        ) from error


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
