"""The client that stands for browsers, against a small page of real Gradio on loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

gr = pytest.importorskip("gradio")

from page_client import PageClient, apply_diff  # noqa: E402

SECONDS = 30
STEPS = 2000


@dataclass
class Seen:
    """What happened inside the page's functions."""

    steps: list[int] = field(default_factory=list)
    slow: list[threading.Event] = field(default_factory=list)
    """One for each run of `slow`, set at its end."""
    closed_by: list[str] = field(default_factory=list)
    """The threads in which a run was closed before its end."""
    whole: threading.Event = field(default_factory=threading.Event)
    gate: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    unloaded: threading.Event = field(default_factory=threading.Event)

    def reset(self) -> None:
        for one in (self.steps, self.slow, self.closed_by):
            one.clear()
        for event in (self.whole, self.gate, self.entered, self.unloaded):
            event.clear()


def build(seen: Seen) -> Any:
    def stream(text: str, times: float) -> Iterator[tuple[str, Any]]:
        for step in range(int(times)):
            yield text * (step + 1), gr.update(value=["x", step], visible=step % 2 == 0)

    def count(state: dict[str, int]) -> tuple[dict[str, int], str]:
        state = {"n": state["n"] + 1}
        return state, f"{state['n']}"

    def fail(text: str) -> Iterator[str]:
        yield "before"
        raise gr.Error(f"no {text}", print_exception=False)

    def slow() -> Iterator[str]:
        ended = threading.Event()
        seen.slow.append(ended)
        try:
            for step in range(STEPS):
                seen.steps.append(step)
                yield str(step)
                time.sleep(0.02)
        except GeneratorExit:
            seen.closed_by.append(threading.current_thread().name)
            raise
        finally:
            ended.set()

    def whole() -> str:
        seen.entered.set()
        assert seen.gate.wait(SECONDS)
        seen.whole.set()
        return "whole"

    def held() -> str:
        seen.entered.set()
        assert seen.gate.wait(SECONDS)
        return "held"

    with gr.Blocks(analytics_enabled=False) as page:
        state = gr.State({"n": 0})
        watched = gr.State(0)
        text = gr.Textbox("ab", elem_id="text")
        times = gr.Number(3, elem_id="times")
        out = gr.HTML("start", elem_id="out")
        more = gr.JSON(elem_id="more")
        after = gr.Textbox(elem_id="after")
        hello = gr.Textbox(elem_id="hello")
        with gr.Tabs(), gr.Tab("One", elem_id="one"), gr.Row():
            gr.Markdown("one")
        names = ("stream", "count", "fail", "slow", "whole", "held", "direct", "toast", "stop", "two", "bump")
        button = {name: gr.Button(name, elem_id=f"{name}-button") for name in names}

        gr.on([button["stream"].click, text.submit], stream, [text, times], [out, more]).then(
            lambda shown: f"then {shown}", out, after
        ).success(lambda shown: f"success {shown}", after, after)
        button["count"].click(count, state, [state, out])
        failing = button["fail"].click(fail, text, out)
        failing.then(lambda: "then", None, after)
        failing.success(lambda: "success", None, after)
        failing.failure(lambda: "failure", None, hello)
        running = button["slow"].click(slow, None, out, concurrency_limit=1)
        button["whole"].click(whole, None, out, concurrency_limit=1)
        button["held"].click(held, None, out, concurrency_limit=1)
        button["direct"].click(lambda shown: f"{shown}!", text, out, queue=False)
        button["stop"].click(None, cancels=[running])
        button["two"].click(lambda: "first", None, out)
        button["two"].click(lambda shown: f"second after {shown}", out, after)
        button["bump"].click(lambda n: n + 1, watched, watched)
        watched.change(lambda n: f"now {n}", watched, after)

        def toast() -> str:
            gr.Info("look")
            return "toasted"

        button["toast"].click(toast, None, out)
        page.load(lambda: "hello", None, hello)
        page.unload(seen.unloaded.set)
        chosen = next(one for one in page.blocks.values() if getattr(one, "elem_id", None) == "one")

        def select(event: gr.SelectData) -> str:
            return f"{event.value} {event.index}"

        chosen.select(select, None, after)
    return page.queue(max_size=1)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, Seen]]:
    seen = Seen()
    page = build(seen)
    _, url, _ = page.launch(
        server_name="127.0.0.1",
        prevent_thread_lock=True,
        quiet=True,
        share=False,
        ssr_mode=False,
        show_error=True,
        run_history=False,
    )
    yield url, seen
    seen.gate.set()
    page.close(verbose=False)


