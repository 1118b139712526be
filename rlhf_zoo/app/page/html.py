"""Text, numbers and messages as HTML. Whatever a visitor, a model or a card wrote is text here, never markup."""

import math
import re
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from ..engine import visible_text

MINUS = "\u2212"
NOTHING = "\u2013"
_COMMIT = re.compile(r"[0-9a-f]{40}")
#: What a stop reason is called on the page.
STOPS = {"eos": "by itself", "length": "cut off", None: "writing"}


def text(written: Any) -> str:
    """Escapes a text, with a sign for each character that would hide or turn around what stands beside it.

    Args:
        written: What a visitor, a model or a card wrote.
    """
    return escape(visible_text(str(written)))


def signed(value: float | None, digits: int = 2) -> str:
    """Writes +1.20 or −0.31; a dash for None and for what is not finite.

    Args:
        value: Any number.
        digits: After the point.
    """
    return number(value, digits, sign="+")


def number(value: float | None, digits: int = 2, *, sign: str = "-") -> str:
    """Writes 1.20 or −0.31; a dash for None and for what is not finite.

    Args:
        value: Any number.
        digits: After the point.
        sign: "+" also writes the sign of positive numbers.
    """
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value:{sign}.{digits}f}".replace("-", MINUS)


def figure_list(rows: Iterable[tuple[str, str, Any]]) -> str:
    """Writes figures as a list of definitions.

    Args:
        rows: (key, label, figure) each; a figure is found by its `data-figure`, the key.
    """
    inside = (f'<div><dt>{label}</dt><dd data-figure="{key}">{figure}</dd></div>' for key, label, figure in rows)
    return f"<dl>{''.join(inside)}</dl>"


def short_name(name: str) -> str:
    """Cuts the commit of NAMESPACE/NAME@REVISION to what tells it apart; not escaped.

    Args:
        name: With a revision or without.
    """
    repo, at, revision = name.partition("@")
    return f"{repo}{at}{revision[:8] if _COMMIT.fullmatch(revision) else revision}"


def notice(message: Any, *, kind: str = "alert") -> str:
    """Writes a message of the page.

    Args:
        message: Any text or error.
        kind: alert for what went wrong, status for what is worth knowing.
    """
    return f'<div class="zoo-said zoo-{kind}" role="{kind}">{text(message)}</div>'


def attributes(values: Mapping[str, Any]) -> str:
    """Writes ` name="value"` of each value that is not None.

    Args:
        values: By name.
    """
    return "".join(f' {name}="{escape(str(value))}"' for name, value in values.items() if value is not None)
