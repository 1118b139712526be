"""Language models with a value head.

`AutoModelForCausalLMWithValueHead` and `AutoModelForSeq2SeqLMWithValueHead` replace TRL's classes with these names (in
TRL up to 1.12), with the same calls and checkpoints. A full model's checkpoint has two additional tensors,
`v_head.summary.weight` and `v_head.summary.bias`, which plain transformers ignores. Next to an adapter,
`model.safetensors` has only these two. For adapters, TRL writes a pickle, `pytorch_model.bin`, which is not read here.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GenerationConfig, PreTrainedModel
from transformers.utils import PushToHubMixin

from ..errors import ZooError
from .gguf import with_plain_weights
from .model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, WEIGHTS_FILE, ModelFiles
from .remote_code import is_code_trusted
from .value_head import HEAD_PREFIX, ValueHead, hidden_size_of, is_head_key, read_value_head

log = logging.getLogger(__name__)

INNER_PREFIX = "pretrained_model."
HEAD_ARGUMENTS = ("summary_dropout_prob", "v_head_init_strategy", "v_head_initializer_range")
KBIT_ARGUMENTS = ("use_gradient_checkpointing", "gradient_checkpointing_kwargs")
#: Arguments that locate a checkpoint in its repository. An adapter's arguments do not apply to its base.
ADDRESS_ARGUMENTS = ("revision", "subfolder")
#: Arguments of the Hub's client. All except ADDRESS_ARGUMENTS also apply to an adapter's base.
HUB_ARGUMENTS = (*ADDRESS_ARGUMENTS, "token", "cache_dir", "force_download", "local_files_only")

#: Attributes of the wrapped model that the value-head model also has.
DELEGATED_ATTRIBUTES = (
    "config", "device", "dtype", "generate", "prepare_inputs_for_generation", "enable_input_require_grads",
    "gradient_checkpointing_enable", "gradient_checkpointing_disable",
)  # fmt: skip


@contextmanager
def _withhold_head_warnings() -> Iterator[None]:
    """Withholds transformers' warnings about a value head's weights in this context. Logs them if loading fails.

    transformers warns that it does not use these weights, but `read_value_head` reads them.
    """
    withheld_records: list[logging.LogRecord] = []

    def is_unrelated(record: logging.LogRecord) -> bool:
        if HEAD_PREFIX not in record.getMessage():
            return True
        withheld_records.append(record)
        return False

    logger = logging.getLogger(PreTrainedModel.__module__)
    logger.addFilter(is_unrelated)
    is_loaded = False
    try:
        yield
        is_loaded = True
    finally:
        logger.removeFilter(is_unrelated)
        for record in () if is_loaded else withheld_records:
            logger.handle(record)


def _load_model(auto_class: Any, checkpoint: ModelFiles, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Loads a transformers model, without warnings about the value head's weights."""
    checkpoint.check_config()
    if checkpoint.weights is None and "gguf_file" not in kwargs:
        checkpoint.refuse_pickle("model")
    if checkpoint.adapter_config is not None:  # transformers would load the adapter's base without the checks here
        raise ZooError(f"The base {checkpoint.source} is itself an adapter: merge it into its own base first.")
    # Convert None, which would make transformers ask in the terminal.
    trust_remote_code = bool(kwargs.get("trust_remote_code", is_code_trusted()))
    options = {**with_plain_weights(kwargs), "trust_remote_code": trust_remote_code} | {
        name: checkpoint.hub_options[name] for name in ADDRESS_ARGUMENTS if name in checkpoint.hub_options
    }
    with _withhold_head_warnings():
        model, loading_info = auto_class.from_pretrained(checkpoint.source, *args, output_loading_info=True, **options)
    unexpected_keys = sorted(key for key in loading_info["unexpected_keys"] if not is_head_key(key))
    problems = {
        "missing": sorted(loading_info["missing_keys"]),
        "unexpected": unexpected_keys,
        "of another size": sorted(key for key, *_ in loading_info["mismatched_keys"]),
    }
    # transformers reports these problems itself, unless its report names the head: then the entire report was withheld.
    if len(unexpected_keys) < len(loading_info["unexpected_keys"]) and any(problems.values()):
        problems_text = "; ".join(f"{', '.join(keys)} ({problem})" for problem, keys in problems.items() if keys)
        log.warning("Not all weights of %s fit %s: %s", checkpoint.source, type(model).__name__, problems_text)
    return model


