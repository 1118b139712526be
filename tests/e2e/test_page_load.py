"""Many visitors at the same time: no request fails or hangs, and no vote is lost."""

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_fixture import RunningHub, start_hub
from page_client import Event, PageClient
from page_fixture import PPO, PROMPTS, VOTES, publish, serve
from toy_models import save_toys

VISITORS, SECONDS = 20, 30
#: Seconds of a request: far above every measured time, and below the client's patience.
MAX_SECONDS = 60.0
VOTE_BUTTONS = ("vote-left", "vote-right", "vote-tie", "vote-both-bad")
ERROR_MESSAGE = re.compile(r'role="alert"[^>]*>(.*?)</', re.S)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[RunningHub]:
    hub = start_hub(tmp_path / "server")
    publish(hub, save_toys(tmp_path / "toys"))
    yield hub
    hub.stop()


def act(client: PageClient, rng: random.Random) -> Iterator[tuple[str, Event]]:
    """Compares, moves the slider, or asks for a blind pair and votes."""
    [name] = rng.choices(["compare", "step", "pair"], [4, 2, 2])
    if name == "compare":
        settings = {"temperature": rng.choice([0.7, 1.0, 1.2]), "tokens": rng.randint(4, 24)}
        yield name, client.fire("compare", prompt=rng.choice(PROMPTS), seed=rng.randrange(10**6), **settings)
    elif name == "step":
        yield name, client.fire("step", "input", step=rng.choice([10, 20, 40]))
    else:
        yield name, client.fire("blind-new")
        time.sleep(rng.random())
        yield "vote", client.fire(rng.choice([one for one in VOTE_BUTTONS if client.prop(one, "interactive")]))


def problem(event: Event) -> str | None:
    """What went wrong with a request, if anything."""
    if event.error or event.queue_full or not event.updates:
        return event.error or ("queue full" if event.queue_full else "no answer")
    if (event.seconds or 0.0) > MAX_SECONDS:
        return f"{event.seconds} s"
    shown = [value for value in event.values.values() if isinstance(value, str)]
    return next((match[1] for value in shown if (match := ERROR_MESSAGE.search(value))), None)


@pytest.mark.full
def test_page_serves_twenty_visitors(hub: RunningHub, tmp_path: Path) -> None:
    requests: Counter[str] = Counter()
    problems: list[Any] = []

    def visit(seed: int) -> None:
        rng = random.Random(seed)
        try:
            with PageClient(page.url) as client:
                client.load()
                while time.monotonic() < end:
                    time.sleep(rng.random())
                    for name, event in act(client, rng):
                        requests[name] += 1
                        problems.extend((name, each) for each in [problem(event)] if each)
        except Exception as error:  # a thread's error would not fail the test
            problems.append(repr(error))

    # All visitors share an address, whose votes are limited by default. `serve` checks the page's log at its end.
    flags = ("--port", "0", "--votes", VOTES, "--votes_per_hour", "1000000")
    with serve(hub, tmp_path / "page.log", PPO, *flags) as page:
        end = time.monotonic() + SECONDS
        threads = [threading.Thread(target=visit, args=(seed,)) for seed in range(VISITORS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not problems
    assert set(requests) == {"compare", "step", "pair", "vote"}
    code = f"from rlhf_zoo.evaluation.votes.data import HubVotes\nprint(len(HubVotes({VOTES!r}).read()))"
    assert int(hub.python(code)) == requests["vote"] > 0
