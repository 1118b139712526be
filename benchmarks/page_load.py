"""Visitors of the comparison page at the same time: what they wait for, and what the server needs.

    python benchmarks/page_load.py                                     # a page of its own with toy models: 20, for 60 s
    python benchmarks/page_load.py --visitors 5 --seconds 20 --json figures.json
    python benchmarks/page_load.py http://127.0.0.1:7860 --pid 4242    # a page that runs, as process 4242

Each visitor is one session that does one thing after another, a pause of up to a second between two, by the requests
that Gradio's own front end makes (tests/page_client.py); no request is tried twice. Seconds count from the request.
"first token" is the first answer that shows one, or the end where no token was written; it includes the wait in the
queue. A message of the page in the place of an answer, a full queue, a vote that is not stored and a traceback in the
server's log are failures.

Prints a table on stderr, and JSON on stdout or into --json. Exit code 1 if any request failed. Visitors and server
share the machine: the CPU seconds of both are given, and a request's share of the server's.
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

from page_client import Event, PageClient, Update  # noqa: E402

# What a visitor does ------------------------------------------------------------------------------------------------

PROMPTS = ["the battery is", "the camera", "the screen is bright and", "it is heavy but the price", "<b>bold</b> sound"]
TOKEN = re.compile(r'class="new">(?!</span>)')
"""In an output's HTML: a token that a model wrote."""
COMPLAINT = re.compile(r'role="alert"[^>]*>(.*?)</', re.S)
"""In any output's HTML: what the page says when it cannot answer."""


def drawn(chance: random.Random) -> dict[str, Any]:
    """A prompt and the settings of one comparison, by elem_id."""
    return {
        "prompt": chance.choice(PROMPTS),
        "temperature": chance.choice([0.7, 0.9, 1.0, 1.2]),
        "tokens": chance.randint(4, 24),
        "seed": chance.randrange(10**6),
    }


@dataclass(frozen=True)
class Action:
    """An event of the component `elem_id` (of several, one that is not greyed out), with values by elem_id, drawn anew.

    weight: how often, relative to the others. after: done only, and at once, after that other action. streams: tokens
    are written, so that there is a first one. vote: what the server took without an error must be stored.
    """

    elem_id: str | tuple[str, ...]
    event: str = "click"
    values: Callable[[random.Random], dict[str, Any]] = lambda chance: {}
    weight: float = 1.0
    after: str | None = None
    streams: bool = True
    vote: bool = False

    @property
    def elem_ids(self) -> tuple[str, ...]:
        return (self.elem_id,) if isinstance(self.elem_id, str) else self.elem_id


VOTES = ("vote-left", "vote-right", "vote-tie", "vote-both-bad")
ACTIONS = {
    "compare": Action("compare", values=drawn, weight=4),
    "step": Action("step", "input", lambda chance: {"step": chance.choice([10, 20, 40])}, weight=2),
    "pair": Action("blind-new", weight=2),
    "vote": Action(VOTES, after="pair", streams=False, vote=True),
}
"""A page that has not all of an action's components is spared it, and the report says so."""


STORE = "local/toy-votes"


def stored_votes(hub: Any) -> int:
    """Votes in the data set that the page started here keeps."""
    return int(
        hub.python(f"from rlhf_zoo.evaluation.votes.data import HubVotes\nprint(len(HubVotes({STORE!r}).read()))")
    )


# What is measured ---------------------------------------------------------------------------------------------------

PATIENCE = 120.0  # a request that takes longer failed
PAUSE = 1.0


@dataclass
class Figures:
    """Of one action; seconds are of requests without failure."""

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

    def note(self, action: Action, event: Event) -> None:
        self.requests += 1
        self.updates += len(event.updates)
        self.received += event.received
        self.rank = max([self.rank, *event.ranks])
        if event.queue_full:
            self.queue_full += 1
        elif (error := event.error or complaint(event)) is not None:
            self.errors[error] += 1
        elif not event.updates:
            self.errors["The server ended it without an answer."] += 1
        else:
            assert event.seconds is not None
            self.finished.append(event.seconds)
            if action.streams:
                self.first.append(next((one.seconds for one in event.updates if shows(one)), event.seconds))

    def to_json(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "queue_full": self.queue_full,
            "errors": dict(self.errors.most_common()),
            "first_token_seconds": spread(self.first),
            "finished_seconds": spread(self.finished),
            "updates_per_request": self.updates / self.requests if self.requests else 0.0,
            "bytes_per_request": self.received / self.requests if self.requests else 0.0,
            "last_place_in_the_queue": self.rank,
        }


