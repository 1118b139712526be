"""What one request may ask for. Every refusal is a sentence, and comes before anything is tokenised."""

import reprlib
import unicodedata
from dataclasses import dataclass
from typing import Any

from ...errors import ZooError
from ...fileio import finite, whole

TEMPERATURES = (0.01, 100.0)  # below, logits/T lose what float32 holds of them; above, every token is as likely
LARGEST_SEED = 2**53 - 1  # what a browser's numbers hold exactly
LAYOUT = "\n\r\t"


@dataclass(frozen=True)
class Limits:
    """Bounds of one request.

    Attributes:
        n: Completions of each policy.
        max_new_tokens: Tokens of a completion.
        prompt_characters: Characters of the prompt.
        steps: Checkpoints at a time.
    """

    n: int = 8
    max_new_tokens: int = 512
    prompt_characters: int = 10_000
    steps: int = 16


def check_prompt(prompt: Any, limits: Limits) -> None:
    """Checks a prompt's characters.

    Control characters (Cc) but tab and line ends are refused, and lone surrogates. Other characters pass, whatever the
    script; `visible_text` shows those that would hide or turn around what stands beside them.

    Args:
        prompt: What a visitor wrote.
        limits: Bounds of the request.

    Raises:
        ZooError: It is no text, shows nothing, is too long, or holds a refused character.
    """
    if not isinstance(prompt, str):
        raise ZooError(f"The prompt is {reprlib.repr(prompt)}: give a text.")
    if len(prompt) > limits.prompt_characters:
        raise ZooError(
            f"The prompt has {len(prompt)} characters, and one request may have {limits.prompt_characters}: shorten it."
        )
    categories = {character: unicodedata.category(character) for character in set(prompt)}
    if all(character.isspace() or categories[character] == "Cf" for character in categories):
        raise ZooError("The prompt is empty: write the beginning of a text.")
    if "Cs" in categories.values():
        raise ZooError("The prompt holds half of a character (a lone surrogate): remove it.")
    if control := next((c for c in prompt if categories[c] == "Cc" and c not in LAYOUT), None):
        raise ZooError(f"The prompt holds the control character U+{ord(control):04X}: remove it.")


def check_sampling(seed: Any, temperature: Any, top_p: Any, max_new_tokens: Any, n: Any, limits: Limits) -> None:
    """Checks the numbers of a request.

    Args:
        seed: A whole number that is not negative.
        temperature: Above 0.
        top_p: Above 0, at most 1.
        max_new_tokens: At least 1.
        n: Completions of each policy, at least 1.
        limits: Bounds of the request.

    Raises:
        ZooError: A value is no number, or out of range.
    """
    if whole(seed) is None or not 0 <= seed <= LARGEST_SEED:
        raise ZooError(
            f"The seed is {reprlib.repr(seed)}: give a whole number that is not negative, up to {LARGEST_SEED}."
        )
    low, high = TEMPERATURES
    if not finite(temperature) or not low <= temperature <= high:
        raise ZooError(
            f"The temperature is {reprlib.repr(temperature)}: give a number above 0, from {low:g} to {high:g}."
        )
    if not finite(top_p) or not 0 < top_p <= 1:
        raise ZooError(f"Top-p is {reprlib.repr(top_p)}: give a number above 0 and up to 1, which cuts nothing off.")
    for what, value, most in (
        ("number of new tokens", max_new_tokens, limits.max_new_tokens),
        ("number of completions", n, limits.n),
    ):
        if whole(value) is None or value < 1:
            raise ZooError(f"The {what} is {reprlib.repr(value)}: give a whole number, at least 1.")
        if value > most:
            raise ZooError(f"The {what} is {reprlib.repr(value)}: one request may ask for {most}.")


def check_steps(count: int, limits: Limits) -> None:
    """Checks how many checkpoints a request asks for.

    Args:
        count: How many.
        limits: Bounds of the request.

    Raises:
        ZooError: There are none, or too many.
    """
    if not 1 <= count <= limits.steps:
        raise ZooError(
            f"{count} checkpoints are asked for, and one request may have 1 to {limits.steps}: choose fewer."
            if count
            else "No checkpoint is asked for: choose one."
        )
