"""Where the time of an update goes."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

TOKENS_PER_SECOND = "tokens_per_second"


class Phases:
    """Seconds that the phases of updates take in this process, a mean over the updates since they were last taken."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._running: list[str] = []
        self._since = 0.0
        self._begin()

    def _begin(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._updates = self._tokens = 0

    @contextmanager
    def of_update(self) -> Iterator[None]:
        """One update: what phases are counted in."""
        with self._within("rest"):
            yield
        self._updates += 1

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Counts what runs within as `name`, and not as the phase around it. Outside of an update nothing counts."""
        return self._within(name) if self._running else nullcontext()

    def sampled(self, tokens: int) -> None:
        """Counts response tokens of all processes."""
        self._tokens += tokens if self._running else 0

    def take(self) -> dict[str, float]:
        """`time/NAME` of each phase, seconds an update, and `tokens_per_second`; begins anew."""
        taken: dict[str, float] = {}
        if self._updates:
            whole = sum(self._seconds.values())
            taken = {f"time/{name}": spent / self._updates for name, spent in self._seconds.items() if name != "rest"}
            taken[TOKENS_PER_SECOND] = self._tokens / whole
        self._begin()
        return taken

    @contextmanager
    def _within(self, name: str) -> Iterator[None]:
        self._lap()
        self._running.append(name)
        try:
            yield
        finally:
            self._lap()
            self._running.pop()

    def _lap(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)  # kernels run on after the call that starts them
        now = time.perf_counter()
        if self._running:
            self._seconds[self._running[-1]] += now - self._since
        self._since = now
