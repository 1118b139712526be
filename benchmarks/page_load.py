"""Lets many visitors use the comparison page at once; measures their waiting times and the server's CPU and memory.

    python benchmarks/page_load.py                                     # toy models, 20 visitors, 60 s
    python benchmarks/page_load.py --visitors 5 --seconds 20 --json figures.json

Each visitor is a session that acts with pauses of up to a second. It sends the requests of Gradio's own front end
(tests/page_client.py), and repeats none. Seconds count from the request and include the wait in the queue. "first
token" is the first update with a token, or the end of the request if no token was written. Failures are: an error
message of the page instead of an answer, a full queue, a vote that is not stored, and a traceback in the server's log.

The script prints a table on stderr, and JSON on stdout or into --json. The exit code is 1 if any request failed.
Visitors and server share the machine, so the CPU seconds of both are given.
"""

import argparse
import json
import math
import random
import re
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "e2e")]

import warm  # noqa: E402
from page_client import Event, PageClient, Update  # noqa: E402

# The tests' fixtures start forks of a warm server. Here a page is a process, so its pid, memory and CPU are its own.
warm.PYTHON = [sys.executable]

# Visitors -----------------------------------------------------------------------------------------------------------

PROMPTS = ["the battery is", "the camera", "the screen is bright and", "it is heavy but the price", "<b>bold</b> sound"]
TOKEN = re.compile(r'class="completion">(?!</span>)')
"""Matches a token that a model wrote, in an output's HTML."""
ERROR_MESSAGE = re.compile(r'role="alert"[^>]*>(.*?)</', re.S)
"""Matches an error message, in any output's HTML."""


def draw_comparison(rng: random.Random) -> dict[str, Any]:
    """Draws a prompt and the settings of a comparison, by elem_id."""
    return {
        "prompt": rng.choice(PROMPTS),
        "temperature": rng.choice([0.7, 0.9, 1.0, 1.2]),
        "tokens": rng.randint(4, 24),
        "seed": rng.randrange(10**6),
    }


@dataclass(frozen=True)
class Action:
    """An action of a visitor on the page.

    Attributes:
        elem_ids: The components, of which an enabled one is chosen at random.
        event: The component's event.
        values: Draws the values to set before, by elem_id.
        weight: The relative frequency.
        after: The action that it always follows, and without which it never happens.
        streams: Whether a model writes tokens, so the time to the first one is measured.
        vote: Whether the server must store something.
    """

    elem_ids: tuple[str, ...]
    event: str = "click"
    values: Callable[[random.Random], dict[str, Any]] = lambda rng: {}
    weight: float = 1.0
    after: str | None = None
    streams: bool = True
    vote: bool = False


VOTE_BUTTONS = ("vote-left", "vote-right", "vote-tie", "vote-both-bad")
ACTIONS = {
    "compare": Action(("compare",), values=draw_comparison, weight=4),
    "step": Action(("step",), "input", lambda rng: {"step": rng.choice([10, 20, 40])}, weight=2),
    "pair": Action(("blind-new",), weight=2),
    "vote": Action(VOTE_BUTTONS, after="pair", streams=False, vote=True),
}
"""Visitors skip an action if the page lacks one of its components; the report lists these actions."""
VOTES = "local/toy-votes"


def count_stored_votes(hub: Any) -> int:
    """Counts the votes in the data set of the page that this script started."""
    code = f"from rlhf_zoo.evaluation.votes.data import HubVotes\nprint(len(HubVotes({VOTES!r}).read()))"
    return int(hub.python(code))


# Measurements -------------------------------------------------------------------------------------------------------

REQUEST_TIMEOUT = 120.0  # seconds; a request that takes longer has failed
MAX_PAUSE = 1.0


@dataclass
class Figures:
    """The figures of one action. Seconds only count successful requests."""

    requests: int = 0
    queue_full: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    first: list[float] = field(default_factory=list)
    finished: list[float] = field(default_factory=list)
    updates: int = 0
    received: int = 0
    rank: int = 0

    @property
    def failed(self) -> int:
        return self.queue_full + sum(self.errors.values())

    def add(self, action: Action, event: Event) -> None:
        self.requests += 1
        self.updates += len(event.updates)
        self.received += event.received
        self.rank = max([self.rank, *event.ranks])
        if event.queue_full:
            self.queue_full += 1
        elif (error := event.error or page_error(event)) is not None:
            self.errors[error] += 1
        elif not event.updates:
            self.errors["The server ended the request without an answer."] += 1
        else:
            assert event.seconds is not None
            self.finished.append(event.seconds)
            if action.streams:
                self.first.append(
                    next((update.seconds for update in event.updates if has_token(update)), event.seconds)
                )

    def to_json(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "queue_full": self.queue_full,
            "errors": dict(self.errors.most_common()),
            "first_token_seconds": summarize(self.first),
            "finished_seconds": summarize(self.finished),
            "updates_per_request": self.updates / self.requests if self.requests else 0.0,
            "bytes_per_request": self.received / self.requests if self.requests else 0.0,
            "last_place_in_the_queue": self.rank,
        }


