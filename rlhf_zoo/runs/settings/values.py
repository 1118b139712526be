"""Converts values from recipes and flags to the types of their keys, and refuses values that JSON cannot hold."""

import dataclasses
import enum
import functools
import json
import math
import re
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

from ...errors import ZooError
from ...fields import check_limits
from ...fileio import BadYAML, load_yaml
from ...modeling.remote_code import TRUST_CODE_FLAG
from ...plugins import did_you_mean
from .declared import REFUSAL_TEXTS, RUN_KEYS

_MAX_DEPTH = 64
_MAX_REPR_LENGTH = 200
_PLAIN_TYPES = "text, numbers, true and false, lists and mappings"


class BadLiteral(ValueError):
    """A text that begins like a list or mapping is neither JSON nor YAML, or holds values that JSON cannot hold."""


def coerce(value: Any, hint: Any) -> Any:
    """Converts a value to a key's type. A text is parsed as a number, boolean, list or mapping if that is the type.

    Args:
        value: A value from YAML, or the text of a flag.
        hint: The key's type, as in an annotation.

    Raises:
        ValueError: The value does not fit the type. The message describes a value that does, such as "a whole number".
    """
    if hint is Any:
        return value
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        members = typing.get_args(hint)
        if type(None) in members and (value is None or value in ("null", "none", "None")):
            return None
        if str in members and isinstance(value, str) and "," not in value and not value.startswith("["):
            members = tuple(member for member in members if typing.get_origin(member) is not list)
        expectations = []
        # Text comes last, so that a flag's "3" for `int | str` becomes a number.
        for member in sorted((kind for kind in members if kind is not type(None)), key=lambda kind: kind is str):
            try:
                return coerce(value, member)
            except BadLiteral:
                raise
            except ValueError as error:
                expectations.append(str(error))
        raise ValueError(" or ".join(dict.fromkeys(expectations)))
    if origin is typing.Literal:
        choices = typing.get_args(hint)
        if value in choices:
            return value
        raise ValueError("one of " + ", ".join(map(str, choices)))
    if hint is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise ValueError("true or false")
    if hint in (int, float):
        return _to_number(value, hint)
    if hint is str:
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            return str(value)
        raise ValueError("text")
    if hint in (list, tuple) or origin in (list, tuple):
        items = _parse_literal(value, "[") if isinstance(value, str) else value
        if isinstance(items, str):
            items = _split(items)
        if not isinstance(items, (list, tuple)):
            raise ValueError("a list")
        item_hint = (typing.get_args(hint) or (Any,))[0]
        return [coerce(item, item_hint) for item in items]
    if hint is dict or origin is dict:
        value = _parse_literal(value, "{") if isinstance(value, str) else value
        if not isinstance(value, dict):
            raise ValueError("a mapping")
        return value
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        if value in [member.value for member in hint]:
            return value
        if value is False and "no" in [member.value for member in hint]:
            return "no"  # YAML 1.1 reads a bare `no` as false
        raise ValueError("one of " + ", ".join(str(member.value) for member in hint))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if isinstance(value, hint):
            return value
        raise ValueError("a mapping")
    return value


def _to_number(value: Any, kind: type) -> Any:
    expectation = "a whole number" if kind is int else "a number"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(expectation)
    if isinstance(value, str):
        for parse in (int, float):
            try:
                value = parse(value)
                break
            except ValueError:
                continue
    if isinstance(value, int):
        return value
    if isinstance(value, str) or math.isnan(value):
        raise ValueError(expectation)
    if kind is float:
        return value
    if not value.is_integer():
        raise ValueError(expectation)
    return int(value)


def _split(text: str) -> list[str]:
    """Splits a text at commas, except inside parentheses, brackets, braces or quotes: NAME(key=value, ...) is one item.

    A quote after a letter or digit, or without a closing quote, counts as an apostrophe.
    """
    items, start, depth, position = [], 0, 0, 0
    while position < len(text):
        character = text[position]
        if character in "\"'" and not text[position - 1 : position].isalnum():
            quotation = re.compile(rf"{character}(\\.|[^\\{character}])*{character}").match(text, position)
            position = quotation.end() - 1 if quotation else position
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth = max(depth - 1, 0)
        elif character == "," and not depth:
            items.append(text[start:position])
            start = position + 1
        position += 1
    return [*items, text[start:]]


def _parse_literal(text: str, opening: str) -> Any:
    """Parses a text that starts with `opening` as JSON or YAML, or raises BadLiteral. Returns any other text as is."""
    if not text.startswith(opening):
        return text
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        try:
            content = load_yaml(text)
        except BadYAML as error:
            raise BadLiteral(f"YAML or JSON ({error.reason})") from None
    try:
        _check_plain(content)
    except ValueError as error:
        raise BadLiteral(str(error)) from None
    return content


