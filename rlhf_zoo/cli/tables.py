"""What commands print: tables, figures with their intervals, JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from ..errors import printable

if TYPE_CHECKING:
    from rich.console import Console

# Columns that readers copy from; their cells stay on one line.
COPIED = ("revision", "commit", "date", "key", "model", "repository", "step")
# A table never breaks a word of at most so many letters.
SHORT = 16


def print_json(document: Any) -> None:
    """Prints a document as JSON. Characters that control a terminal are escaped, as JSON escapes them.

    Args:
        document: Of JSON's types.
    """
    text = json.dumps(document, indent=2, ensure_ascii=False)
    click.echo("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text))


def say(text: str, *, err: bool = False) -> None:
    """Prints a text that may hold names or answers from elsewhere; characters that control a terminal are escaped.

    Args:
        text: The text.
        err: Whether it goes to stderr.
    """
    click.echo(printable(text), err=err)


def console_of(width: int) -> Console:
    """The terminal; a file or a pipe, which has no width of its own, gets at least `width` columns.

    Args:
        width: In columns.
    """
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, width))


def interval(estimate: Mapping[str, Any], *, digits: int = 2, sign: str = "") -> str:
    """Writes an estimate with its 95% interval.

    Args:
        estimate: `value` and `ci95`.
        digits: After the point.
        sign: "+" also writes the sign of a positive value.
    """
    low, high = estimate["ci95"]
    return f"{estimate['value']:{sign}.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Prints a table that breaks lines between words alone: where it is too wide for the screen, closer together.

    Args:
        title: Above the table; "" for none.
        columns: Their headings.
        rows: Cells as text.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    columns, *rows = [[printable(cell) for cell in row] for row in (columns, *rows)]
    cells = [*zip(columns, *rows, strict=True)]
    full = [max(cell_len(line) for cell in column for line in cell.splitlines() or [""]) for column in cells]
    words = [
        most if column[0] in COPIED else max(cell_len(word) for cell in column for word in cell.split() or [""])
        for most, column in zip(full, cells, strict=True)
    ]
    console, apart = console_of(120), 3 * len(columns) + 1
    close = console.is_terminal and sum(words) + apart > console.width
    around = len(columns) - 1 if close else apart
    breakable = [place for place, column in enumerate(columns) if column not in COPIED]
    while close and breakable and sum(words) + around > console.width:  # only long names are broken
        longest = max(breakable, key=words.__getitem__)
        if words[longest] <= SHORT:
            break
        words[longest] -= 1
    room = max(console.width - around - sum(words), 0)
    table = Table(
        title=printable(title) or None, box=box.SIMPLE_HEAD, padding=0 if close else (0, 1), show_edge=not close
    )
    widths = dict(enumerate(words))
    for left, place in enumerate(
        sorted(widths, key=lambda place: full[place] - words[place])
    ):  # the column that needs least first
        more = min(full[place] - words[place], room // (len(columns) - left))
        widths[place] += more
        room -= more
    for place, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=column in COPIED, width=widths[place])
    for row in rows:
        table.add_row(*map(escape, row))
    Console(width=max(console.width, around + sum(widths.values()))).print(table)