@pytest.fixture
def seen(served: tuple[str, Seen]) -> Seen:
    served[1].reset()
    return served[1]


@pytest.fixture
def client(served: tuple[str, Seen]) -> Iterator[PageClient]:
    with PageClient(served[0], patience=SECONDS) as client:
        yield client


def wait(condition: Any) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_stream_and_what_is_chained_to_it(client: PageClient) -> None:
    event = client.fire("stream-button", text="xy", times=3)
    assert event.error is None
    assert event.done
    # The last answer of a stream says everything once more.
    assert [one.values["out"] for one in event.updates[:4]] == ["xy", "xyxy", "xyxyxy", "xyxyxy"]
    assert [one.values["more"] for one in event.updates[:4]] == [["x", 0], ["x", 1], ["x", 2], ["x", 2]]
    assert [one.props["more"]["visible"] for one in event.updates[:4]] == [True, False, True, True]
    assert [one.values for one in event.updates[4:]] == [{"after": "then xyxyxy"}, {"after": "success then xyxyxy"}]
    assert client.value("out") == "xyxyxy"
    assert client.value("after") == "success then xyxyxy"
    assert client.prop("more", "visible") is True
    times = [one.seconds for one in event.updates]
    assert event.first == times[0] > 0
    assert times == sorted(times)
    assert event.seconds is not None
    assert event.seconds >= times[-1]
    assert event.received > 0


def test_every_target_starts_it_and_values_stay(client: PageClient) -> None:
    assert client.fire("text", "submit", times=1).values == {
        "out": "ab",
        "more": ["x", 0],
        "after": "success then ab",
    }
    client.fire("stream-button", text="c")
    assert client.value("times") == 1
    assert client.fire("text", "submit").values["out"] == "c"


def test_a_visitor_keeps_its_state_and_no_other_has_it(client: PageClient, served: tuple[str, Seen]) -> None:
    assert [client.fire("count-button").values["out"] for _ in range(3)] == ["1", "2", "3"]
    with PageClient(served[0]) as other:
        assert other.fire("count-button").values["out"] == "1"
    assert client.fire("count-button").values["out"] == "4"


def test_an_error_stops_the_chain_but_for_failure(client: PageClient) -> None:
    event = client.fire("fail-button", text="thing")
    assert event.error == "no thing"
    assert event.errors == ["no thing"]
    assert [one.values for one in event.updates] == [{"out": "before"}, {"hello": "failure"}]
    assert client.fire("count-button").error is None


def test_without_a_queue(client: PageClient) -> None:
    event = client.fire("direct-button", text="now")
    assert event.values == {"out": "now!"}
    assert event.ranks == []


def test_two_functions_of_one_click_run_in_turn(client: PageClient) -> None:
    updates = client.fire("two-button").updates
    assert [one.values for one in updates] == [
        {"out": "first"},
        {"after": "second after first"},
    ]


def test_the_change_of_a_state(client: PageClient) -> None:
    assert client.fire("bump-button").values == {"after": "now 1"}


def test_toasts_tabs_and_load(client: PageClient) -> None:
    assert client.fire("toast-button").toasts == [("info", "look")]
    assert client.fire("one", "select").values == {"after": "One 0"}
    assert client.load().values == {"hello": "hello"}


def test_what_the_page_has_not(client: PageClient) -> None:
    assert client.has("text") and not client.has("nothing")
    with pytest.raises(KeyError, match="'nothing'"):
        client.fire("nothing")
    with pytest.raises(LookupError, match="input of 'text'"):
        client.fire("text", "input")