def summarize(seconds: list[float]) -> dict[str, float] | None:
    """Returns the median, the 95th percentile and the maximum; None without values."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return {
        "median": statistics.median(ordered),
        "p95": ordered[math.ceil(0.95 * len(ordered)) - 1],
        "max": ordered[-1],
    }


def has_token(update: Update) -> bool:
    return any(isinstance(value, str) and TOKEN.search(value) for value in update.values.values())


def page_error(event: Event) -> str | None:
    """Returns the page's error message, if it gave one instead of an answer."""
    for value in event.values.values():
        if isinstance(value, str) and (result := ERROR_MESSAGE.search(value)):
            return re.sub(r"<[^>]*>", "", result[1])
    return None


class Load:
    """Runs visitors in threads, and collects the figures of their actions."""

    def __init__(self, url: str, *, visitors: int, seconds: float) -> None:
        self._url, self._seconds = url, seconds
        self._lock = threading.Lock()
        with PageClient(url, patience=REQUEST_TIMEOUT) as client:
            available = {name for name, action in ACTIONS.items() if all(map(client.has, action.elem_ids))}
        self.figures = {name: Figures() for name in ACTIONS if name in available}
        self.left_out = sorted(set(ACTIONS) - available)
        self.broken: Counter[str] = Counter()
        """How many visitors could not go on, by error."""
        self.votes = 0
        self._start = time.monotonic()
        self._threads = [threading.Thread(target=self._visit, args=(seed,), daemon=True) for seed in range(visitors)]

    @property
    def requests(self) -> int:
        return sum(figures.requests for figures in self.figures.values())

    @property
    def failed(self) -> int:
        return sum(figures.failed for figures in self.figures.values()) + sum(self.broken.values())

    def run(self, watch: Callable[[], None]) -> float:
        """Runs all visitors and returns the seconds that they took. Calls `watch` a few times a second."""
        self._start = time.monotonic()
        for thread in self._threads:
            thread.start()
        while any(thread.is_alive() for thread in self._threads):
            watch()
            time.sleep(0.2)
        return time.monotonic() - self._start

    def _visit(self, seed: int) -> None:
        rng = random.Random(seed)
        names = [name for name in self.figures if ACTIONS[name].after is None]
        try:
            time.sleep(rng.uniform(0, MAX_PAUSE))
            with PageClient(self._url, patience=REQUEST_TIMEOUT) as client:
                client.load()
                while time.monotonic() - self._start < self._seconds:
                    (name,) = rng.choices(names, [ACTIONS[action].weight for action in names])
                    is_answered = self._act(client, name, rng)
                    time.sleep(rng.uniform(0, MAX_PAUSE))
                    for follower in self.figures:
                        if is_answered and ACTIONS[follower].after == name:
                            self._act(client, follower, rng)
                            time.sleep(rng.uniform(0, MAX_PAUSE))
        except Exception as error:
            with self._lock:
                self.broken[f"{type(error).__name__}: {error}"] += 1

    def _act(self, client: PageClient, name: str, rng: random.Random) -> bool:
        """Performs an action. Returns whether the page answered."""
        action, figures = ACTIONS[name], self.figures[name]
        enabled = [elem_id for elem_id in action.elem_ids if client.prop(elem_id, "interactive") is not False]
        if not enabled:
            raise RuntimeError(f"No button of {name!r} is enabled.")
        event = client.fire(rng.choice(enabled), action.event, **action.values(rng))
        with self._lock:
            failed_before = figures.failed
            figures.add(action, event)
            is_answered = figures.failed == failed_before
            self.votes += action.vote and is_answered
        return is_answered


# The server -----------------------------------------------------------------------------------------------------------


class Server:
    """Measures memory and CPU of the server's process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peak = 0

    def watch(self) -> None:
        """Updates the peak memory on systems whose kernel does not record it."""
        if not Path(f"/proc/{self._pid}/status").exists():
            self._peak = max(self._peak, psutil.Process(self._pid).memory_info().rss)

    def peak_bytes(self) -> int:
        """Returns the peak resident memory since the process started."""
        status = Path(f"/proc/{self._pid}/status")
        if status.exists() and (result := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
            return int(result[1]) * 1024
        return self._peak

    def cpu_seconds(self) -> float:
        """Returns the CPU seconds, user and kernel, since the process started."""
        times = psutil.Process(self._pid).cpu_times()
        return times.user + times.system


@contextmanager
def toy_hub(folder: Path) -> Iterator[Any]:
    """Starts an embedded Hub with the tests' toy models, and stops it at the end of the context."""
    from hub_fixture import start_hub
    from page_fixture import publish
    from toy_models import save_toys

    hub = start_hub(folder / "server")
    try:
        publish(hub, save_toys(folder / "toys"))
        yield hub
    finally:
        hub.stop()


