"""Whether the disk has room for the next checkpoint, asked before it is written."""

import shutil

from ..errors import ZooError
from ..record import StageRecord


class NoRoom(ZooError):
    """The disk cannot hold the next checkpoint."""


def check_room(record: StageRecord, *, least: int = 0) -> None:
    """Raises NoRoom where the disk lacks the bytes of the last checkpoint, or before the first one `least` of them."""
    last = record.last_checkpoint()
    size = least if last is None else sum(path.stat().st_size for path in last.rglob("*") if path.is_file())
    free = shutil.disk_usage(record.path).free
    if free < size:
        raise NoRoom(
            f"The disk of {record.path} has {free / 2**20:,.1f} MiB left and a checkpoint takes {size / 2**20:,.1f}: "
            "make room, and the same command goes on from the last checkpoint."
        )
