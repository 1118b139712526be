"""Renders text, numbers and messages as HTML. Text from visitors, models and cards is always escaped."""

import math
import re
from collections.abc import Iterable, Mapping
from html import escape

from ..engine import visible_text

MINUS = "\u2212"
DASH = "\u2013"
_COMMIT = re.compile(r"[0-9a-f]{40}")
#: Stop reason -> label on the page; None while the completion is in progress.
STOP_LABELS = {"eos": "by itself", "length": "cut off", None: "writing"}


def escape_text(value: object) -> str:
    """Escapes text for HTML, and makes visible any characters that would hide or reorder text.

    Args:
        value: Text from a visitor, a model or a card.
    """
    return escape(visible_text(str(value)))


def format_signed(value: float | None) -> str:
    """Formats a number as +1.20 or −0.31; a dash for None and values that are not finite.

    Args:
        value: Any number, or None.
    """
    return format_number(value, sign="+")


def format_number(value: float | None, digits: int = 2, *, sign: str = "-") -> str:
    """Formats a number as 1.20 or −0.31; a dash for None and values that are not finite.

    Args:
        value: Any number, or None.
        digits: Number of digits after the decimal point.
        sign: "+" to show the sign of positive numbers too.
    """
    if value is None or not math.isfinite(value):
        return DASH
    return f"{value:{sign}.{digits}f}".replace("-", MINUS)


def figure_list_html(rows: Iterable[tuple[str, str, object]]) -> str:
    """Renders figures as a definition list. The caller escapes labels and figures.

    Args:
        rows: (key, label, figure) for each figure; the key becomes the attribute `data-figure`.
    """
    items = (f'<div><dt>{label}</dt><dd data-figure="{key}">{figure}</dd></div>' for key, label, figure in rows)
    return f"<dl>{''.join(items)}</dl>"


def shorten_name(name: str) -> str:
    """Shortens the commit in NAMESPACE/NAME@REVISION to 8 digits. The result is not escaped.

    Args:
        name: NAMESPACE/NAME, with or without a revision.
    """
    repo, separator, revision = name.partition("@")
    return f"{repo}{separator}{revision[:8] if _COMMIT.fullmatch(revision) else revision}"


def notice_html(message: object, *, kind: str = "alert") -> str:
    """Renders a message.

    Args:
        message: Any text or error.
        kind: "alert" for an error, "status" for information.
    """
    return f'<div class="zoo-message zoo-{kind}" role="{kind}">{escape_text(message)}</div>'


def html_attributes(values: Mapping[str, object]) -> str:
    """Renders attributes as ` name="value"`, without those whose value is None.

    Args:
        values: Attribute name -> value.
    """
    return "".join(f' {name}="{escape(str(value))}"' for name, value in values.items() if value is not None)
