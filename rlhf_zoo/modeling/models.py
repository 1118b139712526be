"""Loads and builds the models of PPO: policy, reward model and critic."""

import copy
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_layers import GenericForTokenClassification

from ..errors import ZooError
from ..plugins import did_you_mean
from .generation_config import make_savable
from .loading import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    FLOAT32,
    Loading,
    ModelFiles,
    first_line,
    json_object,
    load_config,
    load_lacking,
    load_model,
    loading,
    model_files,
)
from .logprobs import response_outputs
from .sampling.sampler import Samples

CRITIC_DIR = "critic"
HEADS = ("score", "classifier")
CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")


def load_causal(path: str | Path, *, how: Loading = FLOAT32, **hub: Any) -> PreTrainedModel:
    """A causal language model; an adapter is merged into its base. hub: revision, token.

    Raises ZooError for what is none, also for a reward model, whose trunk alone would load, and for a checkpoint of a
    run that is not what was saved.
    """
    what = f"The model {path}"
    files = model_files(path, **hub)
    if files.adapter is not None:
        if files.adapter.get("task_type") in ("SEQ_CLS", "TOKEN_CLS"):
            raise ZooError(f"{what} is the adapter of a reward model or critic, which writes nothing: give a policy.")
        if how.quantization is not None:
            raise ZooError(f"{what} is an adapter, which is merged into whole weights alone: merge it before.")
        base, revision = _base_of(files)
        return _merged(load_causal(base, how=how, revision=revision), files)
    if (config := files.find("config.json")) is not None:
        kinds = json_object(config).get("architectures") or []
        if kinds and all(str(kind).endswith(CLASSIFIERS) for kind in kinds):
            raise ZooError(f"{what} is a {kinds[0]}, which writes nothing: give a policy, not a reward model.")
    model = load_model(AutoModelForCausalLM, path, what=what, kind=" as a causal language model", how=how, **hub)
    leave_out_router_logits(model)
    make_savable(model, name=what)
    return model


def leave_out_router_logits(model: PreTrainedModel) -> None:
    """A mixture of experts then computes no loss of its own in passes that do not ask for one.

    trl trains with it and says so in the configuration, which is saved; decoding step by step it cannot be computed.
    """
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False


def _base_of(files: ModelFiles) -> tuple[str, str | None]:
    """The name and revision of an adapter's base. Raises ZooError where it names none."""
    adapter = files.adapter or {}
    if not adapter.get("base_model_name_or_path"):
        raise ZooError(
            f"The adapter in {files.source} names no base model: put it on its base and give the two merged."
        )
    name = adapter["base_model_name_or_path"]
    if Path(name).is_absolute() and not Path(name).is_dir():
        raise ZooError(
            f"The adapter in {files.source} lies on {name}, which is gone: restore it, or have `rlhf-zoo eval` of its "
            "recipe merge it again."
        )
    return name, adapter.get("revision")


def _merged(base: PreTrainedModel, files: ModelFiles) -> PreTrainedModel:
    """`base` with the adapter merged in, and with as many embeddings as the adapter has, where it brings its own."""
    from peft import PeftModel

    weights, config = files.find(ADAPTER_WEIGHTS), files.find(ADAPTER_CONFIG)
    if weights is None or config is None:
        raise ZooError(f"{files.source} has {ADAPTER_CONFIG} but no {ADAPTER_WEIGHTS}: copy it again, whole.")
    embeddings: Any = base.get_input_embeddings()
    name = next(name for name, module in base.named_modules() if module is embeddings)
    with loading(f"The adapter {files.source}"):
        with safe_open(weights, framework="pt") as tensors:
            own = f"base_model.model.{name}.weight"
            rows = tensors.get_slice(own).get_shape()[0] if own in tensors.keys() else len(embeddings.weight)  # noqa: SIM118
        if rows != len(embeddings.weight):
            base.resize_token_embeddings(rows, mean_resizing=False)
        model: Any = PeftModel.from_pretrained(base, str(config.parent)).merge_and_unload()
    model.name_or_path = ""  # its base lies there, and these are other weights: no adapter may name it
    return model