def json_object(text: str, *, option: str, example: str) -> dict[str, Any]:
    """Parses the value of a command's option as a JSON object.

    Args:
        text: The option's text.
        option: Name of the option, for the message.
        example: A valid value, for the message.

    Raises:
        ZooError: The text is not a JSON object, or the object holds values that run.json may not hold.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ZooError(f"{option} is {short_repr(text)}, which is not JSON ({problem}): write {example}.") from error
    try:
        _check_plain(content)
    except ValueError as error:
        raise ZooError(f"{option} is {short_repr(text)}, but it takes {error}: write {example}.") from error
    if not isinstance(content, dict):
        raise ZooError(f"{option} is {short_repr(text)}, which is not a JSON object: write {example}.")
    return content


def parse_numbers(flag: str, text: str, *, example: str) -> list[float]:
    """Parses a list of numbers such as "0,0.02,0.1". Repeated numbers are dropped.

    Args:
        flag: Name of the flag, for the message.
        text: The flag's value.
        example: A valid value, for the message.

    Returns:
        The numbers, in the order of the text.

    Raises:
        ZooError: An item is negative, or is not a finite number.
    """
    numbers: list[float] = []
    for item in text.split(","):
        try:
            value = float(item)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0:
            raise ZooError(f"{flag} lists {item.strip()!r}: use numbers that are not negative, such as {example}.")
        numbers.append(value)
    return list(dict.fromkeys(numbers))


def _check_plain(value: Any, depth: int = 0) -> None:
    """Raises ValueError unless a value has only types and sizes that run.json may hold."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"at most {_MAX_DEPTH} levels of nesting")
    if isinstance(value, str):
        if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError("text without NUL characters or lone surrogates")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError("mappings whose keys are text")
            _check_plain(key)
            _check_plain(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_plain(item, depth + 1)
    elif isinstance(value, int):
        if value.bit_length() > 63:
            raise ValueError("whole numbers of at most 63 bits")
    elif value is not None and not isinstance(value, float):
        raise ValueError(_PLAIN_TYPES)


def short_repr(value: Any) -> str:
    """Returns repr(value) for a message, cut to `_MAX_REPR_LENGTH` characters.

    Args:
        value: Any value, even if its repr raises an error.
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python does not print integers of more than 4,300 digits
        return "too large to show"
    return text if len(text) <= _MAX_REPR_LENGTH else f"{text[:_MAX_REPR_LENGTH]}…"


@functools.cache
def type_hints(kind: type) -> Mapping[str, Any]:
    """Returns name -> type of each field that a dataclass's constructor takes.

    Args:
        kind: The dataclass.
    """
    hints = typing.get_type_hints(kind)
    return {entry.name: hints[entry.name] for entry in dataclasses.fields(kind) if entry.init}


def convert_keys(
    values: Mapping[str, Any],
    hints: Mapping[str, Any],
    where: str,
    *,
    subject: str = "recipe.yaml",
    refused_names: Collection[str] = (),
    flag: str | None = None,
) -> dict[str, Any]:
    """Checks keys and converts their values.

    Args:
        values: Key -> value.
        hints: Known key -> type. A key whose type is unknown (None) is left out of the result unchecked.
        where: The source of the keys, such as the path of their file, for messages.
        subject: What the keys belong to, such as "the stage ppo", for messages.
        refused_names: Keys that exist but may not be set.
        flag: The prefix of the keys as flags, such as "--ppo."; None for keys of a file.

    Returns:
        Key -> converted value.

    Raises:
        ZooError: A key is unknown or refused, or a value does not fit its type or is out of bounds.
    """
    typed_values = {}
    for key, value in values.items():
        name = key if isinstance(key, str) else short_repr(key)
        problem = f"{flag}{name} is" if flag else f"{where} has {name}, which is"
        if name == "env":
            raise ZooError(
                f"{problem} refused, because it could redirect the Hub: set environment variables in the shell."
            )
        if name in RUN_KEYS:
            raise ZooError(
                f"{problem} set by the run: remove it; `rlhf-zoo run` takes --output_dir, --push_to_hub, --namespace "
                "and --hub."
            )
        if name == "trust_remote_code":
            if flag:
                raise ZooError(f"{problem} not allowed as a key of a stage: write {TRUST_CODE_FLAG} without a stage.")
            raise ZooError(
                f"{problem} not allowed in a recipe, which may be downloaded: remove it, and pass {TRUST_CODE_FLAG} to "
                "the commands that load the model."
            )
        if name in refused_names and name in REFUSAL_TEXTS:
            raise ZooError(f"{problem} {REFUSAL_TEXTS[name]}.")
        if name in refused_names:
            raise ZooError(f"{problem} not supported by {subject}: remove it.")
        if name not in hints:
            stage = "recipe" if subject == "recipe.yaml" else subject.partition("the stage ")[2]
            listing = f"`rlhf-zoo recipes keys {stage}` lists them" if stage else f"the keys are {', '.join(hints)}"
            raise ZooError(f"{problem} not a key of {subject}{did_you_mean(name, hints) or f': {listing}.'}")
        label = f"{flag}{name}" if flag else f"{name} in {where}"
        if hints[name] is None:
            continue
        try:
            _check_plain(value)
            typed_values[name] = coerce(value, hints[name])
        except ValueError as error:
            raise ZooError(f"{label} is {short_repr(value)}, but it takes {error}.") from error
        check_limits(name.rpartition(".")[2], typed_values[name], label=label)
    return typed_values
