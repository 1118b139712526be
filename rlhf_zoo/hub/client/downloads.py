"""Recognizes folders that were downloaded. Their content is data and never runs as code.

The downloading program leaves marks in the folder or above it, so no repository can hide that it was downloaded. A
folder that arrived in another way (by git, or in a zip file) has no mark and counts as the user's own.
"""

import os
from pathlib import Path

from .links import CACHED_REPOSITORY

#: The folder that huggingface_hub and `rlhf-zoo pull` leave in every output directory.
DOWNLOADED = Path(".cache", "huggingface", "download")
#: A file in the copy of a downloaded recipe. The user removes it after reading the recipe.
MARK = ".downloaded"
#: The folder in which `rlhf-zoo pull` keeps incomplete files.
PARTIAL = ".rlhf-zoo-partial"
#: A file in every published checkpoint.
CARD_FILE = "rlhf_card.json"


def find_download(folder: Path) -> Path | None:
    """Finds a mark that a folder was downloaded.

    Args:
        folder: Any folder on this machine.

    Returns:
        A mark in the folder or above it, a folder of the client's cache, or a published card; None if the folder is
        the user's own.
    """
    home = Path(os.path.expanduser("~"))
    homes = (home, home.resolve())
    for candidate in dict.fromkeys([folder.absolute(), folder.resolve()]):
        for parent in (candidate, *candidate.parents):
            marks = [parent / MARK]
            if parent == candidate or parent not in homes:
                marks += [parent / name for name in (DOWNLOADED, PARTIAL, CARD_FILE)]
            else:
                # A mark in the home folder must not make everything below it a download. A pull into the home folder
                # also creates an empty copy of the repository's subfolders below DOWNLOADED: only these count.
                marks.append(parent / DOWNLOADED / candidate.relative_to(parent))
            if (mark := next((mark for mark in marks if mark.exists()), None)) is not None:
                return mark
            if CACHED_REPOSITORY.fullmatch(parent.name):
                return parent
    return None