def test_a_full_queue(served: tuple[str, Seen], seen: Seen) -> None:
    url = served[0]
    visitors = [PageClient(url, patience=SECONDS) for _ in range(3)]
    try:
        running = visitors[0].start("held-button")
        assert seen.entered.wait(SECONDS)
        waiting = visitors[1].start("held-button")
        full = visitors[2].fire("held-button")
        assert full.queue_full
        assert full.error == "Queue is full. Max size is 1 and size is 1."
        assert full.updates == []
        seen.gate.set()
        for event in (running, waiting):
            assert event.finish().values == {"out": "held"}
            assert not event.queue_full
        assert waiting.ranks[0] == 0
        assert visitors[2].fire("held-button").values == {"out": "held"}
    finally:
        for one in visitors:
            one.close()


def test_a_stop_button(client: PageClient, seen: Seen) -> None:
    event = client.start("slow-button")
    assert next(iter(event)).values == {"out": "0"}
    client.fire("stop-button")
    assert event.cancelled
    assert event.done
    assert seen.slow[0].wait(SECONDS)
    assert len(seen.closed_by) == 1
    assert client.fire("count-button").values == {"out": "1"}


def test_a_closed_tab_stops_a_generator_at_its_next_step(served: tuple[str, Seen], seen: Seen) -> None:
    client = PageClient(served[0], patience=SECONDS)
    event = client.start("slow-button")
    for number, _ in enumerate(event):
        if number == 3:
            break
    client.close()
    assert event.abandoned
    assert event.done
    assert seen.slow[0].wait(SECONDS)
    assert len(seen.closed_by) == 1
    assert 4 <= len(seen.steps) < STEPS
    assert seen.unloaded.wait(SECONDS)
    with PageClient(served[0], patience=SECONDS) as other:  # its place is free again
        assert next(iter(other.start("slow-button"))).values == {"out": "0"}
    assert seen.slow[1].wait(SECONDS)


def test_a_closed_tab_does_not_stop_a_plain_function(served: tuple[str, Seen], seen: Seen) -> None:
    client = PageClient(served[0], patience=SECONDS)
    client.start("whole-button")
    assert seen.entered.wait(SECONDS)
    client.close()
    assert seen.unloaded.wait(SECONDS)
    assert not seen.whole.is_set()
    seen.gate.set()
    assert seen.whole.wait(SECONDS)


def test_a_closed_tab_leaves_the_queue(served: tuple[str, Seen], seen: Seen) -> None:
    url = served[0]
    with PageClient(url, patience=SECONDS) as first, PageClient(url, patience=SECONDS) as third:
        running = first.start("held-button")
        assert seen.entered.wait(SECONDS)
        second = PageClient(url, patience=SECONDS)
        second.start("held-button")
        assert third.fire("held-button").queue_full
        second.close()
        answers: list[Any] = []

        def place_is_free() -> bool:
            answers.append(third.start("held-button"))
            return not answers[-1].queue_full

        wait(place_is_free)
        seen.gate.set()
        assert running.finish().values == answers[-1].finish().values == {"out": "held"}


def test_patience_ends(served: tuple[str, Seen], seen: Seen) -> None:
    with PageClient(served[0], patience=0.3) as client, pytest.raises(TimeoutError, match=r"0\.3 s"):
        client.fire("held-button")
    seen.gate.set()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ab", "abc"),
        ("ab", "xb"),
        ([1, 2, 3], [1]),
        ([1], [1, {"a": 2}, "c"]),
        ({"a": "x", "b": [1, {"c": "d"}]}, {"a": "xy", "b": [1, {"c": "de"}], "e": None}),
        ({"a": 1, "b": 2}, {"b": 3}),
        (None, {"__type__": "update"}),
        ([[1, 2], [3, 4, 5]], [[2], [3, 5]]),
    ],
)
def test_differences_are_gradios(old: Any, new: Any) -> None:
    from gradio.utils import diff

    assert apply_diff(old, diff(old, new)) == new


@pytest.mark.parametrize("edit", [["add", [], 1], ["turn", ["a"], 1]])
def test_an_unknown_difference(edit: list[Any]) -> None:
    with pytest.raises(ValueError, match="There is no edit"):
        apply_diff({"a": 1}, [edit])
