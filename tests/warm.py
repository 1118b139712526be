"""`python warm.py ARGUMENTS` does what `python ARGUMENTS` does, without the seconds that imports take.

It asks a server for a fork; the first caller starts the server, which has imported everything and runs no thread. The
fork has the caller's open files, working directory and environment, receives its signals, and decides its exit code.
The server ends with the process WARM_OWNER.
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
START_SECONDS = 300  # on a busy machine, importing everything takes minutes


# The caller


def call(arguments: list[str]) -> None:
    address = os.environ["WARM_SOCKET"]
    connection = _connected(address)
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
    # Only the fork keeps the output open, so a reader gets its end when the fork ends, even if this process is killed.
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    status = int(answers.readline())
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def _connected(address: str) -> socket.socket:
    with open(f"{address}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return _connect(address)
        except (FileNotFoundError, ConnectionRefusedError):
            pass
        with open(f"{address}.log", "wb") as log:
            server = subprocess.Popen(
                [sys.executable, os.path.abspath(__file__), "--serve", address, os.environ["WARM_OWNER"]],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/",
            )  # fmt: skip
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                return _connect(address)
            except (FileNotFoundError, ConnectionRefusedError):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the warm server did not start: see {address}.log") from None
                time.sleep(0.05)


def _connect(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


# The server


def serve(address: str, owner: int) -> None:
    _import_everything()
    disable_fsync()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    callers: dict[int, socket.socket] = {}  # pidfd of the child -> connection of its caller
    children: dict[int, int] = {}  # pidfd of the child -> its process id
    owner_fd = os.pidfd_open(owner)
    while True:
        ready, _, _ = select.select([listener, owner_fd, *children, *callers.values()], [], [])
        if owner_fd in ready:
            for child in children.values():
                os.kill(child, signal.SIGKILL)
            os._exit(0)
        for source in ready:
            if source is listener:
                connection, _ = listener.accept()
                child = _fork(connection, [listener, *callers.values()])
                callers[child_fd := os.pidfd_open(child)], children[child_fd] = connection, child
            elif isinstance(source, int) and source in children:
                _, status = os.waitpid(children.pop(source), 0)
                os.close(source)
                with callers.pop(source) as connection:
                    _send_number(connection, status)
            else:  # the caller was killed
                for child_fd, connection in callers.items():
                    if connection is source and not connection.recv(1):
                        signal.pidfd_send_signal(child_fd, signal.SIGKILL)


def _send_number(connection: socket.socket, number: int) -> None:
    try:
        connection.sendall(f"{number}\n".encode())
    except BrokenPipeError:  # the caller was killed in the meantime
        return


def _import_everything() -> None:
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


def _fork(connection: socket.socket, sockets: list[socket.socket]) -> int:
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    request = json.loads(connection.makefile().readline())
    child = os.fork()
    if child:
        for descriptor in descriptors:
            os.close(descriptor)
        _send_number(connection, child)
        return child
    status = 1
    try:
        for inherited in [connection, *sockets]:
            inherited.close()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        status = _run(request["arguments"], request["cwd"], request["environment"])
    finally:
        os._exit(status)


class NoFigure(Exception):
    """Raised instead of making a figure, once a plot is known to have enough data."""


def skip_drawing(*, figures: bool = False) -> None:
    """Makes cards save a hash of each plot's data instead of the plot: drawing takes most of a card's time.

    figures: Whether to lay the figures out nevertheless, without drawing them.
    """
    from contextlib import suppress
    from hashlib import sha256
    from inspect import signature
    from types import FunctionType

    from rlhf_zoo.fileio import write_bytes

    def save(path: Any, content: object = None) -> bool:
        write_bytes(path, b"\x89PNG" + sha256(repr((path.name, content)).encode()).digest())
        return True

    def no_figure(*_: Any, **__: Any) -> Any:
        raise NoFigure

    # The functions get these names in a copy of their globals: experiments share `new_figure`, and need its figures.
    stand_ins = {"save": lambda figure, path: True} | ({} if figures else {"new_figure": no_figure})

    def hashed(plot: Any) -> Any:
        has_data: Any = FunctionType(plot.__code__, plot.__globals__ | stand_ins)
        has_data.__kwdefaults__ = plot.__kwdefaults__

        def save_hash(*values: Any, **options: Any) -> bool:
            arguments = signature(plot).bind(*values, **options).arguments
            with suppress(NoFigure):
                if not has_data(**arguments):
                    return False
            path = arguments.pop("path")
            return save(path, {name: _without_times(value) for name, value in arguments.items()})

        return save_hash

    for module, name in plot_functions():
        setattr(module, name, hashed(getattr(module, name)))
        module.save = lambda figure, path: save(path)


def _without_times(rows: Any) -> Any:
    """Removes the times of steps from log rows: no plot shows them, and they differ between equal runs."""
    from rlhf_zoo.runs.metrics_file import without_times

    return [without_times(row) if isinstance(row, dict) else row for row in rows] if isinstance(rows, list) else rows


def plot_functions() -> list[tuple[Any, str]]:
    """Module and name of each function that draws a plot."""
    from rlhf_zoo.publishing import plots, reward_plots

    return [(module, name) for module in (plots, reward_plots) for name in vars(module) if name.startswith("plot_")]


def reduce_resamples() -> None:
    """Computes intervals at equal length from 50 resamples instead of 1000: each resample is a fit."""
    from rlhf_zoo.evaluation.length_control import length_controlled_win_rate

    length_controlled_win_rate.__kwdefaults__["resamples"] = 50


def disable_fsync() -> None:
    """Turns `os.fsync` off, which only protects against a power cut; tests only kill processes."""
    os.fsync = lambda descriptor: None


def keep_traces(folder: str) -> None:
    """Caches the planner's traces in `folder` for all commands of a test run: a trace takes seconds."""
    from hashlib import sha256
    from pathlib import Path

    from rlhf_zoo.fileio import write_bytes
    from rlhf_zoo.pipeline.plan.tracing import Tracer

    trace = Tracer._extrapolate

    def cached_trace(self: Any, key: tuple[Any, ...], run: Any) -> list[int]:
        path = Path(folder, sha256(repr((self.spec, self.depth, key)).encode()).hexdigest())
        if not path.is_file():
            write_bytes(path, json.dumps(trace(self, key, run)).encode())
        return json.loads(path.read_bytes())

    Tracer._extrapolate = cached_trace


def _text(descriptor: int, **options: Any) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False)), **options)


def _run(arguments: list[str], cwd: str, environment: dict[str, str]) -> int:
    """Runs `python ARGUMENTS` (-c CODE, -m MODULE or FILE) in this process. Returns the exit code."""
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
    # The new text layers find out whether each descriptor is a file, a pipe or a terminal.
    sys.stdin, sys.stdout = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False))), _text(1)
    sys.stderr = _text(2, line_buffering=True, errors="backslashreplace")
    reload_clients()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[:0] = ["", *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    if "WARM_QUICK" in environment:
        skip_drawing(figures=environment["WARM_QUICK"] == "figures")
        reduce_resamples()
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
