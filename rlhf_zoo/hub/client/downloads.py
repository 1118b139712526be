"""Which folders were downloaded: what lies there is data, whatever it looks like.

Nothing that a repository holds can hide it: the marks are made by who downloads, and `find_download` looks for them in
the folders above too. A folder that came by another way (git, a zip) has no mark, and is its user's.
"""

import os
import re
from pathlib import Path

#: What huggingface_hub leaves in a folder of the user's that it downloads into, and `rlhf-zoo pull` too.
DOWNLOADED = Path(".cache", "huggingface", "download")
#: A file in the copy of a recipe that was downloaded; its user removes it, having read the recipe.
MARK = ".downloaded"
#: Where `rlhf-zoo pull` keeps files that have not come whole yet.
PARTIAL = ".rlhf-zoo-partial"
#: What a published checkpoint holds.
CARD = "rlhf_card.json"
_CACHED = re.compile(r"(models|datasets|spaces)--.+")


def find_download(folder: Path) -> Path | None:
    """What shows that a folder was downloaded.

    Args:
        folder: a folder on this machine.

    Returns:
        The mark in it or in a folder above it, a folder of the client's cache, or a card that was published; None of a
        folder of the user's own.
    """
    home = Path(os.path.expanduser("~"))
    homes = (home, home.resolve())
    for place in dict.fromkeys([folder.absolute(), folder.resolve()]):
        for above in (place, *place.parents):
            marks = [above / MARK]
            if above == place or above not in homes:
                marks += [above / name for name in (DOWNLOADED, PARTIAL, CARD)]
            else:  # all that the user has is below: only folders that a download wrote into, which DOWNLOADED repeats
                marks.append(above / DOWNLOADED / place.relative_to(above))
            if (mark := next((mark for mark in marks if mark.exists()), None)) is not None:
                return mark
            if _CACHED.fullmatch(above.name):
                return above
    return None