# The report -----------------------------------------------------------------------------------------------------------


def measure(url: str, *, pid: int, visitors: int, seconds: float, console: Console) -> tuple[Load, dict]:
    load, server = Load(url, visitors=visitors, seconds=seconds), Server(pid)
    server_before, before = server.cpu_seconds(), time.process_time()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"{visitors} visitors", total=seconds)
        start = time.monotonic()

        def watch() -> None:
            server.watch()
            text = f"{visitors} visitors, {load.requests} requests, {load.failed} failed"
            progress.update(task, completed=min(time.monotonic() - start, seconds), description=text)

        duration = load.run(watch)
    server_seconds = server.cpu_seconds() - server_before
    return load, {
        "visitors": visitors,
        "seconds": duration,
        "requests": load.requests,
        "requests_per_second": load.requests / duration,
        "failed": load.failed,
        "broken_visitors": dict(load.broken),
        "left_out": load.left_out,
        "actions": {name: action.to_json() for name, action in load.figures.items() if action.requests},
        "server_peak_bytes": server.peak_bytes(),
        "server_cpu_seconds": server_seconds,
        "server_cpu_seconds_per_request": server_seconds / load.requests if load.requests else None,
        "visitors_cpu_seconds": time.process_time() - before,
    }


def print_report(figures: dict[str, Any], console: Console) -> None:
    table = Table(
        title=f"{figures['visitors']} visitors, {figures['seconds']:.1f} s, {figures['requests_per_second']:.2f} "
        "requests per second",
        caption="seconds: median/95%/longest; updates and kB: a request's mean",
        box=box.SIMPLE,
        pad_edge=False,
    )
    heads = ["", "requests", "errors", "full", "first token, s", "finished, s", "updates", "kB"]
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left", no_wrap=True)
    for name, action in figures["actions"].items():
        seconds = [
            "–" if action[key] is None else "/".join(f"{value:.2f}" for value in action[key].values())
            for key in ("first_token_seconds", "finished_seconds")
        ]
        counts = [action["requests"], sum(action["errors"].values()), action["queue_full"]]
        means = [f"{action['updates_per_request']:.1f}", f"{action['bytes_per_request'] / 1000:.1f}"]
        table.add_row(name, *map(str, counts), *seconds, *means)
    console.print(table)
    console.print(
        f"Server: {figures['server_cpu_seconds']:.1f} CPU seconds, "
        f"{1000 * (figures['server_cpu_seconds_per_request'] or 0):.0f} ms per request; "
        f"peak memory {figures['server_peak_bytes'] / 2**20:.0f} MiB. "
        f"Visitors: {figures['visitors_cpu_seconds']:.1f} CPU seconds."
    )
    if (votes := figures["votes"])["sent"]:
        console.print(f"Votes: {votes['sent']} sent, {votes['stored']} stored.")
    for name, action in figures["actions"].items():
        for message, times in action["errors"].items():
            console.print(f"{name}: {times} times: {message}", markup=False)
    for message, times in figures["broken_visitors"].items():
        console.print(f"{times} visitors gave up: {message}", markup=False)
    if figures["left_out"]:
        console.print(f"The page lacks components of: {', '.join(figures['left_out'])}.")
    if figures["server_said"]:
        console.print(f"The server ended with an error:\n{figures['server_said']}", markup=False)


def main() -> int:
    """Runs the script. Returns 1 if any request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--visitors", type=int, default=20, help="number of simultaneous visitors (default: 20)")
    parser.add_argument("--seconds", type=float, default=60, help="duration (default: 60)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here (default: to stdout)")
    options = parser.parse_args()
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 100)
    settings = {"visitors": options.visitors, "seconds": options.seconds, "console": console}
    load, stored, message = None, None, None
    from page_fixture import PPO, serve

    with tempfile.TemporaryDirectory() as folder, toy_hub(Path(folder)) as hub:
        try:
            # All visitors share an address, whose votes per hour are limited by default.
            flags = ["--port", "0", "--votes", VOTES, "--votes_per_hour", "1000000"]
            with serve(hub, Path(folder) / "page.log", PPO, *flags) as page:
                load, figures = measure(page.url, pid=page.process.pid, **settings)
        except AssertionError as error:  # `serve` checks the page's output and exit code
            message = str(error)
            if load is None:
                raise SystemExit(f"The page did not start:\n{message}") from None
        if load.votes:
            stored = count_stored_votes(hub)
    figures |= {"votes": {"sent": load.votes, "stored": stored}, "server_said": message}
    print_report(figures, console)
    text = json.dumps(figures, indent=1)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    else:
        print(text)
    has_lost_votes = stored is not None and stored != load.votes
    return 1 if load.failed or message or has_lost_votes or not load.requests else 0


if __name__ == "__main__":
    sys.exit(main())
