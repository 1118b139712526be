"""Sends numbers and alerts of the probes to Weights & Biases and trackio, if this process has a run there."""

import sys
from collections.abc import Mapping
from typing import Any


def _wandb_run() -> Any:
    """Returns the run of Weights & Biases in this process; None if there is none."""
    # Nothing is imported here: a tracker that is installed but not used gets nothing.
    return getattr(sys.modules.get("wandb"), "run", None)


def _active_trackio() -> Any:
    """Returns trackio if it has a run in this process; otherwise None."""
    trackio: Any = sys.modules.get("trackio")
    return None if trackio is None or trackio.context_vars.current_run.get() is None else trackio


def log_numbers(numbers: Mapping[str, float], *, step: int) -> None:
    """Logs numbers to the runs to which the transformers trainer reports.

    Args:
        numbers: Name -> value.
        step: The trainer's step. Like transformers, this logs it as a column, because a tracker counts its own steps.
    """
    row = {**numbers, "train/global_step": step}
    if (run := _wandb_run()) is not None:
        run.log(row)
    if (trackio := _active_trackio()) is not None:
        trackio.log(row)


def send_alert(title: str, text: str, *, is_error: bool) -> None:
    """Sends an alert.

    Args:
        title: The title, under 64 characters.
        text: The message, which may quote untrusted text.
        is_error: Whether the alert is an error rather than a warning.
    """
    if (run := _wandb_run()) is not None:
        run.alert(title=title, text=text, level="ERROR" if is_error else "WARN")
    if (trackio := _active_trackio()) is not None:
        trackio.alert(title=title, text=text, level=trackio.AlertLevel.ERROR if is_error else trackio.AlertLevel.WARN)
