"""Bounds of one request, checked before anything is tokenized."""

import reprlib
import unicodedata
from dataclasses import dataclass
from typing import Any

from ...errors import ZooError
from ...fileio import int_or_none, is_finite

TEMPERATURE_RANGE = (0.01, 100.0)  # below it, logits/T exceed float32's precision; above it, sampling is near uniform
MAX_SEED = 2**53 - 1  # the largest integer that JavaScript represents exactly
ALLOWED_CONTROLS = "\n\r\t"


@dataclass(frozen=True)
class Limits:
    """Bounds of one request.

    Attributes:
        n: Largest number of completions of each policy.
        max_new_tokens: Largest number of tokens in a completion.
        prompt_characters: Largest number of characters in the prompt.
        checkpoints: Largest number of checkpoints.
    """

    n: int = 8
    max_new_tokens: int = 512
    prompt_characters: int = 10_000
    checkpoints: int = 16


def check_prompt(prompt: object, limits: Limits) -> None:
    """Checks a prompt's characters.

    It refuses lone surrogates and all control characters (Cc) except tabs and line ends. Other characters that hide or
    reorder text are allowed, because the page shows them with `visible_text`.

    Args:
        prompt: A visitor's prompt.
        limits: Bounds of the request.

    Raises:
        ZooError: The prompt is not text, is blank or too long, or contains a refused character.
    """
    if not isinstance(prompt, str):
        raise ZooError(f"The prompt is {reprlib.repr(prompt)}; it must be text.")
    if len(prompt) > limits.prompt_characters:
        raise ZooError(f"The prompt has {len(prompt)} characters; the limit is {limits.prompt_characters}. Shorten it.")
    categories = {character: unicodedata.category(character) for character in set(prompt)}
    if all(character.isspace() or categories[character] == "Cf" for character in categories):
        raise ZooError("The prompt is empty: write a prompt.")
    if "Cs" in categories.values():
        raise ZooError("The prompt contains half of a character (a lone surrogate): remove it.")
    if control := next((c for c in prompt if categories[c] == "Cc" and c not in ALLOWED_CONTROLS), None):
        raise ZooError(f"The prompt contains the control character U+{ord(control):04X}: remove it.")


def check_sampling(seed: Any, temperature: Any, top_p: Any, max_new_tokens: Any, n: Any, limits: Limits) -> None:
    """Checks the numbers of a request.

    Args:
        seed: An integer from 0 to `MAX_SEED`.
        temperature: A number in `TEMPERATURE_RANGE`.
        top_p: Above 0, at most 1.
        max_new_tokens: At least 1.
        n: Number of completions of each policy, at least 1.
        limits: Bounds of the request.

    Raises:
        ZooError: A value is not a number or is out of range.
    """
    if int_or_none(seed) is None or not 0 <= seed <= MAX_SEED:
        raise ZooError(f"The seed is {reprlib.repr(seed)}; it must be an integer from 0 to {MAX_SEED}.")
    low, high = TEMPERATURE_RANGE
    if not is_finite(temperature) or not low <= temperature <= high:
        raise ZooError(f"The temperature is {reprlib.repr(temperature)}; it must be a number from {low:g} to {high:g}.")
    if not is_finite(top_p) or not 0 < top_p <= 1:
        raise ZooError(f"Top-p is {reprlib.repr(top_p)}; it must be above 0 and at most 1.")
    for name, value, largest in (
        ("number of new tokens", max_new_tokens, limits.max_new_tokens),
        ("number of completions", n, limits.n),
    ):
        if int_or_none(value) is None or value < 1:
            raise ZooError(f"The {name} is {reprlib.repr(value)}; it must be an integer of at least 1.")
        if value > largest:
            raise ZooError(f"The {name} is {reprlib.repr(value)}; the limit is {largest}.")


def check_checkpoint_count(count: int, limits: Limits) -> None:
    """Checks the number of checkpoints in a request.

    Args:
        count: Number of checkpoints.
        limits: Bounds of the request.

    Raises:
        ZooError: The number is 0 or above the limit.
    """
    if count < 1:
        raise ZooError("The request has no checkpoint: choose one.")
    if count > limits.checkpoints:
        raise ZooError(f"The request has {count} checkpoints; the limit is {limits.checkpoints}. Choose fewer.")
