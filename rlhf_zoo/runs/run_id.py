"""The id of a run directory. The run's repositories on the Hub record it, so that no other run writes to them."""

import os
import re
import tempfile
import uuid
from pathlib import Path

from ..errors import ZooError

RUN_ID = "run_id"
_CONTENT = re.compile(r"([0-9a-f]{32}) ([0-9]+)\n")


def run_id(directory: Path) -> str:
    """Returns the id in a directory's file `run_id`, creating the file on first use.

    The file records its own inode, so that a renamed directory keeps its id and a copy gets a new id.

    Args:
        directory: The run directory.

    Returns:
        32 hex digits.

    Raises:
        ZooError: The file does not hold an id, or cannot be written.
    """
    path = directory / RUN_ID
    try:
        if path.is_file():
            match = _CONTENT.fullmatch(path.read_text(encoding="ascii"))
            if match is None:
                raise ValueError("it does not hold a run id")
            if int(match[2]) == path.stat().st_ino:
                return match[1]
        directory.mkdir(parents=True, exist_ok=True)
        descriptor, temporary_path = tempfile.mkstemp(dir=directory, prefix=f".{RUN_ID}.", suffix=".tmp")
        new_id = uuid.uuid4().hex
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(f"{new_id} {os.fstat(file.fileno()).st_ino}\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary_path, path)
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or error
        raise ZooError(
            f"{path} cannot be used ({problem}): correct it, or remove it and pass --overwrite_repo."
        ) from error
    return new_id