def _load_adapter(
    auto_class: Any,
    checkpoint: ModelFiles,
    adapter_folder: Path,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_trainable: bool,
) -> Any:
    """Loads an adapter's base, and the adapter on top of it."""
    from peft import PeftConfig, PeftModel

    checkpoint.variant = None  # the variant in kwargs is the base's
    if checkpoint.find(ADAPTER_WEIGHTS) is None:
        checkpoint.refuse_pickle("adapter_model")
        raise ZooError(f"{checkpoint.source} has {ADAPTER_CONFIG} but no {ADAPTER_WEIGHTS}: copy all files again.")
    config = PeftConfig.from_pretrained(str(adapter_folder))
    if not config.base_model_name_or_path:
        raise ZooError(
            f"The {ADAPTER_CONFIG} of {checkpoint.source} names no base model: load the base, put the adapter on it "
            "with peft.PeftModel.from_pretrained, and pass the PeftModel."
        )
    hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    base = ModelFiles(config.base_model_name_or_path, revision=config.revision, variant=kwargs.get("variant"), **hub)
    model = _load_model(auto_class, base, args, kwargs)
    return PeftModel.from_pretrained(model, str(adapter_folder), is_trainable=is_trainable)


def _add_adapter(
    model: PreTrainedModel, peft_config: Any, kbit_arguments: dict[str, Any], *, revision: str | None
) -> Any:
    """Adds a new adapter to a model. The adapter's config records the base's revision."""
    from peft import PeftConfig, get_peft_model, prepare_model_for_kbit_training

    if not isinstance(peft_config, PeftConfig):
        raise ZooError(f"peft_config is a {type(peft_config).__name__}: pass a config of peft, such as LoraConfig.")
    if getattr(model, "is_quantized", False):
        model = prepare_model_for_kbit_training(model, **kbit_arguments)
    return get_peft_model(model, peft_config, revision=revision)


def _is_peft_model(model: PreTrainedModel) -> bool:
    from peft import PeftModel

    return isinstance(model, PeftModel)


def _output_device(model: PreTrainedModel) -> torch.device:
    """Returns the device of the output embeddings, because they read the same hidden state as the value head."""
    embeddings = model.get_output_embeddings()
    weight = getattr(embeddings, "weight", None)
    device = next(model.parameters()).device if weight is None else weight.device
    if device.type == "meta":
        raise ZooError(
            f"The output layer of this {type(model).__name__} is offloaded, but the value head must be on the same "
            "device: pass a device_map without offloading."
        )
    return device


class _Architectures:
    """The classes that can be wrapped. A descriptor, so that the slow import of peft happens only when needed."""

    def __get__(self, *_: Any) -> tuple[type, ...]:
        from peft import PeftModel

        return PreTrainedModel, PeftModel


