"""Shows the progress of a command: as a bar or a line on a terminal, and as lines in a log."""

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
#: A log gets LOG_PARTS lines over the whole work, and another line after LOG_SECONDS without a line.
LOG_PARTS = 20
LOG_SECONDS = 60.0
_LOG_FORMAT = "{desc}{n_fmt} of {total_fmt} ({percentage:.0f}%), {elapsed} so far, {remaining} left{postfix}"


class Progress(tqdm):
    """A progress bar. Only the main process shows it.

    On a terminal it is refreshed every second. In a log there is one line per 5% of the work, but at least one line per
    minute.

    Args:
        total: Number of steps.
        desc: Label of the bar.
        unit: Name of a step, such as "sample".
        initial: Number of steps that are already done.
        leave: Whether the bar stays visible at the end.
        hidden: Whether the bar is never shown.
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
            threading.Thread(target=self._refresh_until_closed, name="progress", daemon=True).start()

    def _refresh_until_closed(self) -> None:
        while not self._ended.wait(REFRESH_SECONDS):
            if not self._in_log or time.monotonic() - self._shown_at >= LOG_SECONDS:
                self.refresh()

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Shows the bar, as tqdm does; in a log, as a separate line.

        Args:
            msg: Text to show instead of the bar; "" clears the bar, None shows it.
            pos: The row of the terminal.

        Returns:
            What tqdm returns; False in a log.
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
        """Changes the label. A terminal shows the new label within a second, and a log with its next line.

        Args:
            desc: The new label.
        """
        self.set_description(desc, refresh=False)

    def show_metrics(self, metrics: dict[str, str]) -> None:
        """Shows metrics after the bar. A log shows them with its next line.

        Args:
            metrics: Label -> value.
        """
        self.set_postfix(metrics, refresh=not self._in_log)

    def close(self) -> None:
        """Closes the bar. In a log, a last line is written if `leave` is true."""
        self._ended.set()
        if self._in_log and not self.disable:
            if self.leave:
                self.display()
            self.leave = False  # otherwise tqdm would end the line a second time
        super().close()


@contextlib.contextmanager
def show_activity(activity: str) -> Iterator[None]:
    """Shows a line with an activity and its elapsed time, below any progress bar, until the block ends.

    Only the main process shows the line, and only on a terminal.

    Args:
        activity: What the command is doing, such as "sft: merging the adapter".
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
