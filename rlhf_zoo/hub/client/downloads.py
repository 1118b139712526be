"""Recognizes downloaded folders, whose content is data and never runs as code.

A program that downloads a repository leaves marks in or above its folder, and no repository can prevent that. A folder
that arrived in another way (by git, or in a zip file) has no mark and counts as the user's own.
"""

import os
from pathlib import Path

from .links import CACHED_REPOSITORY

#: The folder that huggingface_hub and `rlhf-zoo pull` leave in every output directory.
DOWNLOAD_FOLDER = Path(".cache", "huggingface", "download")
#: A file in the copy of a downloaded recipe. The user removes it after reading the recipe.
RECIPE_MARK = ".downloaded"
#: The folder in which `rlhf-zoo pull` keeps incomplete files.
PARTIAL_FOLDER = ".rlhf-zoo-partial"
#: A file in every published checkpoint.
CARD_FILE = "rlhf_card.json"


def find_download(folder: Path) -> Path | None:
    """Finds a mark that a folder was downloaded.

    Args:
        folder: Any folder on this machine.

    Returns:
        A mark in the folder or above it, which can be a published card or a folder in the client's cache; None if the
        folder is the user's own.
    """
    home = Path(os.path.expanduser("~"))
    homes = (home, home.resolve())
    for candidate in dict.fromkeys([folder.absolute(), folder.resolve()]):
        for parent in (candidate, *candidate.parents):
            marks = [parent / RECIPE_MARK]
            if parent == candidate or parent not in homes:
                marks += [parent / name for name in (DOWNLOAD_FOLDER, PARTIAL_FOLDER, CARD_FILE)]
            else:
                # A mark in the home folder must not make everything below it a download. A pull into the home folder
                # also creates empty copies of the repository's subfolders below DOWNLOAD_FOLDER: only those count.
                marks.append(parent / DOWNLOAD_FOLDER / candidate.relative_to(parent))
            if (mark := next((mark for mark in marks if mark.exists()), None)) is not None:
                return mark
            if CACHED_REPOSITORY.fullmatch(parent.name):
                return parent
    return None
