"""The YAML front matter of a README: its values, what is wrong with them, and the tags that follow from them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import date
from functools import lru_cache
from typing import Any

from ..plain_yaml import BadYAML, load_yaml

__all__ = ["card_tags", "check_card", "read_card"]

_FRONT_MATTER = re.compile(r"\A\ufeff?\s*---[ \t]*\r?\n(.*?)(?:\r?\n)?^---[ \t]*$", re.DOTALL | re.MULTILINE)
# What JSON can hold in decimal digits on every reader, and more than any card needs.
_MAX_BITS = 1024
_CACHED_BYTES = 2**16
_COLORS = ("red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray")
_SDKS = ("gradio", "docker", "static", "streamlit")
_RELATIONS = ("finetune", "adapter", "merge", "quantized")
_STRINGS = [
    "pipeline_tag",
    "library_name",
    "license_name",
    "license_link",
    "pretty_name",
    "title",
    "emoji",
    "short_description",
    "app_file",
    "thumbnail",
]
_STRING_LISTS = [
    "tags",
    "language",
    "license",
    "datasets",
    "base_model",
    "metrics",
    "models",
    "task_categories",
    "task_ids",
    "size_categories",
    "multilinguality",
    "annotations_creators",
    "language_creators",
    "source_datasets",
]


def _parse(content: str) -> tuple[Any, str | None]:
    match = _FRONT_MATTER.match(content)
    if not match:
        return None, None
    try:
        data = load_yaml(match[1])
        _check_numbers(data)
        return data, None
    except BadYAML as error:
        before = content.count("\n", 0, match.start(1))
        where = f" (line {error.line + before}, column {error.column})" if error.line else ""
        return None, f"The YAML between the --- lines cannot be read{where}: {error.reason}"


def _check_numbers(value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _check_numbers(key)
            _check_numbers(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            _check_numbers(item)
    elif isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise BadYAML(f"a number has more than {_MAX_BITS} bits")


def check_card(content: str, kind: str) -> tuple[list[str], list[str]]:
    """Errors (the Hub would refuse the card) and warnings of a README; kind is model, dataset or space."""
    data, error = _parse(content)
    if error:
        return [error], []
    if data is None:
        return [], ["The card has no YAML metadata; put them between two lines of --- at its top."]
    if not isinstance(data, dict):
        return [f"The YAML metadata must be a mapping of keys to values, not a {type(data).__name__}."], []
    errors = []
    for key in data:
        if not isinstance(key, str):
            errors.append(f"The metadata key {key!r} must be a string; quote it.")
    for key in _STRINGS:
        _expect(errors, data, key, "a string", lambda value: isinstance(value, str))
    for key in _STRING_LISTS:
        _expect(errors, data, key, "a string or a list of strings (quote values such as no or 1.0)", _is_strings)
    _expect(errors, data, "model-index", "a list of models, each with name and results", _is_model_index)
    _expect(errors, data, "configs", "a list of mappings, each with config_name", _is_configs)
    _expect(errors, data, "widget", "a list", lambda value: isinstance(value, list))
    relation = f"one of {', '.join(_RELATIONS)}"
    _expect(errors, data, "base_model_relation", relation, lambda value: value in _RELATIONS)
    if kind == "space":
        _expect(errors, data, "sdk", f"one of {', '.join(_SDKS)}", lambda value: value in _SDKS)
        for key in ("colorFrom", "colorTo"):
            _expect(errors, data, key, f"one of {', '.join(_COLORS)}", lambda value: value in _COLORS)
    warnings = []
    if kind == "space" and not data.get("sdk"):
        warnings.append("A Space should name its sdk: gradio, docker or static.")
    return errors, warnings


def _expect(errors: list[str], data: dict[Any, Any], key: str, wanted: str, holds: Callable[[Any], bool]) -> None:
    value = data.get(key)
    if value is not None and not holds(value):
        errors.append(f'"{key}" must be {wanted}; it is {value!r:.80}.')


def _is_strings(value: Any) -> bool:
    # YAML 1.1 reads a bare `no` as False: Norwegian must be quoted, and the Hub says so too.
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(v, str) or v is None for v in value))


def _is_model_index(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(model, dict)
        and isinstance(model.get("name"), str)
        and isinstance(model.get("results"), list)
        and all(isinstance(r, dict) and isinstance(r.get("metrics", []), list) for r in model["results"])
        for model in value
    )


def _is_configs(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(c, dict) and isinstance(c.get("config_name"), str) for c in value)


def _values(content: bytes) -> Any:
    return _json_values(_parse(content.decode(errors="replace"))[0])


_cached_values = lru_cache(maxsize=512)(_values)


def _json_values(value: Any) -> Any:
    """YAML knows dates and keys that JSON does not."""
    if isinstance(value, dict):
        return {str(key): _json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_json_values(item) for item in value]
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, float) and not math.isfinite(value):  # JSON has neither NaN nor infinity
        return str(value)
    return value


def read_card(content: bytes) -> dict[str, Any] | None:
    """The metadata as JSON values; None where there are none, or where they cannot be read."""
    data = (_cached_values if len(content) <= _CACHED_BYTES else _values)(content)
    return data if isinstance(data, dict) else None


def _strings(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [str(item) for item in values if isinstance(item, str | int | float) and item != ""]


def card_tags(card: dict[str, Any] | None, kind: str) -> list[str]:
    """The tags that the Hub derives from a card, for filters: `tags`, `dataset:ID`, `base_model:ID`, `license:ID` …"""
    if not card:
        return []
    found = _strings(card.get("tags"))
    if kind == "model":
        found += _strings(card.get("library_name")) + _strings(card.get("pipeline_tag"))
        found += [f"dataset:{value}" for value in _strings(card.get("datasets"))]
        bases = _strings(card.get("base_model"))
        found += [f"base_model:{value}" for value in bases]
        relation = card.get("base_model_relation")
        found += [f"base_model:{relation}:{value}" for value in bases if relation in _RELATIONS]
        found += _strings(card.get("language"))
    if kind == "dataset":
        for key in [
            "task_categories",
            "task_ids",
            "language",
            "size_categories",
            "multilinguality",
            "language_creators",
            "annotations_creators",
            "source_datasets",
        ]:
            found += [f"{key}:{value}" for value in _strings(card.get(key))]
    if kind == "space":
        found += _strings(card.get("sdk"))
    found += [f"license:{value}" for value in _strings(card.get("license"))]
    return list(dict.fromkeys(found))
