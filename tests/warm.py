"""`python warm.py ARGUMENTS` does what `python ARGUMENTS` does, without the seconds that the stack takes to import.

It asks a server, which the first caller starts, for a fork: the server has imported everything and runs no thread, so
a fork is as good as a process of its own. The fork has the caller's files, folder, environment and signals, and the
caller ends as the fork does. The server ends with the process that WARM_OWNER names.
"""

import fcntl
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import Any

PYTHON = [sys.executable, "-IS", os.path.abspath(__file__)]
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
START_SECONDS = 120


# The caller


def call(arguments: list[str]) -> None:
    place = os.environ["WARM_SOCKET"]
    connection = _connected(place)
    child = 0

    def forward(number: int, _: Any) -> None:
        if child:
            os.kill(child, number)

    request = {"arguments": arguments, "cwd": os.getcwd(), "environment": dict(os.environ)}
    socket.send_fds(connection, [b"x"], [0, 1, 2])
    connection.sendall(json.dumps(request).encode() + b"\n")
    answers = connection.makefile()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    child = int(answers.readline())
    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # The fork alone holds its output: who reads it learns of its end when it ends, even if this process is killed.
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    status = int(answers.readline())
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def _connected(place: str) -> socket.socket:
    with open(f"{place}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return _connect(place)
        except (FileNotFoundError, ConnectionRefusedError):
            pass
        with open(f"{place}.log", "wb") as log:
            server = subprocess.Popen(
                [sys.executable, os.path.abspath(__file__), "--serve", place, os.environ["WARM_OWNER"]],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/",
            )  # fmt: skip
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                return _connect(place)
            except (FileNotFoundError, ConnectionRefusedError):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{place} is not served: see {place}.log") from None
                time.sleep(0.05)


def _connect(place: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(place)
    except BaseException:
        connection.close()
        raise
    return connection


# The server


def serve(place: str, owner: int) -> None:
    _import_the_stack()
    no_flushes()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen(64)
    callers: dict[int, socket.socket] = {}  # by what select watches: a pidfd or the connection itself
    children: dict[int, int] = {}
    alive = os.pidfd_open(owner)
    while True:
        ready, _, _ = select.select([listener, alive, *children, *callers.values()], [], [])
        if alive in ready:
            for child in children.values():
                os.kill(child, signal.SIGKILL)
            os._exit(0)
        for one in ready:
            if one is listener:
                connection, _ = listener.accept()
                child = _fork(connection, [listener, *callers.values()])
                callers[watch := os.pidfd_open(child)], children[watch] = connection, child
            elif isinstance(one, int) and one in children:
                _, status = os.waitpid(children.pop(one), 0)
                os.close(one)
                with callers.pop(one) as connection:
                    _tell(connection, status)
            else:  # the caller was killed
                for watch, connection in callers.items():
                    if connection is one and not connection.recv(1):
                        signal.pidfd_send_signal(watch, signal.SIGKILL)


def _tell(connection: socket.socket, number: int) -> None:
    try:
        connection.sendall(f"{number}\n".encode())
    except BrokenPipeError:  # killed in the meantime
        return


def _import_the_stack() -> None:
    import gc
    import importlib
    import pkgutil

    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import rlhf_zoo

    for module in pkgutil.walk_packages(rlhf_zoo.__path__, "rlhf_zoo."):
        if module.name != "rlhf_zoo.cli.main" and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in (
        "evaluate", "gradio", "huggingface_hub.hf_api", "matplotlib.pyplot", "peft.tuners.lora", "scipy.stats",
        "sklearn.linear_model", "sklearn.feature_extraction.text", "tensorboard", "torch.utils.tensorboard",
        "transformers.models.auto.modeling_auto", "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3", "transformers.trainer",
        "trl.trainer.reward_trainer", "trl.trainer.sft_trainer",
    ):  # fmt: skip
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _fork(connection: socket.socket, others: list[socket.socket]) -> int:
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    request = json.loads(connection.makefile().readline())
    child = os.fork()
    if child:
        for descriptor in descriptors:
            os.close(descriptor)
        _tell(connection, child)
        return child
    status = 1
    try:
        for other in [connection, *others]:
            other.close()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        status = _run(request["arguments"], request["cwd"], request["environment"])
    finally:
        os._exit(status)


class NoFigure(Exception):
    """A plot has data, and its figure is left out."""


def quick_pictures(*, figures: bool = False) -> None:
    """From now on a plot is saved as its numbers: to draw them is most of a card's time.

    figures: whether the plots of cards lay out their figures all the same, which is half of the rest.
    """
    from functools import wraps
    from hashlib import sha256
    from threading import Lock
    from unittest import mock

    from rlhf_zoo.fileio import write_bytes
    from rlhf_zoo.publishing import plots

    one_at_a_time = Lock()  # a run's cards are made in two threads

    def write(path: Any, numbers: bytes) -> bool:
        return not write_bytes(path, b"\x89PNG" + path.name.encode() + sha256(numbers).digest())

    def save(figure: Any, path: Any) -> bool:
        numbers = [line.get_xydata().tobytes() for axes in figure.axes for line in axes.lines]
        return write(path, b"".join(numbers))

    def as_numbers(plot: Any) -> Any:
        @wraps(plot)
        def plotted(*data: Any, path: Any, **options: Any) -> bool:
            no_figure = {} if figures else {"new_figure": mock.Mock(side_effect=NoFigure)}
            with one_at_a_time, mock.patch.multiple(plots, _save=lambda figure, path: True, **no_figure):
                try:
                    has_data = plot(*data, path=path, **options)
                except NoFigure:
                    has_data = True
            return has_data and write(path, repr(([_without_times(rows) for rows in data], options)).encode())

        return plotted

    plots._save = save
    for name in plot_names():
        setattr(plots, name, as_numbers(getattr(plots, name)))


def _without_times(rows: Any) -> Any:
    """The rows of a log without how long their steps took, which no plot shows and no two runs share."""
    from rlhf_zoo.runs.metrics_file import without_times

    return [without_times(row) if isinstance(row, dict) else row for row in rows] if isinstance(rows, list) else rows


def plot_names() -> list[str]:
    """The functions that draw the plots of cards; those of experiments are imported by name and stay."""
    from rlhf_zoo.publishing import plots

    experiments = {"plot_ablation", "plot_ensemble", "plot_frontier", "plot_win_rates"}
    return [name for name in vars(plots) if name.startswith("plot_") and name not in experiments]


def few_refits() -> None:
    """From now on an interval at equal length is of 50 resamples, each of which is a fit, and not of 1000."""
    from rlhf_zoo.evaluation.length_control import length_controlled_win_rate

    length_controlled_win_rate.__kwdefaults__["resamples"] = 50


def no_flushes() -> None:
    """From now on the kernel writes files when it likes: tests kill processes, and none cuts the power."""
    os.fsync = lambda descriptor: None


def keep_traces(folder: str) -> None:
    """From now on commands of one test run share what the planner traced: seconds for each of them."""
    from hashlib import sha256
    from pathlib import Path

    from rlhf_zoo.fileio import write_bytes
    from rlhf_zoo.pipeline.plan.tracing import Tracer

    trace = Tracer._at_depth

    def kept(self: Any, key: tuple[Any, ...], run: Any) -> list[int]:
        path = Path(folder, sha256(repr((self.spec, self.depth, key)).encode()).hexdigest())
        if not path.is_file():
            write_bytes(path, json.dumps(trace(self, key, run)).encode())
        return json.loads(path.read_bytes())

    Tracer._at_depth = kept


def _text(descriptor: int, **options: Any) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False)), **options)


def _run(arguments: list[str], cwd: str, environment: dict[str, str]) -> int:
    """What `python ARGUMENTS` does: -c CODE, -m MODULE or FILE. Returns the exit code."""
    import atexit
    import runpy
    import tempfile
    import threading
    import traceback

    from rlhf_zoo.hub.client.connect import reload_clients

    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    # The text layer over a descriptor knows whether that was a file or a pipe.
    sys.stdin, sys.stdout = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False))), _text(1)
    sys.stderr = _text(2, line_buffering=True, errors="backslashreplace")
    reload_clients()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[:0] = ["", *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    if "WARM_QUICK" in environment:
        quick_pictures(figures=environment["WARM_QUICK"] == "figures")
        few_refits()
        keep_traces(f"{environment['WARM_SOCKET']}.traces")
    status = 0
    try:
        if arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            main = sys.modules["__main__"] = type(sys)("__main__")
            exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
        elif arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        status = 130
    except BaseException:
        traceback.print_exc()
        status = 1
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        status = status or 120
    return status & 0xFF


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        sys.path.pop(0)
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        call(sys.argv[1:])
