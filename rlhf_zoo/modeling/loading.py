"""Loads models, configurations and tokenizers from safetensors and JSON, and checks that weights are complete."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Unpack

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..errors import ZooError, first_line
from .config_checks import check_tokenizer
from .gguf import with_plain_weights
from .model_files import HubOptions, ModelFiles, display_name, find_model_files, translate_load_errors
from .remote_code import is_code_trusted, record_code, untrusted_message

_LAYER_KEY = re.compile(r"\.(layers|h|blocks?)\.\d+\.")
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def silence_transformers() -> None:
    """Turns off the progress bars and warnings of transformers, because rlhf-zoo has its own bars."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@dataclass(frozen=True)
class LoadOptions:
    """How weights are loaded.

    Attributes:
        dtype: The name of the weights' torch dtype in memory; "auto" for the dtype in which they were saved.
        attention: The attention implementation, by transformers' name; None for the default.
        quantization: A quantization config of transformers; None for no quantization.
    """

    dtype: str = "float32"
    attention: str | None = None
    quantization: QuantizationConfigMixin | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for `from_pretrained`."""
        options = {"attn_implementation": self.attention, "quantization_config": self.quantization}
        explicit_options = {name: value for name, value in options.items() if value is not None}
        return {"dtype": self.dtype, "trust_remote_code": is_code_trusted(), **explicit_options}


IN_FLOAT32 = LoadOptions()
AS_SAVED = LoadOptions(dtype="auto")


def load_tokenizer(
    source: str | Path, *, name: str | None = None, **hub: Unpack[HubOptions]
) -> PreTrainedTokenizerBase:
    """Loads the tokenizer that was saved with a model.

    Args:
        source: A folder or a Hub id.
        name: The model's name in errors; None for `source`.
        **hub: See `HubOptions`.

    Raises:
        ZooError: There is no tokenizer, or it cannot be loaded.
    """
    name = name or str(source)
    problem = f"{name} has no tokenizer that can be loaded"
    # Without this check, transformers would make an empty tokenizer from config.json alone.
    if Path(source).is_dir() and not any((Path(source) / file).is_file() for file in TOKENIZER_FILES):
        raise ZooError(f"{problem}: save the tokenizer with the model.")
    files = ModelFiles(source, **hub)
    files.check_config()  # AutoTokenizer reads config.json for the tokenizer's class
    path_overrides = check_tokenizer(
        files.read_json("tokenizer_config.json"),
        files.read_json("special_tokens_map.json"),
        files.read_json("config.json"),
        name,
    )
    if files.directory is None:
        hub = {**hub, "revision": files.hub_options["revision"]}  # the commit whose files were checked
    record_code(files.find, name, name=display_name(source))
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=is_code_trusted(), **path_overrides, **hub)
    except Exception as error:  # the Rust library `tokenizers` raises plain Exception
        if "trust_remote_code" in str(error):
            raise ZooError(untrusted_message(f"The tokenizer of {name}")) from error
        raise ZooError(f"{problem} ({first_line(error)}): save the tokenizer with the model.") from error
    # WordPiece without its unknown token loads, but fails at the first unknown word.
    model: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if type(model).__name__ == "WordPiece" and model.token_to_id(model.unk_token) is None:
        raise ZooError(
            f"The tokenizer of {name} is WordPiece without the token {model.unk_token} for unknown words: add it to "
            "the vocabulary, or choose another tokenizer."
        )
    return tokenizer


def load_with_missing(
    auto_class: Any,
    source: str | Path,
    *,
    subject: str,
    suffix: str = "",
    options: LoadOptions = IN_FLOAT32,
    may_lack: tuple[str, ...] = (),
    overrides: Mapping[str, Any] = MappingProxyType({}),
    **hub: Unpack[HubOptions],
) -> tuple[Any, set[str]]:
    """Loads a model from safetensors, and returns it with the names of the weights that its checkpoint lacks.

    Args:
        auto_class: A class of transformers with `from_pretrained`.
        source: A folder or a Hub id.
        subject: The model's name in errors, such as "The model NAME".
        suffix: As for `translate_load_errors`.
        options: Precision, attention and quantization.
        may_lack: Modules that the checkpoint may lack, such as a head that has yet to be trained.
        overrides: Further arguments for `from_pretrained`, such as `config`.
        **hub: See `HubOptions`.

    Returns:
        The model, and the names of the weights that the checkpoint lacks, all of them in `may_lack`.

    Raises:
        ZooError: The model cannot be loaded, its weights do not fit its configuration, or its files do not match the
            digests that the run recorded.
    """
    files = find_model_files(source, **hub)
    if files.adapter_config is not None:
        raise ZooError(f"{subject} is an adapter: merge it into its base first, or choose the base.")
    with translate_load_errors(subject, suffix):
        record_code(files.find, subject, name=display_name(source))
        result = auto_class.from_pretrained(
            source,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # otherwise transformers raises without naming the weights
            **with_plain_weights({**options.arguments, **_pin_options(files, hub), **overrides}),
        )
    if not isinstance(result, tuple):  # a user's own class returned no loading info
        return result, set()
    model, loading_info = result
    _check_fit(loading_info, subject, may_lack)
    return model, set(loading_info["missing_keys"])


def load_model(auto_class: Any, source: str | Path, **options: Any) -> Any:
    """Loads a model as `load_with_missing` does, with the same arguments, and returns only the model."""
    return load_with_missing(auto_class, source, **options)[0]


def _check_fit(loading_info: Mapping[str, Any], subject: str, may_lack: tuple[str, ...]) -> None:
    """Raises ZooError if weights are missing, and would be random, or do not have the shapes in the configuration.

    Args:
        loading_info: The loading info of `from_pretrained`.
        subject: The model's name in the error.
        may_lack: Modules that the checkpoint may lack.
    """
    fix = "use the config.json that was saved with these weights"
    for name, saved_shape, config_shape in sorted(loading_info["mismatched_keys"], key=lambda entry: entry[0]):
        shapes = (" x ".join(map(str, shape)) for shape in (saved_shape, config_shape))
        raise ZooError("{} has a weight {} of {}, but its config.json says {}: {}.".format(subject, name, *shapes, fix))
    missing_names = sorted(name for name in loading_info["missing_keys"] if name.split(".")[0] not in may_lack)
    if missing_names:
        names = _shorten(missing_names)
        raise ZooError(f"{subject} lacks weights that its config.json names ({names}): {fix}, or copy all files again.")
    # A head or buffer that the model does not use is harmless, but without one of its layers it is another model.
    unused_layer_names = sorted(name for name in loading_info["unexpected_keys"] if _LAYER_KEY.search(name))
    if unused_layer_names:
        names = _shorten(unused_layer_names)
        raise ZooError(f"{subject} has weights of more layers than its config.json names ({names}): {fix}.")


def _shorten(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def load_config(source: str | Path, *, subject: str, **hub: Unpack[HubOptions]) -> PreTrainedConfig:
    """Loads a model's configuration.

    Args:
        source: A folder or a Hub id.
        subject: The model's name in errors.
        **hub: See `HubOptions`.

    Raises:
        ZooError: The configuration cannot be read.
    """
    files = ModelFiles(source, **hub)
    files.check_config()
    with translate_load_errors(subject):
        record_code(files.find, subject, name=display_name(source))
        return AutoConfig.from_pretrained(source, trust_remote_code=is_code_trusted(), **_pin_options(files, hub))


def _pin_options(files: ModelFiles, hub: HubOptions) -> HubOptions:
    """Pins the commit whose code was recorded, if code may run, because a push could change the code in between."""
    if not is_code_trusted() or files.directory is not None:
        return hub
    return {**hub, "revision": files.hub_options["revision"]}
