"""Reads and writes metrics.jsonl, which has one row per line. A killed process leaves at most one incomplete line."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import ZooError
from ..fileio import describe_write_error, int_or_none, jsonable, now, parse_json, write_text


def without_times(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row of metrics without times, durations and speeds, which differ between otherwise equal runs.

    Args:
        row: A row of metrics.jsonl.
    """
    return {
        name: value
        for name, value in row.items()
        if name != "time" and not name.startswith(("time/", "perf/")) and not name.endswith(("runtime", "_per_second"))
    }


def append_row(file_path: Path, metrics: Mapping[str, Any]) -> None:
    """Appends one row. A number that is not finite is written as null.

    An incomplete last line is dropped first, because the new row would continue it.

    Args:
        file_path: The file; its folder is created if it is missing.
        metrics: The row, with an integer `step`. `time` is added.

    Raises:
        ValueError: The row has no integer `step`.
        ZooError: The file cannot be written.
    """
    step = metrics.get("step")
    if type(step) is not int:
        raise ValueError(f"A row of metrics needs an integer step, not {step!r}.")
    row = {"step": step, "time": now(), **metrics}
    line = json.dumps(jsonable(row, nonfinite_as_text=False), allow_nan=False)
    try:
        file_path.parent.mkdir(parents=True, exist_ok=True)
        with open(file_path, "a+b") as file:
            end = file.seek(0, os.SEEK_END)
            separator = _drop_incomplete_line(file, end)
            try:
                file.write(separator + line.encode() + b"\n")
                file.flush()
            except OSError:
                file.truncate(end)
                raise
    except OSError as error:
        raise ZooError(describe_write_error(file_path, error)) from error


def _drop_incomplete_line(file: BinaryIO, end: int) -> bytes:
    """Cuts off an incomplete last line.

    Returns the text that must precede the next row: a newline if the last line is a row without a newline.
    """
    if end == 0:
        return b""
    file.seek(end - 1)
    if file.read(1) == b"\n":
        return b""
    file.seek(0)
    content = file.read()
    start = content.rfind(b"\n") + 1
    if _metrics_row(content[start:]) is not None:
        return b"\n"
    file.truncate(start)
    return b""


def read_rows(file_path: Path) -> list[dict[str, Any]]:
    """Reads all rows, oldest first. An incomplete last line is ignored.

    Args:
        file_path: The file, which may be missing.

    Raises:
        ZooError: A line other than the last is not a row.
    """
    try:
        lines = file_path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _metrics_row(line) if line.strip() else None
        if row is not None:
            rows.append(row)
        elif line.strip() and number < len(lines):
            raise ZooError(f"Line {number} of {file_path} is not a row of metrics: remove it, or use --restart.")
    return rows


def _metrics_row(line: bytes) -> dict[str, Any] | None:
    """Parses a line; None if it is not an object with an integer `step`."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and int_or_none(row.get("step")) is not None else None


def truncate_rows(file_path: Path, step: int) -> None:
    """Drops the rows after a step.

    Args:
        file_path: The file, which may be missing.
        step: The last step to keep.
    """
    if not file_path.exists():
        return
    rows = (row for row in read_rows(file_path) if row["step"] <= step)
    write_text(file_path, "".join(json.dumps(row) + "\n" for row in rows))
