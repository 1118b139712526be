"""Checks the JSON files of a downloaded model before a library acts on them.

transformers and peft pass the keys of these files to constructors. A key may name a file to read or a model to load, or
set the size of a model to build.
"""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import ZooError

#: The maximum number of layers, experts or blocks. Each is a Python object, and ten million would take all memory.
MAX_PARTS = 10_000
MAX_LABELS = 100_000
#: The maximum of any other number, such as the size of the vocabulary.
MAX_COUNT = 10_000_000
_PARTS = re.compile(
    r"(^|_)(n_layer|layers?|depths?|blocks|groups?|group_num|stages|levels|codebooks|quantizers"
    r"|(local_|routed_)?experts)$"
)
_LABELS = ("num_labels", "n_labels", "id2label", "label2id")
_COUNTS = re.compile(r"^(num|n)_|_size$")
# Words in keys that count something other than parts of a model, such as training steps or bytes.
_NOT_COUNTS = re.compile(r"param|token|step|sample|example|byte|position")
# Keys of token ids, which are not sizes.
_IDS = re.compile(r"(ids?|tokens?)$")

#: The types of adapters that can be loaded. Other types may load a second model or a tokenizer by themselves.
ADAPTER_TYPES = ("LORA",)
#: The keys of adapter_config.json that may hold text, lists and objects. Of these, only base_model_name_or_path names
#: something to load, and `ModelFiles.adapter_config` checks it.
_ADAPTER_KEYS = {
    "alora_invocation_tokens", "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "modules_to_save", "peft_type", "peft_version",
    "rank_pattern", "revision", "target_modules", "target_parameters", "task_type", "trainable_token_indices",
}  # fmt: skip

#: Keys of tokenizer_config.json under which old exports store paths of the machine that wrote them. The paths are
#: ignored, because transformers finds these files next to tokenizer_config.json.
_OLD_PATH_KEYS = ("merges_file", "special_tokens_map_file", "spm_file", "tokenizer_file", "vocab_file")
# Keys that transformers overwrites.
_OVERWRITTEN_KEYS = ("name_or_path", "_name_or_path")
# Keys whose texts may look like paths, but are never opened.
_TEXT_KEYS = ("chat_template", "response_schema", "added_tokens_decoder", "model_specific_special_tokens")
_TOKEN_KEY = re.compile(r"_tokens?$")
_FILE_KEY = re.compile(r"(_|^)(file|path|dir)$")
# Keys that hold a vocabulary or name a file with a vocabulary.
_VOCABULARY_KEYS = ("init_inputs", "merges", "vocab")
_PATH = re.compile(r"""(^|[\s='"])(/[^\s/]|~|[A-Za-z]:[\\/]|\\\\)|(^|[\s='"\\/])\.\.([\\/]|$)|://""")
#: Tokenizer classes and a model_type that load tokenizers from subfolders. Files in subfolders are not checked.
_COMPOSITE_TOKENIZERS = ("RagTokenizer", "RagTokenizerFast", "rag")


def check_config(config: Mapping[str, Any], file: str) -> None:
    """Checks a config.json before a configuration is built from it.

    Args:
        config: The file's content.
        file: The file's name in errors.

    Raises:
        ZooError: The file asks for more layers, experts or labels than any machine can build, or names a kernel in a
            repository, which transformers would download and run.
    """
    _check_sizes(config, file)
    if (kernel := next(_kernels_in(config), None)) is not None:
        raise ZooError(
            f"{file} names the kernel {kernel}, which would be downloaded and run: remove it, or choose another model."
        )


def _check_sizes(config: Mapping[str, Any], file: str) -> None:
    for name, value in config.items():
        count, limit = _largest_count(str(name), value)
        if count > limit:
            raise ZooError(
                f"{file} has {name} = {count:,}, but at most {limit:,} are allowed: use the config.json that was saved "
                "with these weights."
            )
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Mapping):
                _check_sizes(part, file)


def _largest_count(name: str, value: Any) -> tuple[int | float, int]:
    """Returns the largest count in a value of config.json, and the limit of that count."""
    if name in _LABELS:
        return (len(value) if isinstance(value, Mapping | list) else _number(value)), MAX_LABELS
    if _PARTS.search(name):
        return max(_numbers(value), default=0), MAX_PARTS
    if isinstance(value, list) and not _IDS.search(name):
        nested_numbers = [number for item in value if isinstance(item, list) for number in _numbers(item)]
        # For example, [[["global"], 12]] repeats a pattern of layers 12 times.
        if max(nested_numbers, default=0) > MAX_PARTS:
            return max(nested_numbers), MAX_PARTS
        return max(_numbers(value), default=0), MAX_COUNT
    if _COUNTS.search(name) and not _NOT_COUNTS.search(name):
        return _number(value), MAX_COUNT
    return 0, MAX_COUNT


def _number(value: Any) -> int | float:
    return value if isinstance(value, int | float) else 0


