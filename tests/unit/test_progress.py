"""Progress in a log: whole lines, each 5% of the work and while a step takes long, with reward and KL."""

import contextlib
import fcntl
import io
import os
import pty
import struct
import subprocess
import termios
import time
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from warm import PYTHON

from rlhf_zoo.runs import status_line
from rlhf_zoo.runs.status_line import Progress


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A file for stderr. Each test redirects by itself, because pytest sets stderr after the fixtures."""
    monkeypatch.setattr(status_line, "REFRESH_SECONDS", 0.001)
    return io.StringIO()


def test_log_gets_a_line_per_5_percent(log: io.StringIO) -> None:
    with redirect_stderr(log), Progress(100, "   ppo", "step") as bar:
        for step in range(100):
            bar.show_metrics({"reward": f"{step}", "kl": "0.5"})
            time.sleep(0.002)
            bar.update()
    assert "\r" not in log.getvalue()
    lines = log.getvalue().splitlines()
    assert 15 <= len(lines) <= 22
    assert lines[0].startswith("ppo: 0 of 100 (0%), 00:00 so far, ? left")
    assert any(line.startswith("ppo: 5 of 100 (5%), ") and line.endswith(" left, reward=4, kl=0.5") for line in lines)
    assert lines[-1].startswith("ppo: 100 of 100 (100%), ") and lines[-1].endswith(", reward=99, kl=0.5")


def test_long_step_logs_its_activity(log: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_line, "LOG_SECONDS", 0.01)
    with redirect_stderr(log), Progress(24, "ppo", "step", initial=16) as bar:
        bar.describe("ppo, sampling")
        deadline = time.monotonic() + 30
        while "ppo, sampling: 16 of 24 (67%), " not in log.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_short_activity_logs_nothing(log: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_line, "REFRESH_SECONDS", 10.0)
    with redirect_stderr(log), Progress(3, "judging", "answer", leave=False) as bar:
        for _ in range(3):
            bar.update()
    assert log.getvalue() == ""


def test_terminal_gets_a_progress_bar(log: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "isatty", lambda: True, raising=False)
    with redirect_stderr(log), Progress(4, "ppo", "step") as bar:
        bar.show_metrics({"reward": "1.5"})
        bar.update(4)
    assert "\rppo: 100%|" in log.getvalue() and "reward=1.5" in log.getvalue()


def test_ppo_progress_shows_reward_kl_and_phase(log: io.StringIO, tmp_path) -> None:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from rlhf_zoo.pipeline.stages.callbacks import ProgressCallback
    from rlhf_zoo.runs.record import StageRecord

    callback, state = ProgressCallback(StageRecord(tmp_path), "ppo"), TrainerState()
    arguments, control = TrainingArguments(output_dir=str(tmp_path), use_cpu=True), TrainerControl()
    state.max_steps = 4
    with redirect_stderr(log):
        callback.on_train_begin(arguments, state, control)
        for state.global_step in (1, 2):
            time.sleep(0.002)
            control.should_log = True
            callback.on_step_end(arguments, state, control)
            logs = {"objective/score": 1.25 * state.global_step, "objective/kl": 0.5}
            callback.on_log(arguments, state, control, logs=logs)
        callback.show_phase("rollout")
        callback.on_train_end(arguments, state, control)
    lines = log.getvalue().splitlines()
    assert lines[1].startswith("ppo: 1 of 4 ") and lines[1].endswith("reward=1.25, kl=0.5"), "of this step"
    assert lines[-1].startswith("ppo, sampling: 2 of 4 ") and lines[-1].endswith("reward=2.5, kl=0.5")


@pytest.mark.parametrize("words", ["push runs/x", "doctor tiny-world"])
def test_command_shows_on_terminal_what_it_loads(tmp_path: Path, words: str) -> None:
    stage = tmp_path / "runs" / "x" / "ppo"
    stage.mkdir(parents=True)
    (stage / "run.json").write_text('{"schema": 1, "stage": "ppo", "recipe": "tiny-world", "status": "running"}')
    terminal, stderr = pty.openpty()
    fcntl.ioctl(stderr, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))  # without a width no line is shown
    env = {**os.environ, "RLHF_ZOO_HOME": str(tmp_path / "home")}
    command = [*PYTHON, "-m", "rlhf_zoo.cli", *words.split()]
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=stderr)
    os.close(stderr)
    shown = b""
    with contextlib.suppress(OSError):  # how Linux reports the end of a terminal
        while block := os.read(terminal, 4096):
            shown += block
    process.wait()
    os.close(terminal)
    assert b"loading the " in shown, shown.decode(errors="replace")
