"""What every side says of itself: JSON of seconds by phase, CPU seconds, tokens and memory."""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets", "numpy")


def resident(field_name: str) -> float:
    """MiB of this process by a field of its status: VmRSS now, VmHWM at its highest."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field_name + ":"):
            return int(line.split()[1]) / 1024
    raise SystemExit("This needs /proc/self/status, which Linux has.")


@dataclass
class Clock:
    """Times updates, their phases, and memory. Make it after all imports and before the models."""

    before: float = field(default_factory=lambda: resident("VmRSS"))
    updates: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    tokens: int = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, as a phase."""

        def within(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        return within

    def begin(self) -> None:
        """The next update begins."""
        self.seconds.clear()
        self.tokens = 0
        self._began = time.perf_counter(), time.process_time()

    def end(self, rest: str | None = None) -> None:
        """The update has ended. rest: the phase of all time that no phase has."""
        whole, cpu = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        phases = dict(self.seconds)
        if rest is not None:
            phases[rest] = phases.get(rest, 0.0) + whole - sum(phases.values())
        self.updates.append({"seconds": whole, "cpu": cpu, "phases": phases, "tokens": self.tokens})

    def report(self, **more: Any) -> None:
        """Prints what was seen; the first update is of warm-up and left out."""
        known = {}
        for name in PACKAGES:
            try:
                known[name] = version(name)
            except PackageNotFoundError:
                continue
        peak = resident("VmHWM")
        seen = {"updates": self.updates[1:], "peak_mib": peak, "net_mib": peak - self.before, "versions": known}
        if torch.cuda.is_available():
            seen["gpu_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        print(json.dumps(seen | more))


def asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    """point, updates and settings of a side's process. The threads are those of OMP_NUM_THREADS."""
    parser = argparse.ArgumentParser()
    parser.add_argument("point")
    parser.add_argument("--updates", type=int, default=3, help="counted updates, after one of warm-up")
    parser.add_argument("--shared", action="store_true", help="critic and policy share a trunk")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--set", default="{}", help="more fields of the configuration, as JSON")
    options = parser.parse_args(arguments)
    options.set = json.loads(options.set)
    return options
