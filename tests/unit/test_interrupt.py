"""Ctrl-C that waits for the step under way."""

import io
import signal
import sys

import pytest

from rlhf_zoo.pipeline.stages.interrupt import Interruptible


class Interrupting(io.RawIOBase):
    """A stream that raises SIGINT on every write."""

    def writable(self) -> bool:
        return True

    def write(self, data, /) -> int:
        signal.raise_signal(signal.SIGINT)
        return len(data)


def test_interruptible_handles_signal_during_write(monkeypatch, capfd):
    with Interruptible("the ppo stage") as interrupt, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(Interrupting()), line_buffering=True))
        print("ppo: 17%", file=sys.stderr, flush=True)
        patch.undo()
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err.startswith("\nSaving the ppo stage after this step, or after this batch of an")
