"""Makes the critic, a token classifier with one output, from a reward model, a policy or a checkpoint."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, MODEL_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_layers import GenericForTokenClassification

from ..errors import ZooError, first_line
from .loading import load_config, load_model
from .logprobs import response_outputs
from .model_files import find_model_files
from .models import HEADS, base_of_adapter, load_causal, load_classifier, merge_adapter, score_statistics
from .sampling.sampler import Samples

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

CRITIC_DIR = "critic"


def _find_linear_head(model: PreTrainedModel) -> nn.Linear:
    for name in HEADS:
        head = getattr(model, name, None)
        if isinstance(head, nn.Linear):
            return head
    raise ZooError(
        f"{type(model).__name__} has no linear head named 'score' or 'classifier', so it cannot be the critic: pass a "
        "value_model."
    )


@cache
def _token_classifier(config_class: Any, remote_trunk_class: Any = None) -> Any:
    """Returns a model family's token classifier: its own class in transformers, or a generic class on its trunk.

    Args:
        config_class: The class of the model's configuration.
        remote_trunk_class: The trunk's class if it is defined in the model's remote code, otherwise None. In either
            case, critic checkpoints have the usual layout: the trunk loads as AutoModel, and the head is `score.*`.
    """
    if config_class in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        return MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[config_class]
    if remote_trunk_class is not None:
        # The generic class looks up its trunk in this mapping.
        MODEL_MAPPING.register(config_class, remote_trunk_class, exist_ok=True)
    if config_class not in MODEL_MAPPING:
        raise ZooError(
            f"transformers has no trunk for {config_class.model_type}, which the critic needs: pass a value_model."
        )
    # Many families have no token classifier, so derive a class from the generic token classifier.
    trunk: Any = MODEL_MAPPING[config_class]
    # The family's own base class defines how weights are initialized and which layers must not be split.
    family_base = next(base for base in trunk.__mro__ if PreTrainedModel in base.__bases__)
    family_base = PreTrainedModel if family_base is trunk else family_base
    name = f"{trunk.__name__.removesuffix('Model')}ForTokenClassification"
    # transformers reads the class's module to see which kernels the family supports.
    attributes = {"base_model_prefix": family_base.base_model_prefix or "model", "config_class": config_class}
    attributes["__module__"] = trunk.__module__
    return type(name, (GenericForTokenClassification, family_base), attributes)


def _has_remote_code(config: PretrainedConfig) -> bool:
    """Whether the configuration is defined in the model's remote code."""
    return type(config).__module__.startswith("transformers_modules.")


def _remote_trunk_class(config: PretrainedConfig, source: str | Path, revision: str | None) -> Any:
    """Finds the trunk's class in the remote code of a saved critic; None if transformers defines the class."""
    auto_map = getattr(config, "auto_map", None) or {}
    auto_classes = ("AutoModelForCausalLM", "AutoModelForSequenceClassification")
    name = next((auto_map[auto_class] for auto_class in auto_classes if auto_class in auto_map), None)
    if name is None or not _has_remote_code(config):
        return None
    model_class: Any = get_class_from_dynamic_module(name, source, revision=revision)
    # Only an instance knows the class of its trunk. On the meta device, an instance takes no memory.
    with torch.device("meta"):
        return type(model_class._from_config(copy.deepcopy(config)).base_model)


def critic_from(
    source: PreTrainedModel | str | Path,
    *,
    center: bool = True,
    scale: bool = True,
    weight: float = 1.0,
    share: bool = False,
    revision: str | None = None,
) -> PreTrainedModel:
    """Makes a critic: a token classifier with one output.

    If `source` is a reward model, the critic starts with its trunk and head, and the head is scaled to the shaped score
    w·(s−μ)/σ of s = W·h + b: its weight is w·W/σ and its bias w·(b−μ)/σ. If `source` is a causal model, the critic
    starts with its trunk and a head of 0.

    Args:
        source: A reward model or a causal model; or the folder or Hub id of either, or of a critic. A critic is loaded
            unchanged. Adapters are merged into their bases.
        center: Whether the reward model's scores are centered. If not, μ = 0.
        scale: Whether the reward model's scores are scaled. If not, σ = 1.
        weight: w, the weight of the reward model's score in the reward.
        share: Whether the critic shares the trunk's weights with `source`. Then the two must not be trained together.
        revision: The revision of a Hub id.

    Returns:
        The critic, in float32 except for a shared trunk, which keeps its type.

    Raises:
        ZooError: The model is an encoder-decoder, whose encoder would see later tokens; it has several outputs, or
            weights between trunk and head; or it cannot be loaded.

    Source: "The N+ Implementation Details of RLHF with PPO" (arXiv:2403.17031), detail 22.
    """
    if not isinstance(source, PreTrainedModel):
        source, is_critic = _load_source(source, revision)
        if is_critic:
            return source
    is_reward_model = type(source).__name__.endswith("ForSequenceClassification")
    if is_reward_model and source.config.num_labels != 1:
        raise ZooError(
            f"A critic needs one output, but this {type(source).__name__} has {source.config.num_labels}: pass a "
            "value_model with num_labels=1."
        )
    if source.config.is_encoder_decoder:
        raise ZooError(
            f"A {type(source).__name__} has an encoder, which would see tokens after the state whose value it "
            "computes: pass a value_model without an encoder."
        )
    config = copy.deepcopy(source.config)
    config.num_labels = 1
    trunk_class = type(source.base_model) if _has_remote_code(config) else None
    # Build the critic in float32, because bfloat16 would round away small updates.
    critic_class = _token_classifier(type(config), trunk_class)  # type: ignore[arg-type]
    critic = critic_class._from_config(config, dtype=torch.float32)
    _copy_trunk(source, critic, is_reward_model=is_reward_model, share=share)
    critic.name_or_path = source.name_or_path  # peft records it as the base of a later adapter
    head = _find_linear_head(critic)
    with torch.no_grad():
        # V starts at 0, unless a reward model sets the head below.
        head.weight.zero_()
        if head.bias is not None:
            head.bias.zero_()
        if is_reward_model:
            mean, std = score_statistics(source)
            mean, std = mean if center else 0.0, std if scale else 1.0
            reward_head = _find_linear_head(source)
            head.weight.copy_(weight * reward_head.weight / std)
            if head.bias is not None:
                bias = 0.0 if reward_head.bias is None else float(reward_head.bias)
                head.bias.fill_(weight * (bias - mean) / std)
    # The head's weights now contain the statistics. Remove them, or a loader of reward models would apply them again.
    config.rlhf_zoo = None
    return critic


