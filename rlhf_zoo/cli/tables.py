"""Prints the output of commands: tables, figures with their intervals, JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..errors import printable

if TYPE_CHECKING:
    from rich.console import Console

#: Columns that users copy from, or that name the row: the lines of their cells are not broken.
COPIED_COLUMNS = ("revision", "commit", "date", "key", "model", "repository", "setting", "step")
#: A table breaks words of up to this many letters only if breaking longer words does not make it fit.
MAX_UNBROKEN = 16
#: A table never breaks words of up to this many letters.
NEVER_BROKEN = 8


def print_json(document: object) -> None:
    """Prints a document as JSON, and escapes characters that control a terminal.

    Args:
        document: A value of JSON types.
    """
    text = json.dumps(document, indent=2, ensure_ascii=False)
    click.echo("".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text))


def print_text(text: str, *, err: bool = False) -> None:
    """Prints text that may come from a Hub, a file or a model, with terminal control characters escaped.

    Args:
        text: The text.
        err: Whether to print to stderr.
    """
    click.echo(printable(text), err=err)


def stdout_console(min_width: int) -> Console:
    """Returns a console for stdout.

    Args:
        min_width: Minimum width in characters if stdout is a file or a pipe, which has no width of its own.
    """
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, min_width))


def interval(estimate: Mapping[str, Any], *, digits: int = 2, sign: str = "") -> str:
    """Formats an estimate with its 95% interval.

    Args:
        estimate: `value` and `ci95`.
        digits: Digits after the decimal point.
        sign: "+" to write the sign of a positive value too.
    """
    low, high = estimate["ci95"]
    return f"{estimate['value']:{sign}.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def number_or_range(values: Iterable[int]) -> str:
    """Formats a whole number that may differ between runs: "40", or "20 to 40".

    Args:
        values: The number in each run.
    """
    ordered = sorted(set(values))
    return str(ordered[0]) if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"


def verdict_cell(judgments: Sequence[Mapping[str, Any]]) -> str:
    """Returns the verdicts of runs as a table cell: at the step of their figures, and at the last step if they differ.

    Args:
        judgments: `Outcome.judgment` of each run.
    """
    at_last = [judgment["at_last"] or judgment for judgment in judgments]
    verdicts, last_verdicts = _verdicts(judgments), _verdicts(at_last)
    if last_verdicts == verdicts:
        return verdicts
    steps = number_or_range(judgment["step"] for judgment in at_last)
    return f"{verdicts}\nat the last step, {steps}: {last_verdicts}"


def _verdicts(judgments: Sequence[Mapping[str, Any]]) -> str:
    """Returns the verdict of one run, or the number of runs with each verdict."""
    verdicts = [(judgment["verdict"] or "none").partition(" (")[0] for judgment in judgments]
    if len(verdicts) == 1:
        return verdicts[0]
    return ", ".join(f"{count} {verdict}" for verdict, count in Counter(verdicts).items())


def print_table(title: str, headings: list[str], rows: list[list[str]], *, min_width: int = 120) -> None:
    """Prints a table that breaks lines between words, and drops its padding if the terminal is too narrow for it.

    Args:
        title: The title above the table; "" for none.
        headings: The headings of the columns.
        rows: The rows, as lists of cells.
        min_width: Minimum width in characters if stdout is a file or a pipe. 0, for a table of sentences, keeps the
            width of a terminal there: $COLUMNS, or 80.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    headings, *rows = [[printable(cell) for cell in row] for row in (headings, *rows)]
    columns = [*zip(headings, *rows, strict=True)]
    full_widths = [max(cell_len(line) for cell in column for line in cell.splitlines() or [""]) for column in columns]
    min_widths = [
        width
        if column[0] in COPIED_COLUMNS
        else max(cell_len(word) for cell in column for word in cell.split() or [""])
        for width, column in zip(full_widths, columns, strict=True)
    ]
    console, padded_frame = stdout_console(min_width), 3 * len(columns) + 1
    compact = (console.is_terminal or not min_width) and sum(min_widths) + padded_frame > console.width
    frame = len(columns) - 1 if compact else padded_frame
    breakable = [index for index, heading in enumerate(headings) if heading not in COPIED_COLUMNS]
    while compact and breakable and sum(min_widths) + frame > console.width:  # break the longest words too
        longest = max(breakable, key=min_widths.__getitem__)
        if min_widths[longest] <= MAX_UNBROKEN:
            break
        min_widths[longest] -= 1
    # Columns with little text are narrowed first, so that a column of sentences stays readable.
    for index in sorted(breakable, key=full_widths.__getitem__):
        excess = sum(min_widths) + frame - console.width
        if compact and excess > 0:
            min_widths[index] = max(min_widths[index] - excess, min(min_widths[index], NEVER_BROKEN))
    # Widen the columns that need the least space first, so that wide columns get the remaining space.
    spare = max(console.width - frame - sum(min_widths), 0)
    needs = [full_width - width for full_width, width in zip(full_widths, min_widths, strict=True)]
    widths = min_widths.copy()
    for position, index in enumerate(sorted(range(len(needs)), key=needs.__getitem__)):
        extra_width = min(needs[index], spare // (len(columns) - position))
        widths[index] += extra_width
        spare -= extra_width
    padding = 0 if compact else (0, 1)
    table = Table(title=escape(printable(title)), box=box.SIMPLE_HEAD, padding=padding, show_edge=not compact)
    for index, heading in enumerate(headings):
        table.add_column(escape(heading), overflow="fold", no_wrap=heading in COPIED_COLUMNS, width=widths[index])
    for row in rows:
        table.add_row(*map(escape, row))
    Console(width=max(console.width, frame + sum(widths))).print(table)
