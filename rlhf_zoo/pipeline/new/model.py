"""Inspects a model's size, context, chat template, special tokens and LoRA layers without loading its weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerBase

from ...errors import ZooError
from ...hub.client.connect import DEFAULT_HUB, SOURCE_FLAG
from ...hub.client.pull import full_revision, split_revision
from ...hub.client.refusals import translate_lookup_errors
from ...modeling.gguf import check_no_gguf, find_gguf, gguf_source, unpack_if_gguf
from ...modeling.loading import load_config, load_tokenizer
from ...modeling.model_files import translate_load_errors
from ...modeling.remote_code import is_code_trusted
from ...modeling.special_tokens import find_spare_token, has_own_pad


@dataclass(frozen=True)
class ModelFacts:
    """The properties of a model that a new recipe depends on.

    Attributes:
        name: A folder, a GGUF file or a repository.
        revision: Commit of the repository; None for a folder or file.
        architecture: Name of the model's class in transformers.
        parameters: The number of parameters.
        dtype: The dtype of the saved weights.
        context_length: In tokens; None if the configuration states none.
        kv_values: Number of values that the KV cache holds per token, over all layers.
        target_names: Names of the linear layers that LoRA adapts.
        tokenizer: The model's tokenizer.
        has_thinking_switch: Whether the chat template has the variable `enable_thinking`.
        license: The license that the model's card names; None if the card names none.
        spare_pad_token: A token for padding that no text contains; None if the tokenizer's PAD token differs from EOS,
            or if there is no such token.
    """

    name: str
    revision: str | None
    architecture: str
    parameters: int
    dtype: str
    context_length: int | None
    kv_values: int
    target_names: Sequence[str]
    tokenizer: PreTrainedTokenizerBase
    has_thinking_switch: bool
    license: str | None
    spare_pad_token: str | None

    @property
    def title(self) -> str:
        """Name of the model on cards, without the path of a folder or file."""
        return Path(self.name).name if Path(self.name).exists() else self.name

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return self.tokenizer.chat_template is not None


def inspect_model(name: str) -> ModelFacts:
    """Reads a model's configuration and tokenizer, but not its weights.

    Args:
        name: A folder, a GGUF file, or NAMESPACE/NAME[@REVISION].

    Raises:
        ZooError: The model is not a causal language model that can be trained here.
    """
    repo, commit, license_name = _pin_commit(unpack_if_gguf(name))
    title = f"The model {name}"
    model = _load_without_weights(AutoModelForCausalLM, repo, commit, title)
    config = model.config
    if config.is_encoder_decoder:
        raise ZooError(f"{title} has an encoder, but PPO needs a decoder-only model: choose another model.")
    tokenizer = load_tokenizer(repo, name=title, revision=commit)
    text_config = config.get_text_config()
    if getattr(text_config, "num_attention_heads", None) is None:
        raise ZooError(f"{title} has no attention, but PPO's sampler needs a KV cache: choose another model.")
    kv_heads = getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
    head_size = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    return ModelFacts(
        name=name if find_gguf(name) else repo,  # `repo` is the folder of an unpacked GGUF file
        revision=commit,
        architecture=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=str(config.dtype or "float32").removeprefix("torch."),
        context_length=getattr(text_config, "max_position_embeddings", None),
        kv_values=2 * text_config.num_hidden_layers * kv_heads * head_size,
        target_names=_linear_names(model),
        tokenizer=tokenizer,
        license=license_name,
        spare_pad_token=None if has_own_pad(tokenizer) else find_spare_token(tokenizer, model),
        has_thinking_switch="enable_thinking" in str(tokenizer.chat_template or ""),
    )


def reward_labels(name: str) -> list[str]:
    """Reads the labels of a reward model, but not its weights.

    Args:
        name: A folder, or NAMESPACE/NAME[@REVISION].

    Raises:
        ZooError: The model cannot be read, or its PAD token is EOS, so that its score would be read one token early.
    """
    check_no_gguf(name, key="--reward")
    repo, commit, _ = _pin_commit(name)
    title = f"The reward model {name}"
    model = _load_without_weights(AutoModelForSequenceClassification, repo, commit, title)
    tokenizer = load_tokenizer(repo, name=title, revision=commit)
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise ZooError(
            f"{title} pads with its end-of-sequence token, so its score would be read one token early: "
            "save it to a folder with a tokenizer that has another pad_token, or set reward_pad_token in your own "
            "recipe."
        )
    labels = model.config.id2label
    return [labels[key] for key in sorted(labels)]


def _load_without_weights(auto_class: Any, repo: str, revision: str | None, title: str) -> Any:
    import torch

    if Path(repo).is_dir() and not (Path(repo) / "config.json").is_file():
        raise ZooError(f"{title} has no config.json: pass the folder of a model, or NAMESPACE/NAME.")
    with translate_load_errors(title), torch.device("meta"):
        config = load_config(repo, subject=title, revision=revision)
        return auto_class.from_config(config, trust_remote_code=is_code_trusted())


def _pin_commit(name: str) -> tuple[str, str | None, str | None]:
    """Returns a model's folder or repository, its current commit (None for a folder), and its license, if known."""
    if Path(name).is_dir():
        return name, None, gguf_source(Path(name)).get("license")
    repo, revision = split_revision(name)
    source = replace(DEFAULT_HUB, flag=SOURCE_FLAG)
    advice = "check its name or folder, its revision and --source_hub."
    with translate_lookup_errors(f"The model {repo}", source, advice, repo=repo):
        info = DEFAULT_HUB.api().model_info(repo, revision=full_revision(repo, revision, DEFAULT_HUB))
    license_name = getattr(info.card_data, "license", None)
    return repo, str(info.sha), license_name if isinstance(license_name, str) else None


def _linear_names(model: Any) -> list[str]:
    """Returns the names, such as q_proj, of all linear layers except the head, as LoRA's `all-linear` selects them."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    names = (
        name for name, layer in model.named_modules() if isinstance(layer, nn.Linear | Conv1D) and layer is not head
    )
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))
