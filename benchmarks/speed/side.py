"""The clock, the report and the options that all sides share."""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets", "numpy")


def memory_mib(field_name: str) -> float:
    """Returns this process's resident memory in MiB: VmRSS is the current size, VmHWM the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field_name + ":"):
            return int(line.split()[1]) / 1024
    raise SystemExit("/proc/self/status is missing: measure memory on Linux.")


@dataclass
class Clock:
    """Measures the time of updates and phases, and memory. Create it after all imports and before the models."""

    start_mib: float = field(default_factory=lambda: memory_mib("VmRSS"))
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
        """Wraps a function so that its calls count as a phase."""

        def timed_function(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        return timed_function

    def begin(self) -> None:
        """Starts the next update."""
        self.seconds.clear()
        self.tokens = 0
        self._began = time.perf_counter(), time.process_time()

    def end(self, other_phase: str | None = None) -> None:
        """Ends the update. The time outside of all phases is added to `other_phase`."""
        seconds, cpu = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        phases = dict(self.seconds)
        if other_phase is not None:
            phases[other_phase] = phases.get(other_phase, 0.0) + seconds - sum(phases.values())
        self.updates.append({"seconds": seconds, "cpu": cpu, "phases": phases, "tokens": self.tokens})

    def print_report(self) -> None:
        """Prints the measurements as JSON, without the first update, which is for warm-up."""
        versions = {}
        for name in PACKAGES:
            with suppress(PackageNotFoundError):
                versions[name] = version(name)
        peak = memory_mib("VmHWM")
        report = {"updates": self.updates[1:], "peak_mib": peak, "net_mib": peak - self.start_mib, "versions": versions}
        if torch.cuda.is_available():
            report["gpu_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        print(json.dumps(report))


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the point, the number of updates and the settings of a side. OMP_NUM_THREADS sets its threads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("point")
    parser.add_argument("--updates", type=int, default=3, help="timed updates, after one for warm-up (default: 3)")
    parser.add_argument("--shared", action="store_true", help="share a trunk between critic and policy")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--set", default="{}", help="more fields of the configuration, as JSON")
    options = parser.parse_args(arguments)
    options.set = json.loads(options.set)
    return options
