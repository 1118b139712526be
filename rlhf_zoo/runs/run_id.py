"""The id of a run directory, by which its repositories know it."""

import os
import re
import tempfile
import uuid
from pathlib import Path

from ..errors import ZooError

RUN_ID = "run_id"
_CONTENT = re.compile(r"([0-9a-f]{32}) ([0-9]+)\n")


def run_id(directory: Path) -> str:
    """32 hex digits, in the file `run_id`; made when they are first asked for.

    The file names its own inode, so that a copy of the directory is a run of its own, and a renamed one the same.
    Raises ZooError where the file holds something else, or cannot be written.
    """
    path = directory / RUN_ID
    try:
        if path.is_file():
            found = _CONTENT.fullmatch(path.read_text(encoding="ascii"))
            if found is None:
                raise ValueError("it is not the id of a run")
            if int(found[2]) == path.stat().st_ino:
                return found[1]
        directory.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=directory, prefix=f".{RUN_ID}.", suffix=".tmp")
        made = uuid.uuid4().hex
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(f"{made} {os.fstat(file.fileno()).st_ino}\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ZooError(f"{path} cannot be used ({why}): mend it, or remove it and give --overwrite_repo.") from error
    return made
