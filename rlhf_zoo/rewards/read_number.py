r"""The number that a text answers with: behind a marker, in a \boxed{…}, or the last one that it holds."""

from __future__ import annotations

import math
import re
from typing import Literal


def after_marker(text: str, marker: str | None) -> str | None:
    """What follows the last `marker`, None where there is none; the whole text when no marker is asked for."""
    if marker is None:
        return text
    _, found, rest = text.rpartition(marker)
    return rest if found else None


_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
# A digit inside a name begins no number, and a minus behind a letter or digit is a hyphen or a difference.
_NUMBER = re.compile(
    rf"(?<![^\W_])(?<!\.)(?P<sign>[-+−]?)[$€£]?(?P<over>{_UNSIGNED})(?:\s?/\s?(?P<under>{_UNSIGNED}))?(?P<percent>\s?%)?"
)
_LATEX = (
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
    r"""The number that a text answers with, None where there is none.

    With `marker` it is the first number after the marker's last occurrence ("#### 42", as in GSM8K, arXiv:2110.14168).
    Without, it is the last number within the last \boxed{…}, or the last of the text where nothing is boxed.

    Reads "1,234.50" (a comma parts thousands), "-3" (and the sign −), "1/2", "\frac{1}{2}", "6e-3", "$5". percent:
    "unit" drops a % as a unit, "hundredth" makes 0.42 of "42%". Expressions are not evaluated: of "3 · 10^4" it reads
    the 10, and of "1 1/2" the 1/2. What is beyond float64, or over zero, is no number.
    """
    scope = after_marker(text, marker)
    if scope is None:
        return None
    if marker is None:
        scope = _boxed(scope)
    for pattern, plain in _LATEX:
        scope = pattern.sub(plain, scope)
    values = [value for match in _NUMBER.finditer(scope) if (value := _value(match, percent)) is not None]
    if not values:
        return None
    return values[-1] if marker is None else values[0]


def _boxed(text: str) -> str:
    r"""What stands in the braces of the last \boxed{…}; the whole text where there is none."""
    _, found, rest = text.rpartition("\\boxed")
    if not found:
        return text
    rest = rest.lstrip()
    if not rest.startswith("{"):
        return rest.partition(" ")[0]
    depth = 0
    for place, letter in enumerate(rest):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[1:place]
    return rest[1:]


def _value(match: re.Match[str], percent: str) -> float | None:
    over, under = (float(part.replace(",", "")) if part else 1.0 for part in match.group("over", "under"))
    if under == 0:
        return None
    value = over / under * (-1 if match["sign"] in ("-", "−") else 1)
    if match["percent"] and percent == "hundredth":
        value /= 100
    return value if math.isfinite(value) else None
