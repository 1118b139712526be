"""A visitor of a Gradio page without a browser: the requests that Gradio's own front end makes, and what it shows.

It does what our page needs: no JavaScript of an event is run (its inputs are sent as they are), nothing fires at a
change of a value, and `/config` is asked for instead of the page around it. Nothing is ever tried a second time.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

PATIENCE = 120.0


@dataclass(frozen=True)
class Update:
    """One answer: `seconds` after the join, the values that it changed by elem_id (else "#ID"), but for gr.State."""

    seconds: float
    values: dict[str, Any]


@dataclass(eq=False)
class Event:
    """What came of one action of a visitor, with everything chained to it. Iterating yields updates as they arrive."""

    client: PageClient = field(repr=False)
    started: float
    updates: list[Update] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    """Places in the queue that the server told."""
    queue_full: bool = False
    cancelled: bool = False
    received: int = 0
    """Bytes of the messages."""
    seconds: float | None = None
    """From the join to the end; None while it runs."""
    open: int = field(default=0, repr=False)

    @property
    def error(self) -> str | None:
        return self.errors[0] if self.errors else None

    @property
    def done(self) -> bool:
        return self.seconds is not None

    @property
    def values(self) -> dict[str, Any]:
        """The last value of each output."""
        return {name: value for update in self.updates for name, value in update.values.items()}

    def __iter__(self) -> Iterator[Update]:
        given = 0
        while True:
            while given < len(self.updates):
                given += 1
                yield self.updates[given - 1]
            if self.done:
                return
            self.client.pump()

    def finish(self) -> Event:
        """Waits for the end of it. Raises TimeoutError after the client's patience."""
        for _ in self:
            pass
        return self

    def close_one(self) -> None:
        self.open -= 1
        if not self.open:
            self.seconds = time.monotonic() - self.started


@dataclass(eq=False)
class _Run:
    """One function's run: `rest` are the functions of the same action that wait for its end."""

    event: Event
    dependency: dict[str, Any]
    target: int | None
    rest: list[dict[str, Any]]
    event_id: str | None = None
    last: list[Any] | None = None


