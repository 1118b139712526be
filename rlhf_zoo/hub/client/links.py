"""Checks that paths and symbolic links stay inside a folder."""

import os
import re
from pathlib import Path

#: The name of a repository's folder in the client's cache.
CACHED_REPOSITORY = re.compile(r"(models|datasets|spaces)--.+")
#: The folder in a cached repository where `refs` keeps copies of adapters that name the folder of their base.
ADAPTER_COPIES = "on_bases"
#: The folders in a cached repository that hold a folder for each commit.
REVISION_FOLDERS = ("snapshots", ADAPTER_COPIES)


def find_outward_link(folder: Path, *, include_hidden: bool) -> Path | None:
    """Finds a symbolic link in a folder whose target is outside the folder.

    Args:
        folder: The folder to search, with its subfolders.
        include_hidden: Whether to search folders whose names begin with . or __, which `datasets` skips unless a
            pattern names them.

    Returns:
        The first such link, relative to the folder; None if there is none.
    """
    for subfolder, folders, files in os.walk(folder):
        if not include_hidden:
            folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        for name in (*folders, *files):
            if Path(subfolder, name).is_symlink() and not is_inside(Path(subfolder, name), folder):
                return Path(subfolder, name).relative_to(folder)
    return None


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path lies in a folder once the links in the path are resolved.

    Args:
        path: Any path.
        folder: A folder. If it is in the client's cache, the repository's blobs and snapshots count as inside.
    """
    root, target = folder.resolve(), Path(os.path.realpath(path))
    roots = [root]
    # A revision in the client's cache consists of links to ../../blobs and ../../snapshots.
    for parent in (root, *root.parents):
        repository = parent.parent.parent
        if parent.parent.name in REVISION_FOLDERS and CACHED_REPOSITORY.fullmatch(repository.name):
            roots += [repository / "blobs", repository / "snapshots"]
    return any(target.is_relative_to(allowed_root) for allowed_root in roots)
