"""Writes a run's metrics as TensorBoard events, which the Hub shows in the Metrics tab.

The events are made from metrics.jsonl, not during training. So a resumed run has one file without repeated steps, equal
metrics give equal bytes, and no file name reveals the host.
"""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..fileio import is_finite

EVENTS_FILE = "runs/{stage}/events.out.tfevents.{start}.rlhf-zoo"  # {start}: Unix time of the first row


def write_events(rows: Sequence[Mapping[str, Any]], folder: Path, *, stage: str) -> Path | None:
    """Writes every finite number in `rows` as a scalar at its step.

    Args:
        rows: Rows of metrics.jsonl; `time` (ISO 8601) becomes the wall time.
        folder: Folder for the file.
        stage: Name of the stage.

    Returns:
        The file; None if there are no rows.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    if not rows:
        return None
    path = folder / EVENTS_FILE.format(stage=stage, start=int(_seconds(rows[0])))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=_seconds(rows[0]), file_version="brain.Event:2").SerializeToString())
        for row in rows:
            values = [
                Summary.Value(tag=name, simple_value=value)
                for name, value in sorted(row.items())
                if name != "step" and is_finite(value)
            ]
            event = Event(wall_time=_seconds(row), step=row["step"], summary=Summary(value=values))
            writer.write(event.SerializeToString())
    return path


def _seconds(row: Mapping[str, Any]) -> float:
    return datetime.datetime.fromisoformat(row["time"]).timestamp()
