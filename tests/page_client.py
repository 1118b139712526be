"""A client of a Gradio page without a browser: it sends the requests of Gradio's front end and keeps what that shows.

It does only what our page needs. It does not run an event's JavaScript but sends the inputs unchanged, it fires no
`change` events, and it gets `/config` instead of the page. It never retries.
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
    """One answer, `seconds` after the join. values: elem_id (or "#ID") -> changed value, without those of gr.State."""

    seconds: float
    values: dict[str, Any]


@dataclass(eq=False)
class Event:
    """One action of a visitor and all events chained to it. Iterating yields the updates as they arrive."""

    client: PageClient = field(repr=False)
    started: float
    updates: list[Update] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    """Positions in the queue that the server reported."""
    queue_full: bool = False
    cancelled: bool = False
    received: int = 0
    """Bytes of all messages."""
    seconds: float | None = None
    """From the join to the end; None while the action runs."""
    open_runs: int = field(default=0, repr=False)

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
        position = 0
        while True:
            while position < len(self.updates):
                yield self.updates[position]
                position += 1
            if self.done:
                return
            self.client.pump()

    def finish(self) -> Event:
        """Waits for the end of the action. Raises TimeoutError after the client's patience."""
        for _ in self:
            pass
        return self

    def close_run(self) -> None:
        self.open_runs -= 1
        if not self.open_runs:
            self.seconds = time.monotonic() - self.started


@dataclass(eq=False)
class _Run:
    """One function's run. pending: The functions of the same action that wait for its end."""

    event: Event
    dependency: dict[str, Any]
    target: int | None
    pending: list[dict[str, Any]]
    event_id: str | None = None
    last: list[Any] | None = None


