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
    """Escaped, and with a sign for each character that would hide or turn around what stands beside it."""
    return escape(visible_text(str(written)))


def signed(value: float | None, digits: int = 2) -> str:
    """+1.20 or −0.31; a dash for None and for what is not finite."""
    return number(value, digits, sign="+")


def number(value: float | None, digits: int = 2, *, sign: str = "-") -> str:
    """1.20 or −0.31; a dash for None and for what is not finite."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value:{sign}.{digits}f}".replace("-", MINUS)


def figure_list(rows: Iterable[tuple[str, str, Any]]) -> str:
    """(key, label, figure) each, as a list of definitions; a figure is found by its `data-figure`, the key."""
    inside = (f'<div><dt>{label}</dt><dd data-figure="{key}">{figure}</dd></div>' for key, label, figure in rows)
    return f"<dl>{''.join(inside)}</dl>"


def short_name(name: str) -> str:
    """NAMESPACE/NAME@REVISION with a commit cut to what tells it apart; not escaped."""
    repo, at, revision = name.partition("@")
    return f"{repo}{at}{revision[:8] if _COMMIT.fullmatch(revision) else revision}"


def notice(message: Any, *, kind: str = "alert") -> str:
    """A message of the page. kind: alert for what went wrong, status for what is worth knowing."""
    return f'<div class="zoo-said zoo-{kind}" role="{kind}">{text(message)}</div>'


def attributes(values: Mapping[str, Any]) -> str:
    """` name="value"` of each that is not None."""
    return "".join(f' {name}="{escape(str(value))}"' for name, value in values.items() if value is not None)