def _load_source(source: str | Path, revision: str | None) -> tuple[PreTrainedModel, bool]:
    """Loads a critic, a reward model or a causal model. Returns it and whether it is a critic."""
    subject = f"The critic {source}"
    files = find_model_files(source, revision=revision)
    if files.adapter_config is not None:
        task_or_architecture = files.adapter_config.get("task_type")
        if task_or_architecture == "TOKEN_CLS":
            base, base_revision = base_of_adapter(files)
            return merge_adapter(critic_from(base, revision=base_revision), files), True
    else:
        config = load_config(source, subject=subject, revision=revision)
        task_or_architecture = (config.architectures or [""])[0]
        if task_or_architecture.endswith("ForTokenClassification"):
            critic_class = _token_classifier(type(config), _remote_trunk_class(config, source, revision))  # type: ignore[arg-type]
            return load_model(critic_class, source, subject=subject, revision=revision), True
    is_reward_model = task_or_architecture == "SEQ_CLS" or str(task_or_architecture).endswith(
        "ForSequenceClassification"
    )
    loader: Any = load_classifier if is_reward_model else load_causal
    return loader(source, revision=revision), False


def _copy_trunk(source: PreTrainedModel, critic: PreTrainedModel, *, is_reward_model: bool, share: bool) -> None:
    """Copies the weights of a model's trunk into a critic, or shares them.

    Raises:
        ZooError: The model has more than a trunk and a linear head, so the critic would lack weights.
    """
    problem = _weight_before_head(source) if is_reward_model else None
    try:
        critic.base_model.load_state_dict(source.base_model.state_dict())
    except RuntimeError as error:  # names or shapes differ
        problem = first_line(error)
    if problem is not None:
        raise ZooError(
            f"A {type(source).__name__} has more than a linear head on a trunk of {source.config.model_type} "
            f"({problem}), so a critic could not start at its scores: pass a value_model."
        )
    if share:
        # load_state_dict has copied the values. To share memory, both trunks need the same parameter objects.
        for name, parameter in source.base_model.named_parameters():
            module, _, leaf = name.rpartition(".")
            setattr(critic.base_model.get_submodule(module), leaf, parameter)


def _weight_before_head(source: PreTrainedModel) -> str | None:
    """Returns the name of a weight between a classifier's trunk and linear head; None if there is no such weight."""
    trunk_and_heads = (source.base_model_prefix, *HEADS)
    return next((name for name, _ in source.named_parameters() if name.split(".")[0] not in trunk_and_heads), None)


def add_adapter(model: PreTrainedModel, peft_config: PeftConfig) -> PeftModel:
    """Adds an adapter to the critic, configured like the policy's adapter. The critic's head is trained in full.

    Args:
        model: The critic.
        peft_config: The policy's adapter configuration, which is not changed.

    Returns:
        A PeftModel.

    Raises:
        ZooError: The adapter's configuration does not fit the critic.
    """
    from peft import get_peft_model

    head = next(name for name in HEADS if hasattr(model, name))
    config: Any = copy.deepcopy(peft_config)
    config.task_type = "TOKEN_CLS"
    # A loaded adapter's configuration may have inference_mode=True, which would freeze the critic's adapter.
    config.inference_mode = False
    config.base_model_name_or_path = None  # peft fills in the critic's name
    # The critic has no LM head, which the policy's adapter may train in full.
    config.modules_to_save = sorted({*(config.modules_to_save or ()), head} - {"lm_head", "embed_out"})
    # The head is trained in full, so it must not get a low-rank adapter too.
    if getattr(config, "exclude_modules", head) is None:
        config.exclude_modules = [head]
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise ZooError(
            f"The policy's adapter does not fit the critic, a {type(model).__name__} "
            f"({first_line(error).split('. ')[0]}): set critic_lora=False, or pass a value_model of the policy's "
            "architecture."
        ) from error


def response_values(critic: PreTrainedModel, samples: Samples) -> Tensor:
    """Computes V of the state before each response token.

    Args:
        critic: The critic.
        samples: B prompts with completions.

    Returns:
        (B, T) float32, undefined outside the mask.
    """
    return response_outputs(critic, samples)[..., 0].float()
