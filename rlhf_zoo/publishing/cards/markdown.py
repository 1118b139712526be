"""Values as Markdown: anything that is not marked `Raw` is shown as the text that it is."""

import re
from collections.abc import Mapping
from typing import Any

from ...fileio import finite

NOT_MEASURED = "not measured"
TINY = 5e-6  # sums of float32 log-probabilities differ by so much between two orders of summation
# Also "://" and "www.", of which GitHub's dialect makes links.
_STRUCTURE = re.compile(r"[&<>`*_{}\[\]#|~$\\]|:(?=//)|(?<=www)\.", re.IGNORECASE)
_TOKEN = re.compile(r"hf_\w{8,}")


class Raw(str):
    """Markdown that was made here, not by a model or a user."""

    __slots__ = ()


def escape(value: Any) -> str:
    """Text that renders as itself, on one line, also in a table cell.

    Characters that Markdown or HTML could read as structure become numeric references: they mean the character itself
    in every dialect, whereas a backslash does not protect < and & everywhere. Line breaks are shown as ↵, characters
    that cannot be printed as �.
    """
    if isinstance(value, Raw):
        return value
    text = re.sub(r"\r\n|[\r\n\u2028\u2029]", "↵", str(value)).replace("\t", " ")
    text = "".join(character if character.isprintable() else "�" for character in text)
    return _STRUCTURE.sub(lambda match: f"&#{ord(match[0])};", text)


def code(value: Any) -> Raw:
    """One line of code in a span; backticks in it are kept by a longer delimiter, a pipe by an escape for tables."""
    text = " ".join(str(value).split()).replace("|", "\\|")
    ticks = "`" * (_longest_run(text) + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return Raw(f"{ticks}{space}{text}{space}{ticks}")


def fence(text: str, language: str = "") -> Raw:
    """A block of code that nothing in `text` can end; access tokens in it are blotted out."""
    ticks = "`" * max(3, _longest_run(text) + 1)
    return Raw(f"{ticks}{language}\n{_TOKEN.sub('hf_***', text).rstrip()}\n{ticks}")


def number(value: Any) -> Raw:
    """A finite number to about three digits, or "not measured"; what rounding leaves of a zero is 0.000."""
    if not finite(value):
        return Raw(NOT_MEASURED)
    if isinstance(value, int):
        return Raw(value)
    size = abs(value)
    if size < TINY:
        return Raw("0.000")
    if size >= 1000 or (size < 0.001 and value):
        return Raw(f"{value:.3g}")
    digits = 3 if size < 10 else 2 if size < 100 else 1
    return Raw(f"{value:.{digits}f}")


def estimate(figure: Mapping[str, Any] | None) -> Raw:
    """`{value, ci95}` as "0.95 [0.93, 0.96]"; the value alone where it has no interval."""
    if not figure or number(figure.get("value")) == NOT_MEASURED:
        return Raw(NOT_MEASURED)
    interval = figure.get("ci95")
    if not interval:
        return Raw(f"{number(figure['value'])} (interval {NOT_MEASURED})")
    low, high = interval
    return Raw(f"{number(figure['value'])} [{number(low)}, {number(high)}]")


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