class _ValueHeadModel(PushToHubMixin, nn.Module):
    """A language model and a value head on its last hidden state.

    Args:
        pretrained_model: A PreTrainedModel, or a PeftModel of one.
        **head_arguments: Arguments of `ValueHead`. `summary_dropout_prob` defaults to the configuration's, or 0.1.

    Raises:
        ZooError: The model has no language model head, is an encoder-decoder instead of a decoder or vice versa, or has
            an adapter that does not support a value head.
    """

    # Attributes of TRL's classes, for code that reads them.
    transformers_parent_class: ClassVar[Any]
    lm_head_namings: ClassVar[list[str]]
    supported_args = HEAD_ARGUMENTS
    supported_modules = ("v_head",)
    supported_rm_modules = ("score",)
    supported_pretrained_model_architectures = _Architectures()

    auto_class: ClassVar[Any]
    hidden_states_name: ClassVar[str]
    is_encoder_decoder: ClassVar[bool]

    def __init__(self, pretrained_model: Any, **head_arguments: Any) -> None:
        super().__init__()
        self.is_peft_model = _is_peft_model(pretrained_model)
        self._check(pretrained_model)
        config = pretrained_model.config
        if head_arguments.get("summary_dropout_prob") is None:
            head_arguments["summary_dropout_prob"] = getattr(config, "summary_dropout_prob", 0.1)
        self.pretrained_model = pretrained_model
        self.v_head = ValueHead(hidden_size_of(config), **head_arguments).to(_output_device(pretrained_model))
        self.training = pretrained_model.training
        self.v_head.train(self.training)
        self.register_state_dict_post_hook(_to_checkpoint_names)
        self.register_load_state_dict_pre_hook(_to_module_names)

    def _check(self, model: Any) -> None:
        class_name = type(model.get_base_model() if self.is_peft_model else model).__name__
        if not model.can_generate():
            raise ZooError(f"{class_name} has no language model head: pass a model of {self.auto_class.__name__}.")
        if bool(model.config.is_encoder_decoder) != self.is_encoder_decoder:
            other = AutoModelForCausalLMWithValueHead if self.is_encoder_decoder else AutoModelForSeq2SeqLMWithValueHead
            raise ZooError(f"{class_name} is not a model of {self.auto_class.__name__}: use {other.__name__}.")
        if self.is_peft_model:
            if model.active_peft_config.is_prompt_learning:
                raise ZooError(
                    f"{model.active_peft_config.peft_type} learns prompts, whose positions belong to no token and have "
                    "no value: use another adapter, such as LoRA."
                )
        elif getattr(model, "peft_config", None):
            raise ZooError(
                f"This {class_name} has an adapter without a PeftModel around it, and saving it would lose the value "
                "head: load it by its path, or wrap it with peft.PeftModel."
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
        """Loads or wraps a model, with the value head of its checkpoint or a new head with random weights.

        Args:
            pretrained_model_name_or_path: A folder, a Hub id, a PreTrainedModel or a PeftModel. If it is an adapter's
                folder or id, its base is loaded too.
            *model_args: Positional arguments of transformers' `from_pretrained`.
            peft_config: The configuration of a new adapter, for a model that has none; None to add none.
            is_trainable: Whether a loaded adapter is trained.
            **kwargs: Arguments of `ValueHead`; `use_gradient_checkpointing` and `gradient_checkpointing_kwargs` for a
                quantized model with a new adapter; and arguments of transformers' `from_pretrained` (revision, dtype,
                device_map, ...).

        Raises:
            ZooError: The model or the head cannot be loaded, or they do not fit each other.
        """
        source: Any = pretrained_model_name_or_path
        if kwargs.pop("reward_adapter", None) is not None:
            raise ZooError("reward_adapter is not supported: pass the reward model to the trainer.")
        head_arguments = {name: kwargs.pop(name) for name in HEAD_ARGUMENTS if name in kwargs}
        kbit_arguments = {name: kwargs.pop(name) for name in KBIT_ARGUMENTS if name in kwargs}
        head = revision = None
        if isinstance(source, str | Path):
            checkpoint = ModelFiles(
                source,
                variant=kwargs.get("variant"),
                **{name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs},
            )
            revision = kwargs.pop("revision", None)
            kwargs.pop("subfolder", None)
            adapter_config_path = checkpoint.find(ADAPTER_CONFIG)
            if adapter_config_path is not None and checkpoint.adapter_config is not None:
                adapter_folder = adapter_config_path.parent
                model = _load_adapter(
                    cls.auto_class, checkpoint, adapter_folder, model_args, kwargs, is_trainable=is_trainable
                )
            else:
                model = _load_model(cls.auto_class, checkpoint, model_args, kwargs)
            head = read_value_head(checkpoint)
            if head is None:
                log.warning("%s has no value head: using a new one with random weights.", source)
        elif isinstance(source, PreTrainedModel) or _is_peft_model(source):
            model = source
            if kwargs:
                log.warning("Ignored, because the model is already loaded: %s.", ", ".join(sorted(kwargs)))
        else:
            raise ZooError(
                f"A {type(source).__name__} is not a language model: pass a path, a PreTrainedModel or a PeftModel."
            )
        if peft_config is not None:
            if _is_peft_model(model):
                log.warning("Ignoring peft_config: %s already has an adapter.", type(model).__name__)
            else:
                model = _add_adapter(model, peft_config, kbit_arguments, revision=revision)
        value_head_model = cls(model, **head_arguments)
        if head is not None:
            own_shape, saved_shape = value_head_model.v_head.summary.weight.shape, head["summary.weight"].shape
            if saved_shape != own_shape:
                raise ZooError(
                    f"The value head of {source} has hidden size {saved_shape[-1]}, but this model has "
                    f"{own_shape[-1]}: it belongs to another model; remove its {HEAD_PREFIX}* tensors."
                )
            value_head_model.v_head.load_state_dict(head)
        return value_head_model

    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        return_past_key_values: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Computes logits and values. The order of the arguments is TRL's.

        Args:
            input_ids: (B, T) token ids.
            past_key_values: The cache of earlier tokens; None for no cache.
            attention_mask: (B, T), 0 for padding.
            return_past_key_values: Whether to return the cache as a fourth element.
            **kwargs: Passed to the model.

        Returns:
            Logits (B, T, V) float32, the loss (None without labels), and the value of the state after each token,
            (B, T) float32; then the cache, if requested. In an encoder-decoder, T is the decoder's input length.
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
        return getattr(self.pretrained_model, name) if name in DELEGATED_ATTRIBUTES else super().__getattr__(name)

    @property
    def generation_config(self) -> GenerationConfig:
        return self.pretrained_model.generation_config

    @generation_config.setter
    def generation_config(self, value: GenerationConfig) -> None:
        self.pretrained_model.generation_config = value

    def save_pretrained(
        self, save_directory: str | Path, *, state_dict: Mapping[str, Tensor] | None = None, **kwargs: Any
    ) -> None:
        """Writes a checkpoint that `from_pretrained` reads. transformers and peft can read it too, without the head.

        Args:
            save_directory: The folder.
            state_dict: Weights with the names of `state_dict()`, such as weights gathered from several processes; None
                for this module's own.
            **kwargs: Passed to the model's `save_pretrained` (max_shard_size, variant, is_main_process, ...).

        Raises:
            ZooError: `push_to_hub` is set for an adapter.
        """
        state = dict(self.state_dict() if state_dict is None else state_dict)
        if not self.is_peft_model:
            self.pretrained_model.save_pretrained(save_directory, state_dict=state, **kwargs)
            return
        if kwargs.pop("push_to_hub", False):
            raise ZooError("save_pretrained does not push an adapter: call push_to_hub with the repository's name.")
        self.pretrained_model.save_pretrained(str(save_directory), **kwargs)
        if kwargs.get("is_main_process", True):
            head = {key: value.contiguous() for key, value in state.items() if is_head_key(key)}
            save_file(head, Path(save_directory) / WEIGHTS_FILE, metadata={"format": "pt"})

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads weights that `state_dict()` returned. With an adapter, these are only the head's.

        Args:
            state_dict: The weights.
            strict: As in torch.
            assign: As in torch.
        """
        if self.is_peft_model and all(is_head_key(key) for key in state_dict):
            head = {key.removeprefix(HEAD_PREFIX): value for key, value in state_dict.items()}
            return self.v_head.load_state_dict(head, strict=strict, assign=assign)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


# State dicts have TRL's names: the model's weights without a prefix, and v_head.*. With an adapter, there is only the
# head. These are hooks, because hooks also run when a module that contains this one (such as DDP) is saved or loaded.
def _to_checkpoint_names(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    head = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix + HEAD_PREFIX)}
    inner_prefix = prefix + INNER_PREFIX
    for key in [key for key in state_dict if key.startswith(inner_prefix)]:
        value = state_dict.pop(key)
        if not module.is_peft_model:
            state_dict[prefix + key.removeprefix(inner_prefix)] = value
    state_dict.update(head)


def _to_module_names(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state_dict if key.startswith(prefix) and not key.startswith(prefix + HEAD_PREFIX)]:
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
