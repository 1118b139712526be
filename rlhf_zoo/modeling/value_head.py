"""Language models with a value head, and where checkpoints keep the head.

`AutoModelForCausalLMWithValueHead` and `AutoModelForSeq2SeqLMWithValueHead` stand in for the classes of these names in
TRL up to 1.12: the same calls, the same checkpoints. A full model's checkpoint is the model's own with two tensors
more, `v_head.summary.weight` and `v_head.summary.bias`, so plain transformers loads it too. Beside an adapter these two
are alone in `model.safetensors`; TRL writes them as `pytorch_model.bin` there, a pickle, which is not read here.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import PushToHubMixin  # type: ignore[attr-defined]

from ..errors import ZooError
from .loading import ADAPTER_CONFIG, ADAPTER_WEIGHTS, WEIGHTS_FILE, ModelFiles, with_plain_weights
from .remote_code import is_trusted

__all__ = [
    "VALUE_HEAD_FILE",
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "ValueHead",
    "hidden_size_of",
    "read_value_head",
]

VALUE_HEAD_FILE = "critic/value_head.safetensors"
PREFIX = "v_head."
INNER_PREFIX = "pretrained_model."
HEAD_TENSORS = {"summary.weight", "summary.bias"}
HEAD_ARGUMENTS = ("summary_dropout_prob", "v_head_init_strategy", "v_head_initializer_range")
KBIT_ARGUMENTS = ("use_gradient_checkpointing", "gradient_checkpointing_kwargs")
# What says where a checkpoint lies; revision and subfolder are an adapter's own, the others hold for its base too.
ADDRESS_ARGUMENTS = ("revision", "subfolder")
HUB_ARGUMENTS = (*ADDRESS_ARGUMENTS, "token", "cache_dir", "force_download", "local_files_only")

# Attributes of a model with a value head that are those of the model under it.
FROM_THE_MODEL = (
    "config", "device", "dtype", "generate", "prepare_inputs_for_generation", "enable_input_require_grads",
    "gradient_checkpointing_enable", "gradient_checkpointing_disable",
)  # fmt: skip

log = logging.getLogger(__name__)


# The head


def hidden_size_of(config: PreTrainedConfig) -> int:
    """Width H of the last hidden state that a language model returns.

    OPT-350m projects it to `word_embed_proj_dim`; a composite model has it in its text or decoder configuration.
    Raises ZooError for a configuration that names no width.
    """
    text = config.get_text_config(decoder=True)
    for name in ("word_embed_proj_dim", "hidden_size", "d_model", "n_embd"):
        size = getattr(text, name, None)
        if isinstance(size, int):
            return size
    raise ZooError(
        f"The configuration {type(config).__name__} names no hidden size, which a value head needs: give a model whose "
        "configuration has hidden_size."
    )


class ValueHead(nn.Module):
    """V(s) = w·h + b of a hidden state h, with dropout on h; the sizes' and options' names are TRL's."""

    def __init__(
        self,
        hidden_size: int,
        *,
        summary_dropout_prob: float = 0.1,
        v_head_init_strategy: str | None = None,
        v_head_initializer_range: float = 0.2,
    ) -> None:
        """The strategy None draws as nn.Linear does, "normal" w from N(0, range²) with b = 0.

        Raises ZooError for another strategy.
        """
        super().__init__()
        if v_head_init_strategy not in (None, "normal"):
            raise ZooError(f"v_head_init_strategy is {v_head_init_strategy!r}: choose None or 'normal'.")
        self.dropout = nn.Dropout(summary_dropout_prob)
        self.summary = nn.Linear(hidden_size, 1, dtype=torch.float32)
        if v_head_init_strategy == "normal":
            nn.init.normal_(self.summary.weight, std=v_head_initializer_range)
            nn.init.zeros_(self.summary.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: (..., H) of any float type. Returns (..., 1) float32, computed in the type of the weights."""
        return self.summary(self.dropout(hidden).to(self.summary.weight.dtype)).float()


# Where a checkpoint keeps it


def read_value_head(source: str | Path, *, variant: str | None = None, **hub: Any) -> dict[str, Tensor] | None:
    """The value head that a checkpoint holds: `summary.weight` (1, H) and `summary.bias` (1,), or None without one.

    It stands among the weights (`v_head.*` in `model.safetensors` or its shards) or else in VALUE_HEAD_FILE. source: a
    directory or a repository of the Hub; hub: revision, subfolder, token, cache_dir, force_download, local_files_only.
    Raises ZooError if the head is of another form, or if the only place where it could be is a pickle.
    """
    return _read_head(ModelFiles(source, variant=variant, **hub))


def _read_head(checkpoint: ModelFiles) -> dict[str, Tensor] | None:
    weights = checkpoint.weights
    head: dict[str, Tensor] = {}
    if weights is not None:
        path, shard_of = weights
        for name in [path.name] if shard_of is None else sorted({shard_of[key] for key in shard_of if _of_head(key)}):
            shard = checkpoint.find(name)
            if shard is None:
                raise ZooError(f"{checkpoint.source} lacks {name}, which {path.name} names: copy it again, whole.")
            head |= _head_tensors(shard)
    if not head and (file := checkpoint.find(VALUE_HEAD_FILE)):
        head = _head_tensors(file)
    if not head:
        if weights is None:
            checkpoint.refuse_pickle("model")
        return None
    if head.keys() != HEAD_TENSORS:
        raise ZooError(
            f"{checkpoint.source} holds a value head with the tensors {', '.join(sorted(head))}, and one linear layer "
            f"has {' and '.join(sorted(HEAD_TENSORS))}: it was written by another program; take its {PREFIX}* away."
        )
    return head


def _of_head(key: str) -> bool:
    return key.startswith(PREFIX)


def _head_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            keys = [key for key in file.keys() if _of_head(key)]  # noqa: SIM118 -- it is no mapping
            return {key.removeprefix(PREFIX): file.get_tensor(key) for key in keys}
    except SafetensorError as error:
        raise ZooError(f"{path} is not a whole safetensors file ({error}): copy it again.") from error


# Loading the model under it


@contextmanager
def _head_reports_held_back() -> Iterator[None]:
    """While open, transformers' reports that name a value head's weights wait; they pass if loading fails."""
    held: list[logging.LogRecord] = []

    def pass_on(record: logging.LogRecord) -> bool:
        if PREFIX not in record.getMessage():
            return True
        held.append(record)
        return False

    logger = logging.getLogger(PreTrainedModel.__module__)
    logger.addFilter(pass_on)
    loaded = False
    try:
        yield
        loaded = True
    finally:
        logger.removeFilter(pass_on)
        for record in () if loaded else held:
            logger.handle(record)


def _load_model(auto_class: Any, checkpoint: ModelFiles, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A transformers model, without a word about the value head's weights beside its own."""
    checkpoint.check_config()
    if checkpoint.weights is None and "gguf_file" not in kwargs:
        checkpoint.refuse_pickle("model")
    if checkpoint.adapter is not None:  # transformers would put it on, unchecked, on the base that it names
        raise ZooError(f"The base {checkpoint.source} is an adapter itself: merge it into its own base first.")
    trusted = bool(kwargs.get("trust_remote_code", is_trusted()))  # without it transformers asks on the terminal
    options = {**with_plain_weights(kwargs), "trust_remote_code": trusted} | {
        name: checkpoint.hub[name] for name in ADDRESS_ARGUMENTS if name in checkpoint.hub
    }
    with _head_reports_held_back():
        model, info = auto_class.from_pretrained(checkpoint.source, *args, output_loading_info=True, **options)
    unexpected = sorted(key for key in info["unexpected_keys"] if not _of_head(key))
    misfits = {
        "it lacks": sorted(info["missing_keys"]),
        "the model has no": unexpected,
        "of another size are": sorted(key for key, *_ in info["mismatched_keys"]),
    }
    # transformers has reported these itself, unless its report was held back for naming the head.
    if len(unexpected) < len(info["unexpected_keys"]) and any(misfits.values()):
        listed = "; ".join(f"{what} {', '.join(keys)}" for what, keys in misfits.items() if keys)
        log.warning("%s does not fit %s in all its weights: %s", checkpoint.source, type(model).__name__, listed)
    return model


def _load_adapter(
    auto_class: Any,
    checkpoint: ModelFiles,
    adapter: Path,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_trainable: bool,
) -> Any:
    """A PeftModel: the checkpoint's adapter, whose files are found in `adapter`, over the base that it names."""
    from peft import PeftConfig, PeftModel

    checkpoint.variant = None  # of its base, in kwargs
    if checkpoint.find(ADAPTER_WEIGHTS) is None:
        checkpoint.refuse_pickle("adapter_model")
        raise ZooError(f"{checkpoint.source} has {ADAPTER_CONFIG} but no {ADAPTER_WEIGHTS}: copy it again, whole.")
    config = PeftConfig.from_pretrained(str(adapter))
    if not config.base_model_name_or_path:
        raise ZooError(
            f"The {ADAPTER_CONFIG} of {checkpoint.source} names no base model: load the base yourself, put the "
            "adapter on it with peft.PeftModel.from_pretrained, and give the PeftModel."
        )
    hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    base = ModelFiles(config.base_model_name_or_path, revision=config.revision, variant=kwargs.get("variant"), **hub)
    model = _load_model(auto_class, base, args, kwargs)
    return PeftModel.from_pretrained(model, str(adapter), is_trainable=is_trainable)


def _add_adapter(model: Any, peft_config: Any, kbit: dict[str, Any], *, revision: str | None) -> Any:
    """A PeftModel with a new adapter, which notes the revision of its base."""
    from peft import PeftConfig, get_peft_model, prepare_model_for_kbit_training

    if not isinstance(peft_config, PeftConfig):
        raise ZooError(f"peft_config is a {type(peft_config).__name__}: give a configuration of peft, as LoraConfig.")
    if getattr(model, "is_quantized", False):
        model = prepare_model_for_kbit_training(model, **kbit)
    return get_peft_model(model, peft_config, revision=revision)


def _is_peft_model(model: Any) -> bool:
    from peft import PeftModel

    return isinstance(model, PeftModel)


def _device_of_head(model: Any) -> torch.device:
    """The device of the output embeddings, which read the same hidden state."""
    embeddings = model.get_output_embeddings()
    weight = getattr(embeddings, "weight", None)
    device = next(model.parameters()).device if weight is None else weight.device
    if device.type == "meta":
        raise ZooError(
            f"The output layer of this {type(model).__name__} is offloaded, and the value head beside it needs a "
            "device: give a device_map without offloading."
        )
    return device


# The models


class _Architectures:
    """What may be wrapped. Looked up when it is read, as peft takes long to import."""

    def __get__(self, *_: Any) -> tuple[type, ...]:
        from peft import PeftModel

        return PreTrainedModel, PeftModel


class _ValueHeadModel(PushToHubMixin, nn.Module):
    """A language model (a PreTrainedModel or a PeftModel of one) and a value head on its last hidden state."""

    # TRL's own, for code that reads them.
    transformers_parent_class: ClassVar[Any]
    lm_head_namings: ClassVar[list[str]]
    supported_args = HEAD_ARGUMENTS
    supported_modules = ("v_head",)
    supported_rm_modules = ("score",)
    supported_pretrained_model_architectures = _Architectures()

    auto_class: ClassVar[Any]
    hidden_states_name: ClassVar[str]
    is_encoder_decoder: ClassVar[bool]

    def __init__(self, pretrained_model: Any, **head: Any) -> None:
        """head: `summary_dropout_prob` (else the configuration's, else 0.1), `v_head_init_strategy` (None or "normal"),
        `v_head_initializer_range`.

        Raises ZooError for a model without a language model head, of the other kind, or with an adapter of a kind that
        a value head cannot go with.
        """
        super().__init__()
        self.is_peft_model = _is_peft_model(pretrained_model)
        self._check(pretrained_model)
        config = pretrained_model.config
        if head.get("summary_dropout_prob") is None:
            head["summary_dropout_prob"] = getattr(config, "summary_dropout_prob", 0.1)
        self.pretrained_model = pretrained_model
        self.v_head = ValueHead(hidden_size_of(config), **head).to(_device_of_head(pretrained_model))
        self.training = pretrained_model.training
        self.v_head.train(self.training)
        self.register_state_dict_post_hook(_to_checkpoint_names)
        self.register_load_state_dict_pre_hook(_to_module_names)

    def _check(self, model: Any) -> None:
        kind = type(model.get_base_model() if self.is_peft_model else model).__name__
        if not model.can_generate():
            raise ZooError(f"{kind} has no language model head: give a model of {self.auto_class.__name__}.")
        if bool(model.config.is_encoder_decoder) != self.is_encoder_decoder:
            other = AutoModelForCausalLMWithValueHead if self.is_encoder_decoder else AutoModelForSeq2SeqLMWithValueHead
            raise ZooError(f"{kind} is not a model of {self.auto_class.__name__}: use {other.__name__}.")
        if self.is_peft_model:
            if model.active_peft_config.is_prompt_learning:
                raise ZooError(
                    f"{model.active_peft_config.peft_type} learns prompts, whose hidden states are no tokens' values: "
                    "give another adapter, as LoRA."
                )
        elif getattr(model, "peft_config", None):
            raise ZooError(
                f"This {kind} carries its adapter inside, and saving it would lose the value head: load it by its "
                "path, or wrap it with peft.PeftModel."
            )

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path | PreTrainedModel | nn.Module,
        *model_args: Any,
        peft_config: Any = None,
        is_trainable: bool = False,
        **kwargs: Any,
    ) -> Self:
        """A model from a directory, a repository of the Hub, a PreTrainedModel or a PeftModel, with its value head.

        A checkpoint's own head is read where it has one (see `read_value_head`); otherwise the head starts at random.
        A path to an adapter loads its base too, and `is_trainable` says whether the adapter trains. `peft_config` puts
        a new adapter on a model that has none. Keywords: the head's (see `__init__`), `use_gradient_checkpointing` and
        `gradient_checkpointing_kwargs` for a quantized model under a new adapter, and those of transformers'
        `from_pretrained` (revision, subfolder, token, dtype, device_map, ...). Raises ZooError.
        """
        source: Any = pretrained_model_name_or_path
        if kwargs.pop("reward_adapter", None) is not None:
            raise ZooError("reward_adapter is not read here: give the reward model to the trainer on its own.")
        head_arguments = {name: kwargs.pop(name) for name in HEAD_ARGUMENTS if name in kwargs}
        kbit = {name: kwargs.pop(name) for name in KBIT_ARGUMENTS if name in kwargs}
        head = revision = None
        if isinstance(source, str | Path):
            checkpoint = ModelFiles(
                source,
                variant=kwargs.get("variant"),
                **{name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs},
            )
            revision = kwargs.pop("revision", None)
            kwargs.pop("subfolder", None)
            adapter_config = checkpoint.find(ADAPTER_CONFIG)
            if adapter_config is not None and checkpoint.adapter is not None:
                adapter = adapter_config.parent
                model = _load_adapter(
                    cls.auto_class, checkpoint, adapter, model_args, kwargs, is_trainable=is_trainable
                )
            else:
                model = _load_model(cls.auto_class, checkpoint, model_args, kwargs)
            head = _read_head(checkpoint)
            if head is None:
                log.warning("%s holds no value head: a new one starts at random.", source)
        elif isinstance(source, PreTrainedModel) or _is_peft_model(source):
            model = source
            if kwargs:
                log.warning("Not used, because the model is loaded already: %s.", ", ".join(sorted(kwargs)))
        else:
            raise ZooError(
                f"A {type(source).__name__} is not a language model: give a path, a PreTrainedModel or a PeftModel."
            )
        if peft_config is not None:
            if _is_peft_model(model):
                log.warning("peft_config is not used: %s has an adapter already.", type(model).__name__)
            else:
                model = _add_adapter(model, peft_config, kbit, revision=revision)
        wrapped = cls(model, **head_arguments)
        if head is not None:
            own, saved = wrapped.v_head.summary.weight.shape, head["summary.weight"].shape
            if saved != own:
                raise ZooError(
                    f"The value head of {source} reads hidden states of size {saved[-1]}, and this model's have size "
                    f"{own[-1]}: it is another model's head; take its {PREFIX}* away."
                )
            wrapped.v_head.load_state_dict(head)
        return wrapped

    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        return_past_key_values: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Logits (B, T, V) float32, the loss (None without labels), and V of the state after each token (B, T) float32.

        input_ids, attention_mask: (B, T); T is the decoder's length in an encoder-decoder. kwargs go to the model. With
        `return_past_key_values` the cache is a fourth element. The order of the arguments is TRL's.
        """
        if past_key_values is not None:
            kwargs["past_key_values"] = past_key_values
        if return_past_key_values:
            kwargs.setdefault("use_cache", True)
        kwargs |= {"output_hidden_states": True, "return_dict": True}
        output = self.pretrained_model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        hidden = getattr(output, self.hidden_states_name)[-1]
        values = self.v_head(hidden.to(self.v_head.summary.weight.device)).squeeze(-1)
        result = (output.logits.float(), output.loss, values)
        return (*result, output.past_key_values) if return_past_key_values else result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pretrained_model, name) if name in FROM_THE_MODEL else super().__getattr__(name)

    @property
    def generation_config(self) -> GenerationConfig:
        return self.pretrained_model.generation_config

    @generation_config.setter
    def generation_config(self, value: GenerationConfig) -> None:
        self.pretrained_model.generation_config = value

    def save_pretrained(
        self, save_directory: str | Path, *, state_dict: Mapping[str, Tensor] | None = None, **kwargs: Any
    ) -> None:
        """Writes a checkpoint that `from_pretrained` reads back; transformers and peft load it too, without the head.

        state_dict: weights in the names of `state_dict()`, for those who gather them themselves. kwargs go to the
        model's `save_pretrained` (max_shard_size, variant, is_main_process, ...).
        """
        state = dict(self.state_dict() if state_dict is None else state_dict)
        if not self.is_peft_model:
            self.pretrained_model.save_pretrained(save_directory, state_dict=state, **kwargs)
            return
        if kwargs.pop("push_to_hub", False):
            raise ZooError("An adapter is not pushed by save_pretrained: call push_to_hub with the repository's name.")
        self.pretrained_model.save_pretrained(str(save_directory), **kwargs)
        if kwargs.get("is_main_process", True):
            head = {key: value.contiguous() for key, value in state.items() if _of_head(key)}
            save_file(head, Path(save_directory) / WEIGHTS_FILE, metadata={"format": "pt"})

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Takes what `state_dict()` gives; under an adapter that is the head alone, and the rest stays as it is."""
        if self.is_peft_model and all(_of_head(key) for key in state_dict):
            head = {key.removeprefix(PREFIX): value for key, value in state_dict.items()}
            return self.v_head.load_state_dict(head, strict=strict, assign=assign)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


