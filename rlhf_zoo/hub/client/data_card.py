"""Checks a data set's card: it may list only the data set's own files, and set only options that are safe."""

import re
from collections.abc import Iterator, Mapping

from ...errors import ZooError
from ...fileio import BadYAML, load_yaml

README = "README.md"
#: The files in which `datasets` looks for patterns.
CARD_FILES = (README, ".huggingface.yaml")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")  # matches a drive letter too
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")
_PATTERN_KEYS = ("data_files", "data_dir")
#: Keys of a configuration that are for human readers. `datasets` does not open addresses in them.
_DESCRIPTIVE_KEYS = ("description", "citation", "homepage", "license")
#: The keys that a configuration may set. Other keys can make a loader hang, run code or open other files.
_ALLOWED_KEYS = (
    "config_name", "default", "version", "features", *_DESCRIPTIVE_KEYS, *_PATTERN_KEYS,
    # for tables
    "sep", "delimiter", "header", "names", "column_names", "index_col", "usecols", "columns", "true_values",
    "false_values", "skipinitialspace", "skiprows", "nrows", "na_values", "keep_default_na", "na_filter",
    "skip_blank_lines", "thousands", "decimal", "lineterminator", "quotechar", "quoting", "escapechar", "doublequote",
    "comment", "on_bad_lines",
    # for JSON and text
    "encoding", "encoding_errors", "field", "on_mixed_types", "keep_linebreaks", "sample_by",
)  # fmt: skip
# A longer separator is a regular expression, which can make the loader hang.
_SEPARATOR_KEYS = ("sep", "delimiter")


def check_card(text: str, file: str, name: str) -> list[str]:
    """Checks the patterns by which a card lists its files, and the options that it sets for the loader.

    Args:
        text: The text of README.md with its front matter, or of .huggingface.yaml.
        file: Which file in `CARD_FILES` the text comes from.
        name: The data set's name, for messages.

    Returns:
        The patterns. They can match only files of the data set.

    Raises:
        ZooError: A pattern leads outside the data set, an option is not allowed, or the card cannot be read.
    """
    remedy = "load another data set, or a copy whose card names only its own files"
    try:
        metadata = load_yaml(_front_matter(text) if file == README else text)
    except BadYAML as error:
        raise ZooError(
            f"The data set {name} was not loaded: its {file} is not plain YAML ({error}); {remedy}."
        ) from error
    patterns: list[str] = []
    for key, value in _values_to_check(metadata):
        if key in _PATTERN_KEYS:
            if not isinstance(value, str) or leads_out(value):
                raise ZooError(
                    f"The data set {name} was not loaded: {key} in its {file} is {value!r:.200}, which may lead "
                    f"outside the data set; {remedy}."
                )
            patterns.append(value)
        # Other keys of a configuration become arguments of a loader, which may open an address in its arguments.
        elif isinstance(value, str) and "://" in value:
            raise ZooError(
                f"The data set {name} was not loaded: {key} of a configuration in its {file} is the address "
                f"{value!r:.200}; {remedy}."
            )
    _check_options(metadata, file, name)
    return patterns


def _check_options(metadata: object, file: str, name: str) -> None:
    configurations = metadata.get("configs") if isinstance(metadata, Mapping) else None
    for configuration in configurations if isinstance(configurations, list) else []:
        for key, value in configuration.items() if isinstance(configuration, Mapping) else ():
            is_one_character = isinstance(value, str) and len(value) == 1
            if key not in _ALLOWED_KEYS or (key in _SEPARATOR_KEYS and not is_one_character):
                problem = "must be one character" if key in _SEPARATOR_KEYS else "is not an allowed option"
                raise ZooError(
                    f"The data set {name} was not loaded: {key!s:.100} of a configuration in its {file} is "
                    f"{value!r:.200}, but it {problem}: load a copy without it, such as one converted to JSON lines."
                )


def leads_out(pattern: str) -> bool:
    """Whether a pattern can match files outside the data set's folder.

    Args:
        pattern: A pattern of `datasets`.

    Returns:
        True for an address, a chain of addresses, an absolute path, a home folder, a drive, a path with `..`, and for
        a pattern that starts with a space or contains a control character.
    """
    return bool(
        "::" in pattern
        or "://" in pattern
        or pattern.startswith(("/", "\\", "~", " "))
        or _SCHEME.match(pattern)
        or _CONTROL_CHARACTER.search(pattern)
        or ".." in re.split(r"[/\\]", pattern)
    )


def _front_matter(text: str) -> str:
    """Returns the YAML in a README.md, as huggingface_hub finds it for `datasets`; "" if there is none."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    if match := REGEX_YAML_BLOCK.search(text):
        return str(match[2])
    # This version of `datasets` sees no front matter here, but another version might.
    if text.lstrip("\ufeff \t\r\n").startswith("---") and any(key in text for key in _PATTERN_KEYS):
        raise BadYAML("its front matter has no end")
    return ""


def _values_to_check(node: object, key: str = "", in_configuration: bool = False) -> Iterator[tuple[str, object]]:
    """Yields (key, value) of every pattern at any depth, and of other values below `configs` except descriptions."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            if key in _PATTERN_KEYS or not (in_configuration and name in _DESCRIPTIVE_KEYS):
                child_key = key if key in _PATTERN_KEYS else str(name)
                yield from _values_to_check(value, child_key, in_configuration or name == "configs")
    elif isinstance(node, list | tuple | set):
        for value in node:
            yield from _values_to_check(value, key, in_configuration)
    elif node is not None and (in_configuration or key in _PATTERN_KEYS):
        yield key, node
