"""Times of the phases of an update."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

TOKENS_PER_SECOND = "tokens_per_second"


class Phases:
    """Measures the seconds of each phase of an update, as means over the updates since the last `pop_means`.

    Args:
        device: The device that computes. A phase ends when its kernels have finished.
    """

    def __init__(self, device: torch.device) -> None:
        #: Called with the name of each phase that begins or resumes, and with "" at the end of an update. By default, a
        #: function without effect.
        self.listener: Callable[[str], object] = str
        self._device = device
        self._running: list[str] = []
        self._last_time = 0.0
        self._reset()

    def _reset(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._updates = self._tokens = 0

    @contextmanager
    def time_update(self) -> Iterator[None]:
        """Times one update. Phases and tokens are counted only while this context is open."""
        with self._measure("rest"):
            yield
        self._updates += 1

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Counts the time of a context toward this phase instead of the enclosing phase.

        Args:
            name: The phase.
        """
        return self._measure(name) if self._running else nullcontext()

    def count_tokens(self, count: int) -> None:
        """Counts sampled tokens.

        Args:
            count: The number of response tokens of all processes.
        """
        self._tokens += count if self._running else 0

    def pop_means(self) -> dict[str, float]:
        """Returns {time/NAME: seconds per update} and `tokens_per_second`, or {} without updates. Resets all counts."""
        metrics: dict[str, float] = {}
        if self._updates:
            seconds = sum(self._seconds.values())
            metrics = {f"time/{name}": total / self._updates for name, total in self._seconds.items() if name != "rest"}
            metrics[TOKENS_PER_SECOND] = self._tokens / seconds
        self._reset()
        return metrics

    @contextmanager
    def _measure(self, name: str) -> Iterator[None]:
        self._add_elapsed()
        self._running.append(name)
        self.listener(name)
        try:
            yield
        finally:
            self._add_elapsed()
            self._running.pop()
            self.listener(self._running[-1] if self._running else "")

    def _add_elapsed(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)  # kernels still run after the call that starts them
        now = time.perf_counter()
        if self._running:
            self._seconds[self._running[-1]] += now - self._last_time
        self._last_time = now