# TRL's names in a state dict: the model's own, without a prefix, and v_head.*; of an adapted model the head alone. As
# hooks rather than methods, because a module that holds this one (DDP, a trainer's) loads through them too.


def _to_checkpoint_names(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    head = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix + PREFIX)}
    inner = prefix + INNER_PREFIX
    for key in [key for key in state_dict if key.startswith(inner)]:
        value = state_dict.pop(key)
        if not module.is_peft_model:
            state_dict[prefix + key.removeprefix(inner)] = value
    state_dict.update(head)


def _to_module_names(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state_dict if key.startswith(prefix) and not key.startswith(prefix + PREFIX)]:
        state_dict[prefix + INNER_PREFIX + key.removeprefix(prefix)] = state_dict.pop(key)


class AutoModelForCausalLMWithValueHead(_ValueHeadModel):
    """A causal language model with a value head."""

    auto_class = transformers_parent_class = AutoModelForCausalLM
    lm_head_namings: ClassVar = ["lm_head", "embed_out"]
    hidden_states_name = "hidden_states"
    is_encoder_decoder = False


class AutoModelForSeq2SeqLMWithValueHead(_ValueHeadModel):
    """An encoder-decoder language model with a value head on its decoder."""

    auto_class = transformers_parent_class = AutoModelForSeq2SeqLM
    lm_head_namings: ClassVar = ["lm_head", "embed_out", "output_projection"]
    hidden_states_name = "decoder_hidden_states"
    is_encoder_decoder = True