class PageClient:
    """One visitor, who is one session of the server. Not for several threads at once.

    patience: seconds that any wait may take before TimeoutError. Close it, as one closes a tab.
    """

    def __init__(self, url: str, *, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._http = httpx2.Client(base_url=url.rstrip("/"), timeout=patience, headers={"x-gradio-user": "app"})
        self._stream: httpx2.Response | None = None
        self._lines: Iterator[str] = iter(())
        self._running: dict[str, _Run] = {}
        self._early: dict[str, list[dict[str, Any]]] = {}
        self.session_hash = secrets.token_hex(6)
        status, self.config = self._request("GET", "/config")
        if status != 200:
            raise ConnectionError(f"{url} answered {status} to /config.")
        self._api = self.config.get("api_prefix", "")
        self._components = {one["id"]: one for one in self.config["components"]}
        self._props = {key: dict(one.get("props", {})) for key, one in self._components.items()}
        self._ids = {props["elem_id"]: key for key, props in self._props.items() if props.get("elem_id")}
        self._dependencies = {one["id"]: one for one in self.config["dependencies"]}
        beats = self.config.get("connect_heartbeat")  # they tell the server that the tab is open
        self._heartbeat = self._get(f"{self._api}/heartbeat/{self.session_hash}") if beats else None

    def __enter__(self) -> PageClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def has(self, elem_id: str) -> bool:
        return elem_id in self._ids

    def value(self, elem_id: str) -> Any:
        """What the visitor sees in a component."""
        return self._props[self._id(elem_id)].get("value")

    def prop(self, elem_id: str, name: str) -> Any:
        """Another property of a component, such as `visible`."""
        return self._props[self._id(elem_id)].get(name)

    def start(self, elem_id: str, event: str = "click", **values: Any) -> Event:
        """The visitor enters `values` by elem_id, then does `event` to the component; comes back at once after.

        All functions bound to it run one after another, and what is chained to them after that, while the returned
        event is iterated or finished. Raises KeyError for an unknown elem_id, LookupError where nothing is bound.
        """
        for name, value in values.items():
            self._props[self._id(name)]["value"] = value
        target = self._id(elem_id)
        bound = [one for one in self._dependencies.values() if [target, event] in map(list, one["targets"])]
        if not bound:
            raise LookupError(f"Nothing is bound to {event} of {elem_id!r}.")
        return self._begin([(bound, target)])

    def fire(self, elem_id: str, event: str = "click", **values: Any) -> Event:
        """`start`, and waits for the end of it."""
        return self.start(elem_id, event, **values).finish()

    def load(self) -> Event:
        """What a browser does when the page has been opened: every `load`, at the same time."""
        found = [
            ([one], target) for one in self._dependencies.values() for target, name in one["targets"] if name == "load"
        ]
        return self._begin(found).finish()

    def close(self) -> None:
        """Closes the tab: the connections end, and nothing else is said to the server."""
        for run in list(self._running.values()):
            run.event.close_one()
        self._running.clear()
        self._close_stream()
        if self._heartbeat:
            self._heartbeat.close()
            self._heartbeat = None
        self._http.close()

    def pump(self) -> None:
        """Waits for the next message of the server and does what it says."""
        if self._stream is None:
            raise RuntimeError("Nothing is running.")
        line = self._line()
        if line is None:
            self._lost("The connection to the server is lost.")
            return
        message = json.loads(line)
        kind, event_id = message["msg"], message.get("event_id")
        if kind == "close_stream":
            self._close_stream()
            if self._running:
                self._open_stream()
        elif event_id is None:
            if kind == "unexpected_error":
                self._lost(message.get("message") or "An unexpected error of the server.")
        elif event_id in self._running:
            self._running[event_id].event.received += len(line)
            self._handle(self._running[event_id], message)
        else:
            self._early.setdefault(event_id, []).append(message)

    def _id(self, elem_id: str) -> int:
        if elem_id not in self._ids:
            raise KeyError(f"The page has no component with elem_id {elem_id!r}, only {sorted(self._ids)}.")
        return self._ids[elem_id]

    # What is run

    def _begin(self, groups: Sequence[tuple[list[dict[str, Any]], int | None]]) -> Event:
        event = Event(self, time.monotonic(), open=1)
        for dependencies, target in groups:
            self._next(event, dependencies, target)
        event.close_one()
        return event

    def _next(self, event: Event, dependencies: list[dict[str, Any]], target: int | None) -> None:
        """Starts the first of `dependencies`; the others follow at its end."""
        waiting = deque(dependencies)
        while waiting:
            dependency = waiting.popleft()
            for cancelled in dependency["cancels"]:
                self._cancel(cancelled)
            run = _Run(event, dependency, target, list(waiting))
            event.open += 1
            if not dependency["backend_fn"]:
                self._end(run, rest=False)
            elif dependency["queue"]:
                self._join(run)
                return
            else:
                self._call(run)
                return

    def _body(self, run: _Run) -> dict[str, Any]:
        kept = [self._components[key]["type"] == "state" for key in run.dependency["inputs"]]
        values = [self._props[key].get("value") for key in run.dependency["inputs"]]
        return {
            "data": [None if state else value for state, value in zip(kept, values, strict=True)],
            "event_data": None,
            "fn_index": run.dependency["id"],
            "trigger_id": run.target,
            "session_hash": self.session_hash,
        }

    def _join(self, run: _Run) -> None:
        status, answer = self._request("POST", f"{self._api}/queue/join?", self._body(run))
        if status == 200:
            run.event_id = answer["event_id"]
            self._running[run.event_id] = run
            for message in self._early.pop(run.event_id, []):
                self._handle(run, message)
            if self._stream is None and self._running:
                self._open_stream()
            return
        said = answer.get("detail", answer) if isinstance(answer, dict) else answer
        if status == 503 and str(said).startswith("Queue is full"):
            run.event.queue_full = True
        self._fail(run, str(said))

    def _call(self, run: _Run) -> None:
        """An event without a queue: one request and one answer."""
        status, answer = self._request("POST", f"{self._api}/run/predict", self._body(run))
        if status != 200:
            self._fail(run, str(answer.get("error") if isinstance(answer, dict) else answer))
            return
        self._take(run, answer)
        self._end(run)

    def _handle(self, run: _Run, message: dict[str, Any]) -> None:
        kind, output = message["msg"], message.get("output") or {}
        if kind == "estimation" and message.get("rank") is not None:
            run.event.ranks.append(message["rank"])
        elif kind in ("process_generating", "process_completed"):
            if not message["success"]:
                self._fail(run, output.get("error") or "The server gave no reason.")
                return
            if kind == "process_generating":
                self._differ(run, output)
            self._take(run, output)
            if kind == "process_completed":
                self._end(run)
        elif kind == "unexpected_error":
            self._fail(run, message.get("message") or "An unexpected error of the server.")

    @staticmethod
    def _differ(run: _Run, output: dict[str, Any]) -> None:
        """After the first answer each value comes as its difference to the one before."""
        if run.last is None:
            run.last = output["data"]
        else:
            run.last = [_apply_diff(old, edits) for old, edits in zip(run.last, output["data"], strict=True)]
            output["data"] = run.last

    def _take(self, run: _Run, output: dict[str, Any]) -> None:
        if output.get("data") is None:
            return
        values: dict[str, Any] = {}
        for key, value in zip(run.dependency["outputs"], output["data"], strict=False):
            if self._components[key]["type"] == "state":
                continue
            changed = {"value": value}
            if isinstance(value, dict) and value.get("__type__") == "update":
                changed = {name: one for name, one in value.items() if name != "__type__"}
            changed = json.loads(json.dumps(changed))  # later differences must not change it
            self._props[key].update(changed)
            if "value" in changed:
                values[self._props[key].get("elem_id") or f"#{key}"] = changed["value"]
        run.event.updates.append(Update(time.monotonic() - run.event.started, values))

    def _fail(self, run: _Run, message: str) -> None:
        run.event.errors.append(message)
        self._end(run, chain=False)  # `.then` too does not follow an error: so does the front end

    def _end(self, run: _Run, *, chain: bool = True, rest: bool = True) -> None:
        self._running.pop(run.event_id or "", None)
        for one in list(self._dependencies.values()):
            if chain and one["trigger_after"] == run.dependency["id"]:
                self._next(run.event, [one], run.target)
        if rest:
            self._next(run.event, run.rest, run.target)
        run.event.close_one()

    def _cancel(self, dependency: int) -> None:
        for run in [one for one in self._running.values() if one.dependency["id"] == dependency]:
            assert run.event_id is not None
            del self._running[run.event_id]
            said = {"event_id": run.event_id, "session_hash": self.session_hash, "fn_index": dependency}
            self._request("POST", f"{self._api}/cancel", said)
            self._request("POST", f"{self._api}/reset", {"event_id": run.event_id})
            run.event.cancelled = True
            self._end(run, rest=False)

    def _lost(self, message: str) -> None:
        self._close_stream()
        for run in list(self._running.values()):
            run.event.errors.append(message)
            run.event.close_one()
        self._running.clear()

    # Connections

    def _request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        content = None if body is None else json.dumps(body)  # ASCII alone: half a character can be sent too
        response = self._http.request(method, path, content=content, headers={"Content-Type": "application/json"})
        try:
            return response.status_code, response.json()
        except ValueError:
            return response.status_code, response.text

    def _get(self, path: str) -> httpx2.Response:
        request = self._http.build_request("GET", path, headers={"Accept": "text/event-stream"})
        response = self._http.send(request, stream=True)
        if response.status_code != 200:
            raise ConnectionError(f"{path} answered {response.status_code}.")
        return response

    def _open_stream(self) -> None:
        self._stream = self._get(f"{self._api}/queue/data?session_hash={self.session_hash}")
        self._lines = self._stream.iter_lines()

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _line(self) -> str | None:
        """The next message's JSON, or None at the end of the stream."""
        oldest = min((run.event.started for run in self._running.values()), default=time.monotonic())
        with contextlib.suppress(httpx2.TransportError):
            for line in self._lines:
                if line.startswith("data: "):
                    return line[len("data: ") :]
                if time.monotonic() > oldest + self._patience:
                    raise TimeoutError(f"The server did not end an event in {self._patience:g} s.")
        return None


def _apply_diff(value: Any, edits: Sequence[Sequence[Any]]) -> Any:
    """`value` after Gradio's edits, each an action, a path and an operand. Lists and dictionaries change in place."""
    for action, path, operand in edits:
        if not path:
            value = operand if action == "replace" else value + operand
            continue
        *way, last = path
        place = value
        for step in way:
            place = place[step]
        if action == "replace" or (action == "add" and isinstance(place, dict)):
            place[last] = operand
        elif action == "append":
            place[last] += operand
        elif action == "add":
            place.insert(int(last), operand)
        else:
            assert action == "delete", f"There is no edit {action!r}."
            del place[last]
    return value
