"""Progress of a command: a bar or a line on a terminal, and lines in a log."""

import contextlib
import math
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from ..modeling import distributed

REFRESH_SECONDS = 1.0
#: A log gets a line for each of this many parts of the work, and one after LOG_SECONDS without any.
LOG_PARTS = 20
LOG_SECONDS = 60.0
_LOG_FORMAT = "{desc}{n_fmt} of {total_fmt} ({percentage:.0f}%), {elapsed} so far, {remaining} left{postfix}"


class Progress(tqdm):
    """A progress bar. Only the main process shows it.

    On a terminal its time goes on every second. Elsewhere it is a line for each 5% of the work, and one a minute while
    a step takes longer.

    Args:
        total: The number of steps.
        desc: The label.
        unit: What a step is called.
        initial: The number of steps that are done.
        leave: Whether the bar stays at the end.
        hidden: Whether to show nothing.
    """

    leave: bool

    def __init__(
        self, total: int, desc: str, unit: str, *, initial: int = 0, leave: bool = True, hidden: bool = False
    ) -> None:
        self._ended = threading.Event()
        self._in_log = not sys.stderr.isatty()
        self._line, self._shown_at = "", 0.0
        options: dict[str, Any] = {}
        if self._in_log:
            options = {
                "bar_format": _LOG_FORMAT,
                "miniters": max(math.ceil(total / LOG_PARTS), 1),
                "mininterval": REFRESH_SECONDS,
                "maxinterval": math.inf,
                "delay": 0 if leave else REFRESH_SECONDS,
            }
        disable = hidden or not distributed.is_main_process()
        super().__init__(
            total=total, desc=f"{desc}: ", unit=unit, initial=initial, leave=leave, disable=disable, **options
        )
        if not self.disable:
            threading.Thread(target=self._beat, name="progress", daemon=True).start()

    def _beat(self) -> None:
        while not self._ended.wait(REFRESH_SECONDS):
            if not self._in_log or time.monotonic() - self._shown_at >= LOG_SECONDS:
                self.refresh()

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Shows the bar, as tqdm does; in a log, as a line of its own.

        Args:
            msg: Text to show instead; "" clears the bar.
            pos: The row of the terminal.

        Returns:
            Whether anything was shown.
        """
        if not self._in_log:
            return bool(super().display(msg, pos))
        line = str(self).strip() if msg is None else msg
        if line and line != self._line:
            self._line, self._shown_at = line, time.monotonic()
            self.fp.write(f"{line}\n")
            self.fp.flush()
        return False

    def describe(self, desc: str) -> None:
        """Changes the label, which shows within a second; in a log from its next line on.

        Args:
            desc: The label.
        """
        self.set_description(desc, refresh=False)

    def show_metrics(self, metrics: dict[str, str]) -> None:
        """Shows metrics behind the bar; in a log from its next line on.

        Args:
            metrics: Label -> value.
        """
        self.set_postfix(metrics, refresh=not self._in_log)

    def close(self) -> None:
        """Ends the bar; in a log with a last line if it stays."""
        self._ended.set()
        if self._in_log and not self.disable:
            if self.leave:
                self.display()
            self.leave = False  # else tqdm ends the line once more
        super().close()


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