def build_causal(
    architecture: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, *, how: Loading = FLOAT32
) -> PreTrainedModel:
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
        dtype = "float32" if how.dtype == "auto" else how.dtype
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=how.attention, trust_remote_code=False
        )
    except (ValueError, TypeError, ZeroDivisionError, ImportError) as error:
        raise ZooError(f"The architecture {dict(architecture)} cannot be built ({first_line(error)}).") from error


def labels_in(config: Mapping[str, Any]) -> Mapping[Any, str] | None:
    """Output -> label, as config.json says it; None where it is of no classifier of sequences that transformers has."""
    classifies = any(str(name).endswith("ForSequenceClassification") for name in config.get("architectures") or [])
    if not classifies or "auto_map" in config:
        return None
    return config.get("id2label") or {0: "LABEL_0", 1: "LABEL_1"}  # what is meant where nothing is written


def label_index(labels: Mapping[Any, str], label: str | None, *, name: str) -> int | None:
    """The output that a label names, of a classifier with these (output -> label); None where it has one output.

    Raises ZooError where a label must be said and is not, and for one that is none of them.
    """
    outputs, count = {theirs: int(output) for output, theirs in labels.items()}, len(labels)
    names = ", ".join(outputs)
    if label is None:
        if count != 1:
            raise ZooError(
                f"The reward model {name} has {count} outputs, and a reward model has one: name the label whose "
                f"output is the score by reward_label, one of {names}."
            )
        return None
    if count == 1:
        raise ZooError(f"The reward model {name} has one output, and the label {label!r} is named: leave it out.")
    index = outputs.get(label, int(label) if label.isdecimal() else None)
    if index is None or index >= count:
        near = did_you_mean(label, outputs) or f": give one of {names}."
        raise ZooError(f"The reward model {name} has no label {label!r}{near}")
    return index


def load_classifier(
    path: str | Path, *, label: str | None = None, how: Loading = FLOAT32, **hub: Any
) -> PreTrainedModel:
    """A reward model: one score per sequence; an adapter is merged into its base. hub: revision, token.

    label: of a classifier that has several, the one to be read.
    Raises ZooError if it has another number of outputs, and for a checkpoint of a run that is not what was saved.
    """
    what = f"The reward model {path}"
    files = model_files(path, **hub)
    if files.adapter is None:
        model, missing = load_lacking(
            AutoModelForSequenceClassification, path, what=what, how=how, may_lack=HEADS, **hub
        )
    else:
        model, missing = _under_adapter(files, what, how)
    if model.config.num_labels != 1:
        label_index(model.config.id2label, label, name=str(path))
    if fresh := sorted(key for key in missing if key.split(".")[0] in HEADS):
        raise ZooError(
            f"The reward model {path} has no trained head ({fresh[0]} is missing from its weights), so its scores "
            "would be random: train it first, or give another."
        )
    if files.adapter is not None:
        model = _merged(model, files)
        model.name_or_path = model.config._name_or_path = files.source
    return model