def spread(seconds: list[float]) -> dict[str, float] | None:
    """Median, the smallest that 95% do not pass, and the longest; None of none."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return {
        "median": statistics.median(ordered),
        "p95": ordered[math.ceil(0.95 * len(ordered)) - 1],
        "max": ordered[-1],
    }


def shows(update: Update) -> bool:
    return any(isinstance(value, str) and TOKEN.search(value) for value in update.values.values())


def complaint(event: Event) -> str | None:
    """What the page says in the end instead of an answer."""
    for value in event.values.values():
        if isinstance(value, str) and (result := COMPLAINT.search(value)):
            return re.sub(r"<[^>]*>", "", result[1])
    return None


class Load:
    """Visitors in threads, and what came of everything they did."""

    def __init__(self, url: str, *, visitors: int, seconds: float) -> None:
        self._url, self._seconds = url, seconds
        self._lock = threading.Lock()
        with PageClient(url, patience=PATIENCE) as client:
            has = {name for name, action in ACTIONS.items() if all(map(client.has, action.elem_ids))}
        self.figures = {name: Figures() for name in ACTIONS if name in has}
        self.left_out = sorted(set(ACTIONS) - has)
        self.broken: Counter[str] = Counter()
        """Visitors that could not go on, by what happened to them."""
        self.votes = 0
        self._start = time.monotonic()
        self._threads = [threading.Thread(target=self._visit, args=(seed,), daemon=True) for seed in range(visitors)]

    @property
    def requests(self) -> int:
        return sum(one.requests for one in self.figures.values())

    @property
    def failed(self) -> int:
        return sum(one.failed for one in self.figures.values()) + sum(self.broken.values())

    def run(self, watch: Callable[[], None]) -> float:
        """Returns the seconds until the last visitor was answered; `watch` is called a few times a second."""
        self._start = time.monotonic()
        for thread in self._threads:
            thread.start()
        while any(thread.is_alive() for thread in self._threads):
            watch()
            time.sleep(0.2)
        return time.monotonic() - self._start

    def _visit(self, seed: int) -> None:
        chance = random.Random(seed)
        names = [name for name in self.figures if ACTIONS[name].after is None]
        try:
            time.sleep(chance.uniform(0, PAUSE))
            with PageClient(self._url, patience=PATIENCE) as client:
                client.load()
                while time.monotonic() - self._start < self._seconds:
                    (name,) = chance.choices(names, [ACTIONS[one].weight for one in names])
                    done = self._act(client, name, chance)
                    time.sleep(chance.uniform(0, PAUSE))
                    for follower in self.figures:
                        if done and ACTIONS[follower].after == name:
                            self._act(client, follower, chance)
                            time.sleep(chance.uniform(0, PAUSE))
        except Exception as error:
            with self._lock:
                self.broken[f"{type(error).__name__}: {error}"] += 1

    def _act(self, client: PageClient, name: str, chance: random.Random) -> bool:
        """Whether it was answered."""
        action, figures = ACTIONS[name], self.figures[name]
        open_ = [one for one in action.elem_ids if client.prop(one, "interactive") is not False]
        if not open_:
            raise RuntimeError(f"No button of {name!r} can be pressed.")
        event = client.fire(chance.choice(open_), action.event, **action.values(chance))
        with self._lock:
            failed = figures.failed
            figures.note(action, event)
            answered = figures.failed == failed
            self.votes += action.vote and answered
        return answered


# The server -----------------------------------------------------------------------------------------------------------


class Server:
    """A process whose memory and CPU are looked at; `pid` None knows neither."""

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self._peak = 0
        self._started = self.cpu_seconds()

    def watch(self) -> None:
        """Where the kernel keeps no peak, the largest of what was seen."""
        if self._pid is not None and not Path(f"/proc/{self._pid}/status").exists():
            self._peak = max(self._peak, psutil.Process(self._pid).memory_info().rss)

    def peak_bytes(self) -> int | None:
        """Resident memory at its largest, since the process began."""
        if self._pid is None:
            return None
        status = Path(f"/proc/{self._pid}/status")
        if status.exists() and (result := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
            return int(result[1]) * 1024
        return self._peak or None

    def cpu_seconds(self) -> float | None:
        """Of user and kernel, since the process began."""
        if self._pid is None:
            return None
        times = psutil.Process(self._pid).cpu_times()
        return times.user + times.system

    def used_seconds(self) -> float | None:
        """CPU seconds since this object was made."""
        now = self.cpu_seconds()
        return None if now is None or self._started is None else now - self._started


@contextmanager
def own_hub(folder: Path) -> Iterator[Any]:
    """An embedded Hub with the toy models of the tests, for the time of the context."""
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


def measure(url: str, *, pid: int | None, visitors: int, seconds: float, console: Console) -> tuple[Load, dict]:
    load, server = Load(url, visitors=visitors, seconds=seconds), Server(pid)
    before = time.process_time()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"{visitors} visitors", total=seconds)
        start = time.monotonic()

        def watch() -> None:
            server.watch()
            text = f"{visitors} visitors, {load.requests} requests, {load.failed} failed"
            progress.update(task, completed=min(time.monotonic() - start, seconds), description=text)

        took = load.run(watch)
    used = server.used_seconds()
    return load, {
        "visitors": visitors,
        "seconds": took,
        "requests": load.requests,
        "requests_per_second": load.requests / took,
        "failed": load.failed,
        "broken_visitors": dict(load.broken),
        "left_out": load.left_out,
        "actions": {name: one.to_json() for name, one in load.figures.items() if one.requests},
        "server_peak_bytes": server.peak_bytes(),
        "server_cpu_seconds": used,
        "server_cpu_seconds_per_request": used / load.requests if used is not None and load.requests else None,
        "visitors_cpu_seconds": time.process_time() - before,
    }


def report(figures: dict[str, Any], console: Console) -> None:
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
    for name, one in figures["actions"].items():
        seconds = [
            "–" if one[key] is None else "/".join(f"{value:.2f}" for value in one[key].values())
            for key in ("first_token_seconds", "finished_seconds")
        ]
        counts = [one["requests"], sum(one["errors"].values()), one["queue_full"]]
        means = [f"{one['updates_per_request']:.1f}", f"{one['bytes_per_request'] / 1000:.1f}"]
        table.add_row(name, *map(str, counts), *seconds, *means)
    console.print(table)
    if figures["server_cpu_seconds"] is not None:
        console.print(
            f"Server: {figures['server_cpu_seconds']:.1f} CPU seconds, "
            f"{1000 * (figures['server_cpu_seconds_per_request'] or 0):.0f} ms a request; "
            f"peak memory {(figures['server_peak_bytes'] or 0) / 2**20:.0f} MiB. "
            f"Visitors: {figures['visitors_cpu_seconds']:.1f} CPU seconds."
        )
    if (votes := figures["votes"])["sent"]:
        stored = "not known" if votes["stored"] is None else votes["stored"]
        console.print(f"Votes: {votes['sent']} sent, {stored} stored.")
    for name, one in figures["actions"].items():
        for message, times in one["errors"].items():
            console.print(f"{name}: {times} times: {message}", markup=False)
    for message, times in figures["broken_visitors"].items():
        console.print(f"{times} visitors gave up: {message}", markup=False)
    if figures["left_out"]:
        console.print(f"The page has not what these need: {', '.join(figures['left_out'])}.")
    if figures["server_said"]:
        console.print(f"The server did not end well:\n{figures['server_said']}", markup=False)


def main() -> int:
    """Entry point; 1 if any request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", help="a page that runs (default: one of its own, with toy models)")
    parser.add_argument("--visitors", type=int, default=20, help="at the same time (default: 20)")
    parser.add_argument("--seconds", type=float, default=60, help="for how long (default: 60)")
    parser.add_argument("--pid", type=int, help="the process of URL, for its memory and CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here (default: to stdout)")
    options = parser.parse_args()
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 100)
    settings = {"visitors": options.visitors, "seconds": options.seconds, "console": console}
    load, stored, message = None, None, None
    if options.url:
        try:
            load, figures = measure(options.url, pid=options.pid, **settings)
        except OSError as error:
            raise SystemExit(f"{options.url} is no page that answers: {error}") from None
    else:
        from page_fixture import PPO, serve

        with tempfile.TemporaryDirectory() as folder, own_hub(Path(folder)) as hub:
            try:
                flags = ["--port", "0", "--votes", STORE, "--votes_per_hour", "1000000"]  # all from this machine
                with serve(hub, Path(folder) / "page.log", PPO, *flags) as page:
                    load, figures = measure(page.url, pid=page.process.pid, **settings)
            except AssertionError as error:  # of what it printed, and of how it ended
                message = str(error)
                if load is None:
                    raise SystemExit(f"The page did not start:\n{message}") from None
            if load.votes:
                stored = stored_votes(hub)
    figures |= {"votes": {"sent": load.votes, "stored": stored}, "server_said": message}
    report(figures, console)
    text = json.dumps(figures, indent=1)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    else:
        print(text)
    lost = stored is not None and stored != load.votes
    return 1 if load.failed or message or lost or not load.requests else 0


if __name__ == "__main__":
    sys.exit(main())
