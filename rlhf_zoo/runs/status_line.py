"""What a command is doing, on the terminal, while it does what has no progress bar."""

import contextlib
import threading
from collections.abc import Iterator

from tqdm import tqdm

from ..modeling import distributed

REFRESH_SECONDS = 1.0


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Shows `what` and the time that it has taken so far, below any bar, until the block ends.

    Nothing is shown where there is no terminal, nor by other processes than the first.

    Args:
        what: What is being done, such as "sft: merging the adapter".
    """
    ended = threading.Event()
    disable = None if distributed.first() else True  # None: by whether there is a terminal
    with tqdm(desc=what, bar_format="{desc}, {elapsed}", leave=False, disable=disable) as line:

        def refresh() -> None:
            while not ended.wait(REFRESH_SECONDS):
                line.refresh()

        thread = threading.Thread(target=refresh, name="activity", daemon=True)
        if not line.disable:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            if thread.ident is not None:
                thread.join()
