"""Recognizes folders that were downloaded. Their content is data and never runs as code.

The program that downloads leaves the marks, and `find_download` looks for them in the folders above too, so no
repository can hide that it was downloaded. A folder that arrived in another way (git, a zip) has no mark and counts as
the user's own.
"""

import os
import re
from pathlib import Path

#: The folder that huggingface_hub and `rlhf-zoo pull` leave in every output directory.
DOWNLOADED = Path(".cache", "huggingface", "download")
#: A file in the copy of a downloaded recipe. The user removes it after reading the recipe.
MARK = ".downloaded"
#: The folder in which `rlhf-zoo pull` keeps incomplete files.
PARTIAL = ".rlhf-zoo-partial"
#: A file in every published checkpoint.
CARD = "rlhf_card.json"
_CACHED = re.compile(r"(models|datasets|spaces)--.+")


def find_download(folder: Path) -> Path | None:
    """Finds the evidence that a folder was downloaded.

    Args:
        folder: A folder on this machine.

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
                marks += [parent / name for name in (DOWNLOADED, PARTIAL, CARD)]
            else:
                # A mark in the home folder must not taint everything below it. A download into the home folder repeats
                # each folder that it wrote into below DOWNLOADED, so exactly those count.
                marks.append(parent / DOWNLOADED / candidate.relative_to(parent))
            if (mark := next((mark for mark in marks if mark.exists()), None)) is not None:
                return mark
            if _CACHED.fullmatch(parent.name):
                return parent
    return None
