"""One process at a time writes into a run directory, whatever its command, its home and how it ends."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hub_fixture import base_environment
from toy_run import make_recipe, save_start

from rlhf_zoo.cli import main as cli
from rlhf_zoo.errors import ZooError
from rlhf_zoo.runs.lock import LOCK, sole_writer
from rlhf_zoo.runs.recipe import Recipe
from rlhf_zoo.runs.record import StageRecord

pytestmark = pytest.mark.attack

#: Holds the lock of argv[1], and has a child that outlives it, as a data loader's worker may.
HOLDER = """
import os, sys, time
from pathlib import Path
from rlhf_zoo.runs.lock import sole_writer
with sole_writer(Path(sys.argv[1]), command="rlhf-zoo ppo elsewhere"):
    child = os.fork()
    if not child:
        print(os.getppid(), os.getpid(), flush=True)  # by now it has let go of the lock
        time.sleep(120)
        os._exit(0)
    time.sleep(120)
"""
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A run directory in which another process, with another home, writes."""
    env = base_environment() | {"RLHF_ZOO_HOME": str(tmp_path / "another-home")}
    run = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(run)], env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline().split()[1])
    try:
        yield run, process
    finally:
        process.kill()
        process.wait()
        os.kill(child, signal.SIGKILL)


def test_run_lock_names_its_holder_and_ends_with_its_process(held: tuple[Path, subprocess.Popen[str]]) -> None:
    run, process = held
    with pytest.raises(ZooError) as caught, sole_writer(run / ".." / "run", command="rlhf-zoo sft toy"):
        pass
    told = json.loads((run / LOCK).read_text())
    assert str(caught.value) == (
        f"Another command, `rlhf-zoo ppo elsewhere` (process {process.pid} on {told['host']}, since {told['since']}), "
        f"writes into {run / '..' / 'run'}: wait until it has ended, or choose another directory."
    )
    process.kill()
    process.wait()
    with sole_writer(run, command="rlhf-zoo sft toy"):
        assert json.loads((run / LOCK).read_text())["pid"] == os.getpid()


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["rlhf-zoo", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_every_writing_command_is_rejected_on_locked_run(
    held: tuple[Path, subprocess.Popen[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    from rlhf_zoo.hub.client import connect
    from rlhf_zoo.pipeline import policy_eval as policies
    from rlhf_zoo.pipeline.inspect import reproduce

    run, _ = held
    recipe = str(make_recipe(tmp_path))
    save_start(tmp_path)
    published = SimpleNamespace(title="x", step=1)
    monkeypatch.setattr(reproduce, "fetch_published", lambda *_: published)
    monkeypatch.setattr(reproduce, "recipe_of", lambda *_: (Recipe("toy", tmp_path, {}, {}), {}))
    monkeypatch.setattr(policies, "find_pair", lambda *_, **__: None)
    monkeypatch.setattr(
        connect, "connect", lambda hub, _: contextlib.nullcontext(hub)
    )  # the real one wants a process of its own
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    where = ["--output_dir", str(run), "--hub", NOWHERE]
    for command in (
        *([name, recipe, *where] for name in ("run", "sft", "reward", "ppo", "eval")),
        ["ablate", recipe, "--kl_coef", "0,0.1", *where],
        ["ensemble", recipe, *where],
        ["baseline", recipe, "--method", "dpo", *where],
        ["card", str(run)],
        ["card", str(run / "sft")],
        ["push", str(run), "--hub", NOWHERE],
        ["push", str(run / "reward"), "--hub", NOWHERE],
        ["eval", "local/some-policy", "--against", "local/other", *where],
        ["reproduce", "local/some-policy", *where],
    ):
        code, said = main(monkeypatch, *command), capsys.readouterr().err
        assert code == 2 and f"writes into {run}: wait until" in said, (command, said)
        assert "Traceback" not in said
    # A run that is part of another trains its first stages there.
    part = run / "ablation" / "kl-coef-0"
    part.mkdir(parents=True)
    (part / "ablation.json").write_text(json.dumps({"schema": 1, "variant": "kl-coef-0", "base": "../.."}))
    StageRecord(part / "ppo").write(stage="ppo", recipe="toy")
    assert main(monkeypatch, "push", str(part), "--hub", NOWHERE) == 2
    assert "writes into" in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_run_lock_is_reentrant_across_threads(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    seen = []

    def again() -> None:
        with sole_writer(run, command="again"):
            seen.append((run / LOCK).is_file())

    with sole_writer(run, command="first"), sole_writer(run / "ensemble" / "seed-2", command="part"):
        threads = [threading.Thread(target=again) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (run / LOCK).is_file()
    assert seen == [True] * 8
    assert list(tmp_path.iterdir()) == [], "what wrote nothing leaves nothing"
    (run / "sft").mkdir(parents=True)
    with sole_writer(run, command="first"):
        pass
    assert [path.name for path in run.iterdir()] == ["sft"]


def test_run_lock_rejects_directories_that_cannot_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    said = r"/proc/nowhere/run cannot be locked against other commands \(.*\): choose"
    with pytest.raises(ZooError, match=said), sole_writer(Path("/proc/nowhere/run"), command="x"):
        pass

    for number in (errno.ENOLCK, errno.ENOSYS):

        def refused(*_: Any, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", refused)
        with pytest.raises(ZooError, match="on a file system with locks"), sole_writer(tmp_path / "run", command="x"):
            pass


def test_multiple_processes_without_launcher_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    recipe = str(make_recipe(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "2")
    arguments = (recipe, "--output_dir", str(tmp_path / "run"), "--hub", NOWHERE)
    assert main(monkeypatch, "sft", *arguments) == 2
    assert "RANK is not set: start the processes with `accelerate launch`" in capsys.readouterr().err
    assert main(monkeypatch, "sweep", *arguments, "--grid", "kl_coef=0.1") == 2
    said = capsys.readouterr().err
    assert said.startswith("Error: WORLD_SIZE is 2, but this command runs in one process: start it without torchrun")
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("WORLD_SIZE", "1")
    with sole_writer(tmp_path / "run", command="x"):
        pass