def _under_adapter(files: ModelFiles, what: str, how: Loading) -> tuple[PreTrainedModel, set[str]]:
    """The classifier that an adapter lies on, and which of its weights neither of them has."""
    base, revision = _base_of(files)
    weights = files.find(ADAPTER_WEIGHTS)
    with loading(what):
        heads: dict[str, Any] = {}
        if weights is not None:
            with safe_open(weights, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118
                    name = key.removeprefix("base_model.model.")
                    if name.split(".")[0] in HEADS:
                        heads[name] = tensors.get_slice(key).get_shape()
        saved = files.find("config.json")
        config: Any = load_config(
            base if saved is None else saved.parent, what=what, revision=None if saved else revision
        )
        if saved is None:
            config.num_labels = next((shape[0] for shape in heads.values()), config.num_labels)
    model, missing = load_lacking(
        AutoModelForSequenceClassification,
        base,
        what=f"{what}'s base {base}",
        how=how,
        config=config,
        revision=revision,
        may_lack=HEADS,
    )
    return model, missing - heads.keys()


def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout probability to 0, in modules and in the attributes that functional dropout reads.

    With dropout on, the ratio of the first pass is not 1. Source: N+ (arXiv:2403.17031), 20.

    Args:
        model: It is changed.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def matrix_parameters(model: PreTrainedModel) -> int:
    """Counts the parameters that each token is multiplied by: all but a table of embeddings, which is only looked up.

    Embeddings that are tied to the output count once, as the matrix of logits.

    Args:
        model: The model.
    """
    count = sum(parameter.numel() for parameter in model.parameters())
    table: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    if table is None or (head is not None and head.weight is table.weight):
        return count
    return count - table.weight.numel()


def context_of(*models: PreTrainedModel | None) -> int | None:
    """The most positions that all of these models can read, in tokens; None where no architecture sets a bound."""
    bounds = [getattr(model.config, "max_position_embeddings", None) for model in models if model is not None]
    return min((bound for bound in bounds if bound), default=None)


def is_peft(model: nn.Module) -> bool:
    """Whether a model has an adapter of peft.

    Args:
        model: The model.
    """
    return hasattr(model, "disable_adapter") and hasattr(model, "peft_config")


def score_statistics(model: PreTrainedModel) -> tuple[float, float]:
    """(μ, σ) of a reward model's raw scores, kept in its config; (0, 1) when they were never measured."""
    statistics = getattr(model.config, "rlhf_zoo", None) or {}
    return float(statistics.get("score_mean", 0.0)), float(statistics.get("score_std", 1.0))


def has_score_statistics(model: PreTrainedModel) -> bool:
    """Whether a reward model's mean and deviation were measured.

    Args:
        model: The reward model.
    """
    return "score_mean" in (getattr(model.config, "rlhf_zoo", None) or {})


def set_score_statistics(model: PreTrainedModel, *, mean: float, std: float, over: str) -> None:
    """Stores (μ, σ) and the texts that they were measured over in the model's config, saved with it.

    The config also says that the one output is a score: transformers' pipeline would else return its sigmoid.
    """
    model.config.problem_type = "regression"
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


@cache
def _token_classifier(config: Any, own: Any = None) -> Any:
    """The token classifier of a family: transformers' own, else its generic one on the family's trunk.

    own: the trunk's class in a model's own code. Such a one is saved as every model is, so the trunk of what it saves
    loads as AutoModel, and the head is `score.*`.
    """
    if config in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        return MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[config]
    if own is not None:
        MODEL_MAPPING.register(config, own, exist_ok=True)  # by which the generic one makes its trunk
    if config not in MODEL_MAPPING:
        raise ZooError(
            f"transformers has no trunk for {config.model_type}, which the critic needs: give a value_model."
        )
    trunk: Any = MODEL_MAPPING[config]
    family = next(kind for kind in trunk.__mro__ if PreTrainedModel in kind.__bases__)
    family = PreTrainedModel if family is trunk else family
    name = f"{trunk.__name__.removesuffix('Model')}ForTokenClassification"
    # transformers looks a class's module up in order to see which kernels the family can switch between.
    body = {"base_model_prefix": family.base_model_prefix or "model", "config_class": config}
    body["__module__"] = trunk.__module__
    return type(name, (GenericForTokenClassification, family), body)


def _is_strange(config: Any) -> bool:
    """Whether a model's own code defines its configuration."""
    return type(config).__module__.startswith("transformers_modules.")


def _own_trunk(config: Any, source: str | Path, revision: str | None) -> Any:
    """The trunk of the models in the code that a saved critic brings; None where transformers has it."""
    named = getattr(config, "auto_map", None) or {}
    name = next(
        (named[kind] for kind in ("AutoModelForCausalLM", "AutoModelForSequenceClassification") if kind in named), None
    )
    if name is None or not _is_strange(config):
        return None
    kind: Any = get_class_from_dynamic_module(name, source, revision=revision)
    with torch.device("meta"):
        return type(kind._from_config(copy.deepcopy(config)).base_model)


def critic_from(
    source: PreTrainedModel | str | Path,
    *,
    center: bool = True,
    scale: bool = True,
    weight: float = 1.0,
    share: bool = False,
    revision: str | None = None,
) -> PreTrainedModel:
    """A critic, one value per token: a token classifier with one output, transformers' own where the family has one.

    From a reward model it takes trunk and head; scores shaped as w·(s−μ)/σ make the head w·W/σ and its bias −w·μ/σ,
    with μ only if they are centered and σ only if they are scaled; `weight` is w, what the score counts in the reward.
    N+ (arXiv:2403.17031) detail 22. From a causal model it takes the trunk, and its head starts at 0. A path or Hub id
    is loaded, as a critic where it is one; a critic's adapter is merged into its base. share: its trunk is the very
    weights of `source`, for what will stand still. Raises ZooError for a model with an encoder, which would see what
    comes later.
    """
    if not isinstance(source, PreTrainedModel):
        what = f"The critic {source}"
        files = model_files(source, revision=revision)
        if files.adapter is not None:
            kind = files.adapter.get("task_type")
            if kind == "TOKEN_CLS":
                base, revision = _base_of(files)
                return _merged(critic_from(base, revision=revision), files)
        else:
            config = load_config(source, what=what, revision=revision)
            kind = (config.architectures or [""])[0]
            if kind.endswith("ForTokenClassification"):
                trunk = _own_trunk(config, source, revision)
                return load_model(_token_classifier(type(config), trunk), source, what=what, revision=revision)  # type: ignore[arg-type]
        scored = kind == "SEQ_CLS" or str(kind).endswith("ForSequenceClassification")
        loader: Any = load_classifier if scored else load_causal
        return critic_from(loader(source, revision=revision), center=center, scale=scale, weight=weight)
    scored = type(source).__name__.endswith("ForSequenceClassification")
    if scored and source.config.num_labels != 1:
        raise ZooError(
            f"A critic needs one output, and this {type(source).__name__} has {source.config.num_labels}: give a "
            "value_model with num_labels=1."
        )
    if source.config.is_encoder_decoder:
        raise ZooError(
            f"A {type(source).__name__} has an encoder, which sees the tokens after the one whose value is asked: give "
            "a value_model without."
        )
    config = copy.deepcopy(source.config)
    config.num_labels = 1
    trunk = type(source.base_model) if _is_strange(config) else None
    critic = _token_classifier(type(config), trunk)._from_config(config, dtype=torch.float32)  # type: ignore[arg-type]
    between = _between(source) if scored else None
    try:
        critic.base_model.load_state_dict(source.base_model.state_dict())
    except RuntimeError as error:
        between = first_line(error)
    if between is not None:
        raise ZooError(
            f"A {type(source).__name__} has more than a linear head on a trunk of {config.model_type} ({between}), "
            "so no critic could begin at its scores: give a value_model."
        )
    if share:
        for name, parameter in source.base_model.named_parameters():
            module, _, leaf = name.rpartition(".")
            setattr(critic.base_model.get_submodule(module), leaf, parameter)
    critic.name_or_path = source.name_or_path  # what an adapter of the critic will name as its base
    target = _head(critic)
    with torch.no_grad():
        target.weight.zero_()
        if target.bias is not None:
            target.bias.zero_()
        if scored:
            mean, std = score_statistics(source)
            mean, std = mean if center else 0.0, std if scale else 1.0
            target.weight.copy_(weight * _head(source).weight / std)
            if target.bias is not None:
                target.bias.fill_(-weight * mean / std)
    config.rlhf_zoo = None
    return critic


def _between(source: PreTrainedModel) -> str | None:
    """The name of a weight between a classifier's trunk and its linear head; None without one."""
    expected = (source.base_model_prefix, *HEADS)
    return next((name for name, _ in source.named_parameters() if name.split(".")[0] not in expected), None)


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
            f"({first_line(error).split('. ')[0]}): set critic_lora=False, or give a value_model of the policy's "
            "architecture."
        ) from error


def response_values(critic: PreTrainedModel, samples: Samples) -> Tensor:
    """V of the state before each response token. Returns (B, T) float32; what lies outside the mask is meaningless."""
    return response_outputs(critic, samples)[..., 0].float()
