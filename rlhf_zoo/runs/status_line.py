"""A line on the terminal that shows what a command is doing while there is no progress bar."""

import contextlib
import threading
from collections.abc import Iterator

from tqdm import tqdm

from ..modeling import distributed

REFRESH_SECONDS = 1.0


@contextlib.contextmanager
def doing(activity: str) -> Iterator[None]:
    """Shows a line with the elapsed time, below any progress bar, until the block ends.

    Only the main process shows it, and only on a terminal.

    Args:
        activity: The activity, such as "sft: merging the adapter".
    """
    ended = threading.Event()
    disable = None if distributed.is_main_process() else True  # None shows it only on a terminal
    with tqdm(desc=activity, bar_format="{desc}, {elapsed}", leave=False, disable=disable) as line:

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