class PageClient:
    """One visitor, that is one session of the server. Not thread-safe. Close it as a user closes a tab.

    patience: Seconds that any wait may take before it raises TimeoutError.
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
        self._components = {component["id"]: component for component in self.config["components"]}
        self._props = {key: dict(component.get("props", {})) for key, component in self._components.items()}
        self._ids = {props["elem_id"]: key for key, props in self._props.items() if props.get("elem_id")}
        self._dependencies = {dependency["id"]: dependency for dependency in self.config["dependencies"]}
        has_heartbeat = self.config.get("connect_heartbeat")  # it tells the server that the tab is open
        self._heartbeat = self._get(f"{self._api}/heartbeat/{self.session_hash}") if has_heartbeat else None

    def __enter__(self) -> PageClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def has(self, elem_id: str) -> bool:
        return elem_id in self._ids

    def value(self, elem_id: str) -> Any:
        """The value that a component shows."""
        return self._props[self._id(elem_id)].get("value")

    def prop(self, elem_id: str, name: str) -> Any:
        """Another property of a component, such as `visible`."""
        return self._props[self._id(elem_id)].get(name)

    def start(self, elem_id: str, event: str = "click", **values: Any) -> Event:
        """Enters `values` (elem_id -> value), triggers `event` of the component, and returns without waiting.

        The functions bound to the event run one after another, then those chained to them, while the returned event
        is iterated or finished. Raises KeyError for an unknown elem_id, LookupError if no function is bound.
        """
        for name, value in values.items():
            self._props[self._id(name)]["value"] = value
        target = self._id(elem_id)
        bound = [each for each in self._dependencies.values() if [target, event] in map(list, each["targets"])]
        if not bound:
            raise LookupError(f"Nothing is bound to {event} of {elem_id!r}.")
        return self._begin([(bound, target)])

    def fire(self, elem_id: str, event: str = "click", **values: Any) -> Event:
        """Calls `start` and waits for the end of the action."""
        return self.start(elem_id, event, **values).finish()

    def load(self) -> Event:
        """Runs every `load` event at the same time, as a browser does when it has opened the page."""
        dependencies = self._dependencies.values()
        groups = [([each], target) for each in dependencies for target, name in each["targets"] if name == "load"]
        return self._begin(groups).finish()

    def close(self) -> None:
        """Closes the connections, as closing the tab does; sends nothing to the server."""
        for run in list(self._running.values()):
            run.event.close_run()
        self._running.clear()
        self._close_stream()
        if self._heartbeat:
            self._heartbeat.close()
            self._heartbeat = None
        self._http.close()

    def pump(self) -> None:
        """Waits for the next message of the server and handles it."""
        if self._stream is None:
            raise RuntimeError("Nothing is running.")
        line = self._line()
        if line is None:
            self._fail_all("The connection to the server is lost.")
            return
        message = json.loads(line)
        kind, event_id = message["msg"], message.get("event_id")
        if kind == "close_stream":
            self._close_stream()
            if self._running:
                self._open_stream()
        elif event_id is None:
            if kind == "unexpected_error":
                self._fail_all(message.get("message") or "An unexpected error of the server.")
        elif event_id in self._running:
            self._running[event_id].event.received += len(line)
            self._handle(self._running[event_id], message)
        else:
            self._early.setdefault(event_id, []).append(message)

    def _id(self, elem_id: str) -> int:
        if elem_id not in self._ids:
            raise KeyError(f"The page has no component with elem_id {elem_id!r}, only {sorted(self._ids)}.")
        return self._ids[elem_id]

    # Runs of functions

    def _begin(self, groups: Sequence[tuple[list[dict[str, Any]], int | None]]) -> Event:
        event = Event(self, time.monotonic(), open_runs=1)
        for dependencies, target in groups:
            self._next(event, dependencies, target)
        event.close_run()
        return event

    def _next(self, event: Event, dependencies: list[dict[str, Any]], target: int | None) -> None:
        """Starts the first of `dependencies`; the others start one after another when it ends."""
        waiting = deque(dependencies)
        while waiting:
            dependency = waiting.popleft()
            for cancelled in dependency["cancels"]:
                self._cancel(cancelled)
            run = _Run(event, dependency, target, list(waiting))
            event.open_runs += 1
            if not dependency["backend_fn"]:
                self._end(run, run_pending=False)
            elif dependency["queue"]:
                self._join(run)
                return
            else:
                self._call(run)
                return

    def _body(self, run: _Run) -> dict[str, Any]:
        inputs = run.dependency["inputs"]
        is_state = {key: self._components[key]["type"] == "state" for key in inputs}  # the server keeps its value
        return {
            "data": [None if is_state[key] else self._props[key].get("value") for key in inputs],
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
        detail = str(answer.get("detail", answer) if isinstance(answer, dict) else answer)
        if status == 503 and detail.startswith("Queue is full"):
            run.event.queue_full = True
        self._fail(run, detail)

    def _call(self, run: _Run) -> None:
        """Runs a function without a queue: one request and one answer."""
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
                self._apply_edits(run, output)
            self._take(run, output)
            if kind == "process_completed":
                self._end(run)
        elif kind == "unexpected_error":
            self._fail(run, message.get("message") or "An unexpected error of the server.")

    @staticmethod
    def _apply_edits(run: _Run, output: dict[str, Any]) -> None:
        """Restores the values of an answer: after the first answer, the server sends only edits of the last values."""
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
                changed = {name: prop for name, prop in value.items() if name != "__type__"}
            changed = json.loads(json.dumps(changed))  # a copy, which later edits must not change
            self._props[key].update(changed)
            if "value" in changed:
                values[self._props[key].get("elem_id") or f"#{key}"] = changed["value"]
        run.event.updates.append(Update(time.monotonic() - run.event.started, values))

    def _fail(self, run: _Run, message: str) -> None:
        run.event.errors.append(message)
        self._end(run, run_chained=False)  # like the front end, which skips even `.then` after an error

    def _end(self, run: _Run, *, run_chained: bool = True, run_pending: bool = True) -> None:
        self._running.pop(run.event_id or "", None)
        for dependency in list(self._dependencies.values()):
            if run_chained and dependency["trigger_after"] == run.dependency["id"]:
                self._next(run.event, [dependency], run.target)
        if run_pending:
            self._next(run.event, run.pending, run.target)
        run.event.close_run()

    def _cancel(self, dependency: int) -> None:
        for run in [each for each in self._running.values() if each.dependency["id"] == dependency]:
            assert run.event_id is not None
            del self._running[run.event_id]
            body = {"event_id": run.event_id, "session_hash": self.session_hash, "fn_index": dependency}
            self._request("POST", f"{self._api}/cancel", body)
            self._request("POST", f"{self._api}/reset", {"event_id": run.event_id})
            run.event.cancelled = True
            self._end(run, run_pending=False)

    def _fail_all(self, message: str) -> None:
        self._close_stream()
        for run in list(self._running.values()):
            run.event.errors.append(message)
            run.event.close_run()
        self._running.clear()

    # Connections

    def _request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        content = None if body is None else json.dumps(body)  # escapes to ASCII, so a lone surrogate can be sent
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
    """Returns `value` after Gradio's edits: (action, path, operand) each. Lists and dictionaries change in place."""
    for action, path, operand in edits:
        if not path:
            value = operand if action == "replace" else value + operand
            continue
        *outer_path, last = path
        container = value
        for step in outer_path:
            container = container[step]
        if action == "replace" or (action == "add" and isinstance(container, dict)):
            container[last] = operand
        elif action == "append":
            container[last] += operand
        elif action == "add":
            container.insert(int(last), operand)
        else:
            assert action == "delete", f"unknown edit {action!r}"
            del container[last]
    return value
