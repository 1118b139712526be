r"""Reads the number that a text gives as its answer: after a marker, in a \boxed{…}, or the last number."""

from __future__ import annotations

import math
import re
from typing import Literal


def text_after_marker(text: str, marker: str | None) -> str | None:
    """Returns the text after the last marker; None if the text does not contain the marker.

    Args:
        text: The text.
        marker: The marker; None to return the complete text.
    """
    if marker is None:
        return text
    _, separator, after = text.rpartition(marker)
    return after if separator else None


_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
# A digit within a word does not start a number, and a minus after a letter or digit is a hyphen or a subtraction.
_NUMBER = re.compile(
    rf"(?<![^\W_])(?<!\.)(?P<sign>[-+−]?)[$€£]?(?P<numerator>{_UNSIGNED})(?:\s?/\s?(?P<denominator>{_UNSIGNED}))?(?P<percent>\s?%)?"
)
_LATEX = (  # (pattern, replacement), applied in this order to turn LaTeX into plain text
    (re.compile(r"(?<=\d)(?=\\[dt]?frac)"), " "),
    (re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r"\1/\2"),
    (re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)"), r"\1/\2"),
    (re.compile(r"(?:\^|(?<=[^\W_])_)(?:\{[^{}]*\}|[-+−]?\w+)"), ""),  # exponents and indices: cm^2, x_{10}
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\[,;:! ]"), ""),
    (re.compile(r"\\([$%])"), r"\1"),
)


def read_number(
    text: str, *, marker: str | None = None, percent: Literal["unit", "hundredth"] = "unit"
) -> float | None:
    r"""Reads the number that a text gives as its answer.

    Reads "1,234.50" (a comma separates thousands), "-3" (also with the sign −), "1/2", "\frac{1}{2}", "6e-3" and "$5".
    Does not evaluate expressions: without a marker, "3 · 10^4" is read as 10, and "1 1/2" as 1/2. Skips numbers that
    are too large for float64, and fractions with the denominator 0.

    Args:
        text: The text.
        marker: The answer is the first number after the last marker ("#### 42", as in GSM8K, arXiv:2110.14168). If
            None, the answer is the last number in the last \boxed{…}, or in the text if nothing is boxed.
        percent: "unit" ignores a % sign; "hundredth" reads "42%" as 0.42.

    Returns:
        The number; None if the text has no number.
    """
    answer_text = text_after_marker(text, marker)
    if answer_text is None:
        return None
    if marker is None:
        answer_text = _boxed_text(answer_text)
    for pattern, replacement in _LATEX:
        answer_text = pattern.sub(replacement, answer_text)
    values = [value for match in _NUMBER.finditer(answer_text) if (value := _match_value(match, percent)) is not None]
    if not values:
        return None
    return values[-1] if marker is None else values[0]


def _boxed_text(text: str) -> str:
    r"""Returns the content of the last \boxed{…}; the complete text if there is none."""
    _, command, after = text.rpartition("\\boxed")
    if not command:
        return text
    after = after.lstrip()
    if not after.startswith("{"):
        return after.partition(" ")[0]
    depth = 0
    for index, character in enumerate(after):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return after[1:index]
    return after[1:]


def _match_value(match: re.Match[str], percent: str) -> float | None:
    digits = match.group("numerator", "denominator")
    numerator, denominator = (float(text.replace(",", "")) if text else 1.0 for text in digits)
    if denominator == 0:
        return None
    value = numerator / denominator * (-1 if match["sign"] in ("-", "−") else 1)
    if match["percent"] and percent == "hundredth":
        value /= 100
    return value if math.isfinite(value) else None
