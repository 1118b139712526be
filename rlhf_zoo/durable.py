"""Files that are whole or absent, whatever kills the process."""

import os
import tempfile
from pathlib import Path


def replace_file(path: Path, content: bytes, *, mode: int = 0o600, scratch: Path | None = None) -> None:
    """Replaces `path` in one step: a reader, or a crash, sees the old content or the new, never a part.

    scratch: the folder of the file that is written first, by default the file's own. Raises OSError; the old file then
    stands.
    """
    descriptor, temporary = tempfile.mkstemp(dir=scratch or path.parent, prefix=f".{path.name[:40]}.", suffix=".tmp")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames inside `folder` survive a power cut; systems that cannot open a folder (Windows) do without."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
