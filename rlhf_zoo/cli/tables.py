"""Prints the output of commands: tables, figures with their intervals, JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from ..errors import printable

if TYPE_CHECKING:
    from rich.console import Console

# Columns that users copy from; their cells stay on one line.
COPIED = ("revision", "commit", "date", "key", "model", "repository", "step")
# A table never breaks a word of up to this many letters.
SHORT = 16


def print_json(document: Any) -> None:
    """Prints a document as JSON. Characters that control a terminal are escaped, as JSON escapes them.

    Args:
        document: The document, of JSON types.
    """
    text = json.dumps(document, indent=2, ensure_ascii=False)
    click.echo("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text))


def say(text: str, *, err: bool = False) -> None:
    """Prints text that may contain names or answers from outside, with terminal control characters escaped.

    Args:
        text: The text.
        err: Whether to print to stderr.
    """
    click.echo(printable(text), err=err)


def console_of(width: int) -> Console:
    """Returns a console for stdout. A file or a pipe, which has no width of its own, gets at least `width` columns.

    Args:
        width: The width in columns.
    """
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, width))


def interval(estimate: Mapping[str, Any], *, digits: int = 2, sign: str = "") -> str:
    """Writes an estimate with its 95% interval.

    Args:
        estimate: `value` and `ci95`.
        digits: Digits after the decimal point.
        sign: "+" also writes the sign of a positive value.
    """
    low, high = estimate["ci95"]
    return f"{estimate['value']:{sign}.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Prints a table that breaks lines only between words. If it is too wide for the screen, columns move together.

    Args:
        title: The title above the table; "" for none.
        columns: The column headings.
        rows: The rows, with cells as text.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    columns, *rows = [[printable(cell) for cell in row] for row in (columns, *rows)]
    cells = [*zip(columns, *rows, strict=True)]
    full = [max(cell_len(line) for cell in column for line in cell.splitlines() or [""]) for column in cells]
    minimum = [
        width if column[0] in COPIED else max(cell_len(word) for cell in column for word in cell.split() or [""])
        for width, column in zip(full, cells, strict=True)
    ]
    console, full_frame = console_of(120), 3 * len(columns) + 1
    compact = console.is_terminal and sum(minimum) + full_frame > console.width
    frame = len(columns) - 1 if compact else full_frame
    breakable = [index for index, column in enumerate(columns) if column not in COPIED]
    while compact and breakable and sum(minimum) + frame > console.width:  # only long names are broken
        longest = max(breakable, key=minimum.__getitem__)
        if minimum[longest] <= SHORT:
            break
        minimum[longest] -= 1
    spare = max(console.width - frame - sum(minimum), 0)
    table = Table(
        title=printable(title) or None, box=box.SIMPLE_HEAD, padding=0 if compact else (0, 1), show_edge=not compact
    )
    widths = dict(enumerate(minimum))
    for position, index in enumerate(
        sorted(widths, key=lambda index: full[index] - minimum[index])
    ):  # the column that needs least first
        extra = min(full[index] - minimum[index], spare // (len(columns) - position))
        widths[index] += extra
        spare -= extra
    for index, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=column in COPIED, width=widths[index])
    for row in rows:
        table.add_row(*map(escape, row))
    Console(width=max(console.width, frame + sum(widths.values()))).print(table)