def _numbers(value: Any) -> Iterator[int | float]:
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, list):
            yield from _numbers(item)
        else:
            yield _number(item)


def _kernels_in(config: Any) -> Iterator[str]:
    """Yields the kernels that a configuration takes from a repository, including those of nested configurations."""
    for key, value in config.items() if isinstance(config, Mapping) else ():
        if str(key).endswith("_implementation"):
            names = value.values() if isinstance(value, Mapping) else [value]
            yield from (str(name) for name in names if "/" in str(name))
        else:
            yield from _kernels_in(value)


def check_adapter(config: Mapping[str, Any], file: str) -> None:
    """Checks an adapter_config.json before peft reads it.

    Args:
        config: The file's content.
        file: The file's name in errors.

    Raises:
        ZooError: The adapter's type is not supported, its rank is too high, or a key other than base_model_name_or_path
            could name a model, a module or a file.
    """
    if config.get("peft_type") not in ADAPTER_TYPES:
        raise ZooError(
            f"{file} has peft_type = {config.get('peft_type')!r}, but only {', '.join(ADAPTER_TYPES)} is supported: "
            "merge the adapter into its base where it was trained, and use the merged model."
        )
    for key, value in config.items():
        if key == "auto_mapping":
            is_allowed = not value or _is_plain_mapping(value)
        elif key == "megatron_core":  # peft imports this module only if there is a megatron_config
            is_allowed = value in (None, "", "megatron.core")
        else:
            # Numbers and booleans name nothing. Refuse all other keys with content, including future keys of peft.
            is_allowed = key in _ADAPTER_KEYS or not isinstance(value, str | list | dict) or not value
        if not is_allowed:
            raise ZooError(
                f"{file} has {key} = {_shorten(value)}, which could load other files or program code: remove that key "
                "if you trust the adapter, or choose another."
            )
    pattern = config.get("rank_pattern")
    ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, Mapping) else ())]
    if (rank := max(map(_number, ranks))) > MAX_PARTS:
        raise ZooError(f"{file} has a rank of {rank:,}, but at most {MAX_PARTS:,} is allowed: choose another adapter.")


def _is_plain_mapping(value: Any) -> bool:
    """Whether auto_mapping names only the base's class and library, as peft writes it."""
    if not isinstance(value, Mapping) or not value.keys() <= {"base_model_class", "parent_library"}:
        return False
    return all(isinstance(text, str) and re.fullmatch(r"\w+(\.\w+)*", text) for text in value.values())


def check_tokenizer(
    tokenizer_config: Mapping[str, Any], special_tokens_map: Mapping[str, Any], config: Mapping[str, Any], name: str
) -> dict[str, None]:
    """Checks the settings of a tokenizer, because transformers passes them to a class that could open any file.

    The file's content would become part of the vocabulary, and would be published with the next model.

    Args:
        tokenizer_config: The content of tokenizer_config.json.
        special_tokens_map: The content of special_tokens_map.json, whose entries have priority.
        config: The content of config.json.
        name: The model's name in errors.

    Returns:
        Keywords for `AutoTokenizer.from_pretrained` that override the paths of old exports with None.

    Raises:
        ZooError: A setting names a file, or may make the class open a file.
    """
    classes = (tokenizer_config.get("tokenizer_class"), config.get("tokenizer_class"), config.get("model_type"))
    if composite := next((kind for kind in classes if kind in _COMPOSITE_TOKENIZERS), None):
        raise ZooError(f"{name} has a {composite}, which combines two tokenizers: choose a model with one tokenizer.")
    for key in special_tokens_map:
        if not _TOKEN_KEY.search(key):
            raise ZooError(
                f"special_tokens_map.json of {name} has the key {key}, which is not a special token: remove it, or "
                "choose another model."
            )
    for key, value in tokenizer_config.items():
        if key in _OLD_PATH_KEYS or key in _OVERWRITTEN_KEYS or key in _TEXT_KEYS or _TOKEN_KEY.search(key):
            continue
        if (setting := _find_file_setting(key, value)) is not None:
            raise ZooError(
                f"tokenizer_config.json of {name} has {key} = {_shorten(setting)}, but a tokenizer may only read files "
                "that were saved with it: remove that key, or choose another model."
            )
    return dict.fromkeys(key for key in _OLD_PATH_KEYS if key in tokenizer_config)


def _find_file_setting(key: str, value: Any) -> Any:
    """Returns the part of a setting that names a file or makes a tokenizer read a file; None if no part does."""
    if value and (key in _VOCABULARY_KEYS or _FILE_KEY.search(key)):
        return value
    if isinstance(value, str):
        return value if _PATH.search(value) or os.path.isfile(value) else None
    if isinstance(value, Mapping):
        children = [(str(child_key), child) for child_key, child in value.items()]
    else:
        children = [(key, child) for child in value] if isinstance(value, list) else []
    file_settings = (_find_file_setting(child_key, child) for child_key, child in children)
    return next((file_setting for file_setting in file_settings if file_setting is not None), None)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
