"""What the files of a model say, without its weights: size, context, template, special tokens, layers for LoRA."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerBase,
)

from ...errors import ZooError
from ...hub.client.connect import CLIENT
from ...hub.client.pull import split_revision
from ...hub.client.refusals import refusals_as
from ...modeling.loading import check_no_gguf, load_config, load_tokenizer, loading
from ...modeling.remote_code import is_trusted


@dataclass(frozen=True)
class ModelFacts:
    """revision: the commit, None of a folder. context: in tokens, None where nothing bounds it.

    target_names: of the linear layers that an adapter goes on. license: None where nobody says. thinks: whether the
    template asks for `enable_thinking`.
    """

    name: str
    revision: str | None
    architecture: str
    parameters: int
    dtype: str
    context: int | None
    cached: int
    target_names: Sequence[str]
    tokenizer: PreTrainedTokenizerBase
    thinks: bool
    license: str | None

    @property
    def template(self) -> bool:
        return self.tokenizer.chat_template is not None


def look_at_model(name: str) -> ModelFacts:
    """Reads a model's configuration and tokenizer: of a folder, or NAMESPACE/NAME[@REVISION]. Downloads no weights.

    Raises ZooError for what is no causal language model that can be trained here.
    """
    check_no_gguf(name, key="--model")
    repo, commit, terms = _settled(name)
    what = f"The model {name}"
    model = _without_weights(AutoModelForCausalLM, repo, commit, what)
    config = model.config
    if model.config.is_encoder_decoder:
        raise ZooError(f"{what} has an encoder, and PPO rolls out decoder-only models: give another.")
    tokenizer = load_tokenizer(repo, name=what, revision=commit)
    text = model.config.get_text_config()
    if getattr(text, "num_attention_heads", None) is None:
        raise ZooError(f"{what} has no attention, and PPO's sampler keeps keys and values: give another.")
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return ModelFacts(
        name=repo,
        revision=commit,
        architecture=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=str(config.dtype or "float32").removeprefix("torch."),
        context=getattr(text, "max_position_embeddings", None),
        cached=2 * text.num_hidden_layers * heads * width,
        target_names=_linear(model),
        tokenizer=tokenizer,
        license=terms,
        thinks="enable_thinking" in str(tokenizer.chat_template or ""),
    )


def look_at_reward_model(name: str) -> list[str]:
    """The labels of a reward model, a folder or NAMESPACE/NAME[@REVISION]. Downloads no weights.

    Raises ZooError for one that cannot be read, or whose score would be read one token early.
    """
    check_no_gguf(name, key="--reward")
    repo, commit, _ = _settled(name)
    what = f"The reward model {name}"
    model = _without_weights(AutoModelForSequenceClassification, repo, commit, what)
    tokenizer = load_tokenizer(repo, name=what, revision=commit)
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise ZooError(
            f"{what} pads with its end-of-sequence token, so its score would be read one token early: "
            "save it in a folder with a tokenizer that has another pad_token, or name one by reward_pad_token in a "
            "recipe of your own."
        )
    labels = model.config.id2label
    return [labels[key] for key in sorted(labels)]


def _without_weights(kind: Any, repo: str, revision: str | None, what: str) -> Any:
    import torch

    with loading(what), torch.device("meta"):
        config = load_config(repo, what=what, revision=revision)
        return kind.from_config(config, trust_remote_code=is_trusted())


def _settled(name: str) -> tuple[str, str | None, str | None]:
    """A model's folder or repository, the commit that its revision means now, and the license that its card names."""
    if Path(name).is_dir():
        return name, None, None
    repo, revision = split_revision(name)
    mend = "check its name, its revision and --source_hub."
    with refusals_as(f"The model {repo} is no folder and cannot be found on {CLIENT.address}", mend):
        info = CLIENT.api().model_info(repo, revision=revision)
    terms = getattr(info.card_data, "license", None)
    return repo, str(info.sha), terms if isinstance(terms, str) else None


def _linear(model: Any) -> list[str]:
    """The names of linear layers but the output's, as LoRA's `all-linear` takes them."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    linear = (
        name for name, layer in model.named_modules() if isinstance(layer, nn.Linear | Conv1D) and layer is not head
    )
    return list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
