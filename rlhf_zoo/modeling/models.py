"""Loads and builds policies and reward models, and merges adapters into their bases."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from safetensors import safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..errors import ZooError, first_line
from ..plugins import did_you_mean
from .generation_config import make_savable
from .loading import IN_FLOAT32, LoadOptions, load_config, load_model, load_with_missing
from .model_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    HubOptions,
    ModelFiles,
    find_model_files,
    read_json_object,
    translate_load_errors,
)

#: The names of a classifier's head in transformers.
HEADS = ("score", "classifier")
CLASSIFIER_SUFFIXES = ("ForSequenceClassification", "ForTokenClassification")


def load_causal(source: str | Path, *, options: LoadOptions = IN_FLOAT32, **hub: Unpack[HubOptions]) -> PreTrainedModel:
    """Loads a causal language model. An adapter is merged into its base.

    Args:
        source: A folder or a Hub id.
        options: Precision, attention and quantization.
        **hub: See `HubOptions`.

    Raises:
        ZooError: The checkpoint is not a causal language model (transformers would load a reward model without its
            head), or its files do not match the digests that the run recorded.
    """
    subject = f"The model {source}"
    files = find_model_files(source, **hub)
    if files.adapter_config is not None:
        if files.adapter_config.get("task_type") in ("SEQ_CLS", "TOKEN_CLS"):
            raise ZooError(
                f"{subject} is the adapter of a reward model or critic, which generates no text: choose a policy."
            )
        if options.quantization is not None:
            raise ZooError(
                f"{subject} is an adapter, which cannot be merged into quantized weights: merge it into its base first."
            )
        base, revision = base_of_adapter(files)
        return merge_adapter(load_causal(base, options=options, revision=revision), files)
    if (config_path := files.find("config.json")) is not None:
        architectures = read_json_object(config_path).get("architectures") or []
        if architectures and all(str(architecture).endswith(CLASSIFIER_SUFFIXES) for architecture in architectures):
            raise ZooError(
                f"{subject} is a {architectures[0]}, which generates no text: choose a policy, not a reward model."
            )
    model = load_model(
        AutoModelForCausalLM, source, subject=subject, suffix=" as a causal language model", options=options, **hub
    )
    disable_router_logits(model)
    make_savable(model, name=subject)
    return model


def disable_router_logits(model: PreTrainedModel) -> None:
    """Turns off the load-balancing loss that MoE models add to every forward pass.

    TRL turns this loss on in the configuration that is saved with the model, but decoding with a KV cache cannot
    compute it.

    Args:
        model: The model, whose configuration is changed.
    """
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False


def base_of_adapter(files: ModelFiles) -> tuple[str, str | None]:
    """Returns the name and the revision of an adapter's base.

    Args:
        files: The adapter's files.

    Raises:
        ZooError: The adapter names no base, or a folder that no longer exists.
    """
    config = files.adapter_config or {}
    if not config.get("base_model_name_or_path"):
        raise ZooError(
            f"The adapter in {files.source} names no base model: set base_model_name_or_path in {ADAPTER_CONFIG}, or "
            "merge the adapter into its base and use the merged model."
        )
    name = config["base_model_name_or_path"]
    if Path(name).is_absolute() and not Path(name).is_dir():
        raise ZooError(
            f"The adapter in {files.source} names the base {name}, which does not exist: restore the base, or run "
            "`rlhf-zoo eval` for its recipe to merge it again."
        )
    return name, config.get("revision")


def merge_adapter(base: PreTrainedModel, files: ModelFiles) -> PreTrainedModel:
    """Merges an adapter into its base. If the adapter has its own embeddings, the base's are first resized to match.

    Args:
        base: The base, which is changed.
        files: The adapter's files.

    Raises:
        ZooError: The adapter's weights are missing or damaged.
    """
    from peft import PeftModel

    weights_path, config_path = files.find(ADAPTER_WEIGHTS), files.find(ADAPTER_CONFIG)
    if weights_path is None or config_path is None:
        raise ZooError(f"{files.source} has {ADAPTER_CONFIG} but no {ADAPTER_WEIGHTS}: copy all files again.")
    embeddings: Any = base.get_input_embeddings()
    embedding_path = next(path for path, module in base.named_modules() if module is embeddings)
    with translate_load_errors(f"The adapter {files.source}"):
        with safe_open(weights_path, framework="pt") as tensors:
            key = f"base_model.model.{embedding_path}.weight"
            has_embeddings = key in tensors.keys()  # noqa: SIM118
            num_embeddings = tensors.get_slice(key).get_shape()[0] if has_embeddings else len(embeddings.weight)
        if num_embeddings != len(embeddings.weight):
            # The adapter overwrites all rows, so their initial values do not matter.
            base.resize_token_embeddings(num_embeddings, mean_resizing=False)
        model: Any = PeftModel.from_pretrained(base, str(config_path.parent)).merge_and_unload()
    # The merged weights differ from the base's, so a later adapter must not record the base's path as its base.
    model.name_or_path = ""
    return model


def build_causal(
    architecture: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, *, options: LoadOptions = IN_FLOAT32
) -> PreTrainedModel:
    """Builds a causal language model with random weights.

    Args:
        architecture: `model_type`, and fields of that type's configuration.
        tokenizer: Determines the vocabulary size and the special tokens.
        options: Precision and attention.

    Raises:
        ZooError: transformers does not know the architecture or cannot build it.
    """
    config_fields = dict(architecture)
    model_type = config_fields.pop("model_type", None)
    try:
        config = AutoConfig.for_model(
            model_type,
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=tokenizer.bos_token_id,
            **config_fields,
        )
        dtype = "float32" if options.dtype == "auto" else options.dtype
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=options.attention, trust_remote_code=False
        )
    except (ValueError, TypeError, ZeroDivisionError, ImportError) as error:
        raise ZooError(f"The architecture {dict(architecture)} cannot be built ({first_line(error)}).") from error


def labels_of(config: Mapping[str, Any]) -> Mapping[Any, str] | None:
    """Reads the labels of a sequence classifier.

    Args:
        config: The content of config.json.

    Returns:
        {output index: label}; None for other architectures, and for custom code (`auto_map`).
    """
    architectures = config.get("architectures") or []
    is_sequence_classifier = any(str(name).endswith("ForSequenceClassification") for name in architectures)
    if not is_sequence_classifier or "auto_map" in config:
        return None
    return config.get("id2label") or {0: "LABEL_0", 1: "LABEL_1"}  # transformers' default, which it does not save


def label_index(
    label_by_index: Mapping[Any, str], label: str | None, *, name: str, label2id: Mapping[str, Any] | None = None
) -> int | None:
    """Finds which output of a classifier is the score.

    Args:
        label_by_index: {output index: label} of the classifier.
        label: The label or index of the output, as the user named it; None if the user named no output.
        name: The classifier's name in errors.
        label2id: {label: output index} in the classifier's configuration, for a check against `label_by_index`.

    Returns:
        The output's index; None if there is only one output.

    Raises:
        ZooError: There are several outputs and no label is named, there is only one output and a label is named, there
            is no such label, or two outputs have the label.
    """
    index_by_label = {text: int(index) for index, text in label_by_index.items()}
    output_count, names = len(label_by_index), ", ".join(index_by_label)
    if label is None:
        if output_count != 1:
            raise ZooError(
                f"The reward model {name} has {output_count} outputs, but a reward model needs one: set reward_label "
                f"to the label whose output is the score, one of {names}."
            )
        return None
    if output_count == 1:
        raise ZooError(
            f"The reward model {name} has a single output, so the label {label!r} does not apply: remove reward_label."
        )
    score_index = index_by_label.get(label, int(label) if label.isdecimal() else None)
    if score_index is None or score_index >= output_count:
        suggestion = did_you_mean(label, index_by_label) or f": choose one of {names}."
        raise ZooError(f"The reward model {name} has no label {label!r}{suggestion}")
    if label in index_by_label:
        matching_indices = [str(index) for index, text in label_by_index.items() if text == label]
        matching_indices += [
            str(index)
            for text, index in (label2id.items() if isinstance(label2id, Mapping) else ())
            if text == label and str(index) not in matching_indices
        ]
        if len(matching_indices) > 1:
            raise ZooError(
                f"The configuration of the reward model {name} gives the label {label!r} to the outputs "
                f"{' and '.join(matching_indices)}: correct its id2label and label2id, or name the output's index "
                "instead."
            )
    return score_index


def load_classifier(
    source: str | Path, *, label: str | None = None, options: LoadOptions = IN_FLOAT32, **hub: Unpack[HubOptions]
) -> PreTrainedModel:
    """Loads a reward model, which gives one score per sequence. An adapter is merged into its base.

    Args:
        source: A folder or a Hub id.
        label: The label whose output is the score, for a classifier with several outputs. Not checked for one output.
        options: Precision, attention and quantization.
        **hub: See `HubOptions`.

    Raises:
        ZooError: `label` does not fit the model's outputs, the head is not trained, or the files do not match the
            digests that the run recorded.
    """
    subject = f"The reward model {source}"
    files = find_model_files(source, **hub)
    if files.adapter_config is None:
        model, missing_names = load_with_missing(
            AutoModelForSequenceClassification, source, subject=subject, options=options, may_lack=HEADS, **hub
        )
    else:
        model, missing_names = _classifier_under_adapter(files, subject, options)
    if model.config.num_labels != 1:
        label_index(model.config.id2label, label, name=str(source), label2id=model.config.label2id)
    if missing_head_names := sorted(key for key in missing_names if key.split(".")[0] in HEADS):
        raise ZooError(
            f"The reward model {source} has no trained head ({missing_head_names[0]} is missing from its weights), so "
            "scores would be random: train it first, or choose another reward model."
        )
    if files.adapter_config is not None:
        model = merge_adapter(model, files)
        model.name_or_path = model.config._name_or_path = files.source
    return model


def _classifier_under_adapter(
    files: ModelFiles, subject: str, options: LoadOptions
) -> tuple[PreTrainedModel, set[str]]:
    """Loads an adapter's base classifier. Returns it, and the names of weights that both adapter and base lack."""
    base, revision = base_of_adapter(files)
    weights_path = files.find(ADAPTER_WEIGHTS)
    with translate_load_errors(subject):
        head_shapes: dict[str, list[int]] = {}
        if weights_path is not None:
            # The adapter's file may contain the trained head, so the base need not contain one.
            with safe_open(weights_path, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118
                    name = key.removeprefix("base_model.model.")
                    if name.split(".")[0] in HEADS:
                        head_shapes[name] = tensors.get_slice(key).get_shape()
        config_path = files.find("config.json")
        config: Any = load_config(
            base if config_path is None else config_path.parent,
            subject=subject,
            revision=None if config_path else revision,
        )
        if config_path is None:
            # Without a config.json, only the shape of the head shows the number of outputs.
            config.num_labels = next((shape[0] for shape in head_shapes.values()), config.num_labels)
    model, missing_names = load_with_missing(
        AutoModelForSequenceClassification,
        base,
        subject=f"{subject}'s base {base}",
        options=options,
        overrides={"config": config},
        revision=revision,
        may_lack=HEADS,
    )
    return model, missing_names - head_shapes.keys()


def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout probability to 0, both in modules and in the attributes that functional dropout reads.

    With dropout, the importance ratio would not be 1 before the first optimizer step. Source: "The N+ Implementation
    Details of RLHF with PPO" (arXiv:2403.17031), detail 20.

    Args:
        model: The model, which is changed.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def count_matmul_parameters(model: PreTrainedModel) -> int:
    """Counts all parameters except the table of input embeddings, which is looked up and not multiplied.

    Embeddings that are tied to the LM head count once, as the LM head.
    """
    count = sum(parameter.numel() for parameter in model.parameters())
    table: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    if table is None or (head is not None and head.weight is table.weight):
        return count
    return count - table.weight.numel()


def context_length_of(*models: PreTrainedModel | None) -> int | None:
    """Returns the context length that all of the models support, in tokens; None if no configuration sets a limit.

    Args:
        *models: The models; None is skipped.
    """
    bounds = [getattr(model.config, "max_position_embeddings", None) for model in models if model is not None]
    return min((bound for bound in bounds if bound), default=None)


def is_peft(model: nn.Module) -> bool:
    """Whether a model has a PEFT adapter."""
    return hasattr(model, "disable_adapter") and hasattr(model, "peft_config")


def score_statistics(model: PreTrainedModel) -> tuple[float, float]:
    """Reads the mean and the standard deviation of a reward model's raw scores from its config.

    Returns:
        (μ, σ); (0, 1) if they are not in the config.
    """
    statistics = getattr(model.config, "rlhf_zoo", None) or {}
    return float(statistics.get("score_mean", 0.0)), float(statistics.get("score_std", 1.0))


def has_score_statistics(model: PreTrainedModel) -> bool:
    """Whether a reward model's config has the mean and the standard deviation of raw scores."""
    return "score_mean" in (getattr(model.config, "rlhf_zoo", None) or {})


def set_score_statistics(model: PreTrainedModel, *, mean: float, std: float, measured_on: str) -> None:
    """Stores the mean and the standard deviation of raw scores in the model's config, which is saved with it.

    The config also marks the output as a regression. Otherwise, transformers' pipeline would return a score's sigmoid.

    Args:
        model: The reward model.
        mean: μ of the model's raw scores.
        std: σ of the model's raw scores.
        measured_on: A description of the texts on which μ and σ were measured.
    """
    model.config.problem_type = "regression"
    model.config.rlhf_zoo = {"score_mean": mean, "score_std": std, "score_statistics_over": measured_on}
