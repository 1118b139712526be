"""Reads the YAML front matter of a README, and derives the Hub's tags from it."""

import math
import re
from collections.abc import Callable
from datetime import date
from typing import Any

from ...fileio import MAX_CHARACTERS, BadYAML, load_yaml
from .digest_cache import DigestCache

_OPENING = re.compile(r"\A\ufeff?\s*---[ \t]*\r?\n")
_CLOSING = re.compile(r"^---[ \t]*\r?$", re.MULTILINE)
# The metadata are at the top of a README. MAX_CHARACTERS limits the YAML, and a character has at most four bytes.
_HEAD_BYTES = 4 * MAX_CHARACTERS + 2**16
_CACHE = DigestCache(64 * 2**20)
_BASE_RELATIONS = ("finetune", "adapter", "merge", "quantized")
#: Keys of a data set's card whose values become tags `KEY:VALUE`.
_DATASET_TAG_KEYS = (
    "task_categories", "task_ids", "language", "size_categories", "multilinguality", "language_creators",
    "annotations_creators", "source_datasets",
)  # fmt: skip


def read_card(oid: str, load: Callable[[], bytes]) -> tuple[dict[str, Any] | None, str | None]:
    """Reads the metadata of a README as `parse_card` does, but caches them.

    Args:
        oid: The git blob id of the README, which is the key in the cache.
        load: Returns the README's content. Called only if the metadata are not cached.
    """
    card, error = _CACHE.get(oid, lambda: parse_card(load()))
    return card, error


def parse_card(content: bytes) -> tuple[dict[str, Any] | None, str | None]:
    """Reads the metadata of a README.

    Args:
        content: The README.

    Returns:
        (metadata, error): the metadata as JSON values, or None if there are none; and the reason if they cannot be
        read, else None.
    """
    # Truncation can split a character, but only far beyond the longest metadata that are accepted.
    text = content[:_HEAD_BYTES].decode(errors="replace")
    opening = _OPENING.match(text)
    closing = _CLOSING.search(text, opening.end()) if opening else None
    if opening is None or closing is None:
        return None, None
    start = opening.end()
    try:
        metadata = load_yaml(text[start : closing.start()])
    except BadYAML as error:
        # The parser counts from the opening ---. Users count from the top of the file.
        lines_before = text.count("\n", 0, start)
        position = f" (line {error.line + lines_before}, column {error.column})" if error.line else ""
        return None, f"The YAML between the --- lines cannot be read{position}: {error.reason}"
    if metadata is None:
        return None, None
    if not isinstance(metadata, dict):
        return None, f"The YAML metadata must be a mapping of keys to values, not a {type(metadata).__name__}."
    return _to_json_types(metadata), None


def _to_json_types(value: object) -> Any:
    """Converts a YAML value to JSON's types. YAML also has dates, sets, bytes, and keys that are not text."""
    if isinstance(value, dict):
        return {str(key): _to_json_types(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_to_json_types(item) for item in value]
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, float) and not math.isfinite(value):  # JSON has neither NaN nor infinity
        return str(value)
    return value


def _as_texts(value: object) -> list[str]:
    """Returns the texts and numbers in a list, or a single text or number, as a list of strings."""
    values = value if isinstance(value, list) else [value]
    return [str(item) for item in values if isinstance(item, str | int | float) and item != ""]


def card_tags(card: dict[str, object], kind: str) -> list[str]:
    """Derives the tags by which a repository can be filtered, as the Hub does.

    Args:
        card: The metadata of the repository's README.
        kind: model, dataset or space.

    Returns:
        The card's own tags, and tags derived from other keys, such as `dataset:ID`, `base_model:ID` and `license:ID`.
        There are no duplicates.
    """
    tags = _as_texts(card.get("tags"))
    if kind == "model":
        bases, relation = _as_texts(card.get("base_model")), card.get("base_model_relation")
        tags += _as_texts(card.get("library_name")) + _as_texts(card.get("pipeline_tag"))
        tags += [f"dataset:{value}" for value in _as_texts(card.get("datasets"))]
        tags += [f"base_model:{value}" for value in bases]
        tags += [f"base_model:{relation}:{value}" for value in bases if relation in _BASE_RELATIONS]
        tags += _as_texts(card.get("language"))
    elif kind == "dataset":
        tags += [f"{key}:{value}" for key in _DATASET_TAG_KEYS for value in _as_texts(card.get(key))]
    else:
        tags += _as_texts(card.get("sdk"))
    tags += [f"license:{value}" for value in _as_texts(card.get("license"))]
    return list(dict.fromkeys(tags))
