"""Sends the probes' numbers and alerts to Weights & Biases and trackio, if this process reports to them."""

import sys
from collections.abc import Mapping
from typing import Any


def _wandb_run() -> Any:
    """Returns the run of Weights & Biases in this process; None if there is none."""
    # Only what the training has imported: a tracker that is merely installed gets nothing.
    return getattr(sys.modules.get("wandb"), "run", None)


def _trackio() -> Any:
    """Returns trackio if it has a run in this process; otherwise None."""
    trackio: Any = sys.modules.get("trackio")
    return None if trackio is None or trackio.context_vars.current_run.get() is None else trackio


def log_numbers(numbers: Mapping[str, float], *, step: int) -> None:
    """Logs numbers beside those of the transformers trainer.

    Args:
        numbers: Name -> value.
        step: The trainer's step. It is a column, as transformers logs it, because a tracker counts its own steps.
    """
    row = {**numbers, "train/global_step": step}
    if (run := _wandb_run()) is not None:
        run.log(row)
    if (trackio := _trackio()) is not None:
        trackio.log(row)


def send_alert(title: str, text: str, *, severe: bool) -> None:
    """Sends an alert.

    Args:
        title: Its title, under 64 characters.
        text: What was found. It may quote untrusted text.
        severe: Whether it is an error rather than a warning.
    """
    if (run := _wandb_run()) is not None:
        run.alert(title=title, text=text, level="ERROR" if severe else "WARN")
    if (trackio := _trackio()) is not None:
        trackio.alert(title=title, text=text, level=trackio.AlertLevel.ERROR if severe else trackio.AlertLevel.WARN)
