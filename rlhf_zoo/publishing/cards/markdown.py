"""Formats values as Markdown. Anything that is not `Raw` is escaped, so that it renders as plain text."""

import re
from collections.abc import Mapping
from typing import Any

from ...fileio import is_finite

#: The address of the repository that has the README and docs/, for links.
SOURCE = "https://github.com/rlhf-zoo/rlhf-zoo/blob/main"
NOT_MEASURED = "not measured"
NOT_EVALUATED = "not evaluated"
TINY = 5e-6  # rounding can make a sum of float32 log-probabilities that should be 0 this large
# "://" and "www." are included, because GitHub's dialect turns them into links.
_STRUCTURE = re.compile(r"[&<>`*_{}\[\]#|~$\\]|:(?=//)|(?<=www)\.", re.IGNORECASE)
_TOKEN = re.compile(r"hf_\w{8,}")


class Raw(str):
    """Markdown that this package wrote, as opposed to text of a model or a user. It is not escaped."""

    __slots__ = ()


def escape(value: Any) -> str:
    """Escapes a text so that it renders as itself on one line, even in a table cell.

    Characters that Markdown or HTML could read as structure become numeric references, which work in every dialect,
    whereas a backslash does not protect < and & everywhere. Line breaks are shown as ↵, and characters that cannot be
    printed as �.

    Args:
        value: The value. `Raw` is returned unchanged.
    """
    if isinstance(value, Raw):
        return value
    text = re.sub(r"\r\n|[\r\n\u2028\u2029]", "↵", str(value)).replace("\t", " ")
    text = "".join(character if character.isprintable() else "�" for character in text)
    return _STRUCTURE.sub(lambda match: f"&#{ord(match[0])};", text)


def code(value: object) -> Raw:
    """Formats a value as a code span on one line, even in a table cell.

    Args:
        value: The value. It may hold backticks and pipes.
    """
    text = " ".join(str(value).split()).replace("|", "\\|")
    ticks = "`" * (_longest_run(text) + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return Raw(f"{ticks}{space}{text}{space}{ticks}")


def fence(text: str, language: str = "") -> Raw:
    """Formats a text as a code block, with a fence that the text does not contain. Access tokens are masked.

    Args:
        text: The text.
        language: The language to highlight, such as "sh"; "" for none.
    """
    ticks = "`" * max(3, _longest_run(text) + 1)
    return Raw(f"{ticks}{language}\n{_TOKEN.sub('hf_***', text).rstrip()}\n{ticks}")


def number(value: object) -> Raw:
    """Formats a finite number to about three significant digits; one closer to 0 than `TINY` is 0.000.

    Args:
        value: The number.

    Returns:
        The number, or "not measured".
    """
    if not is_finite(value):
        return Raw(NOT_MEASURED)
    if isinstance(value, int):
        return Raw(value)
    size = abs(value)
    if size < TINY:
        return Raw("0.000")
    if size >= 1000 or size < 0.001:
        return Raw(f"{value:.3g}")
    digits = 3 if size < 10 else 2 if size < 100 else 1
    return Raw(f"{value:.{digits}f}")


def estimate(figure: Mapping[str, Any] | None) -> Raw:
    """Formats an estimate as "0.95 [0.93, 0.96]".

    Args:
        figure: {value, ci95}; None if it was not measured.

    Returns:
        The estimate; without an interval, "0.95 (interval not measured)"; without a value, "not measured".
    """
    if not figure or number(figure.get("value")) == NOT_MEASURED:
        return Raw(NOT_MEASURED)
    interval = figure.get("ci95")
    if not interval:
        return Raw(f"{number(figure['value'])} (interval {NOT_MEASURED})")
    low, high = interval
    return Raw(f"{number(figure['value'])} [{number(low)}, {number(high)}]")


def round_significant(value: float) -> float:
    """Rounds a number to three significant digits; one closer to 0 than `TINY` is 0.

    Args:
        value: A finite number.
    """
    return float(f"{value:.3g}") if abs(value) >= TINY else 0.0


def short(value: object) -> Raw:
    """Formats a finite number to two or three significant digits, for the part of a card that is not folded.

    Args:
        value: The number.

    Returns:
        The number, or "not measured".
    """
    if not is_finite(value):
        return Raw(NOT_MEASURED)
    if isinstance(value, int):
        return Raw(f"{value:,}")
    size = abs(value)
    if size < TINY:
        return Raw("0")
    if size < 0.1:
        text = f"{value:.2g}"
    elif size < 1000:
        text = f"{value:.{2 if size < 10 else 1 if size < 100 else 0}f}"
    else:
        text = f"{float(f'{value:.3g}'):,.0f}"
    return Raw(text.replace("-", "−", 1) if value < 0 else text)


def with_interval(figure: Mapping[str, Any] | None) -> Raw:
    """Formats an estimate as "0.95 (0.93–0.96)", with `short` numbers.

    Args:
        figure: {value, ci95}; None if it was not measured.

    Returns:
        The estimate; the value alone if it has no interval; "not measured" without a value.
    """
    value, interval = short((figure or {}).get("value")), (figure or {}).get("ci95")
    if value == NOT_MEASURED or not interval:
        return value
    low, high = interval
    return Raw(f"{value} ({short(low)}{' to ' if low < 0 else '–'}{short(high)})")


def judge_title(name: str) -> str:
    """Returns a judge's name in words, without arguments: grammar for rule:grammar(), x y for rule:f(name='x_y').

    Args:
        name: The name in evaluation.json.
    """
    argument = re.search(r"\bname=['\"]([^'\"]+)['\"]", name) or re.match(r"rule:(\w+)\(.*\)$", name)
    return argument[1].replace("_", " ") if argument else name


def shorten(text: str, limit: int) -> str:
    """Strips a text, and cuts it between words if it is longer than the limit.

    Args:
        text: The text.
        limit: The largest number of characters before "…".
    """
    text = text.strip()
    if len(text) <= limit:
        return text
    return text[:limit].rpartition(" ")[0].rstrip() + " …" if " " in text[:limit] else text[:limit] + "…"


def _longest_run(text: str) -> int:
    """Returns the length of the longest run of backticks."""
    return max((len(run) for run in re.findall("`+", text)), default=0)
