"""Profiles an update by kind of operation: `python -m speed.profile SIDE POINT [--shared] [--bf16]` in benchmarks/.

Prints JSON: on a CPU the seconds of the main thread by kind; on a GPU those of its kernels, before the update's passes
and during them. Recording takes time too, so compare shares and not seconds.
"""

import contextlib
import io
import json
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from . import side

#: Kind -> pattern of its operations' names. The products of eager attention and of the entropy are batched products.
KINDS = {
    "matrix products": r"\b(add)?mm_?$",
    "batched products": r"bmm_?$",
    "attention in one operation": r"dot_product",
    "optimizer": r"adam|vector_norm|foreach",
    "softmax and entropy": r"softmax|einsum|logsumexp|\bexp_?$",
    "conversions and copies": r"copy",
    "elementwise": r"::(add|sub|mul|div|neg|pow|r?sqrt|sum|mean|amax|silu|sin|cos|where|clamp|max|min)\w*$",
    "gathering and filling": r"::(cat|stack|_?index\w*|gather|scatter\w*|embedding\w*|fill_|zero_|masked\w*)$",
}
#: Kind -> pattern of the names of its GPU kernels. The first match counts.
KERNELS = {
    "attention": r"fmha|flash|attention|sdpa",
    "matrix products": r"gemm|nvjet|cutlass|gemv",
    "optimizer": r"[aA]dam|multi_tensor",
    "softmax and norms": r"[sS]oft[mM]ax|[nN]orm|reduce",
    "conversions and copies": r"copy|Memcpy|CatArray|Memset",
    "gathering and filling": r"index|scatter|gather|embedding|[fF]ill",
    "elementwise": r"elementwise",
}
OTHER, OUTSIDE = "other operations", "outside of operations"


class ProfilingClock(side.Clock):
    """A clock that records the last update."""

    def begin(self) -> None:
        super().begin()
        # On a GPU only kernels are recorded: the operations that launch them would add a million events.
        gpu = torch.cuda.is_available()
        self.record = profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU])
        self.record.start()

    def end(self, other_phase: str | None = None) -> None:
        super().end(other_phase)
        self.record.stop()


def seconds_by_kind(clock: ProfilingClock) -> dict[str, Any]:
    """Returns the seconds of each kind of operation in the last update."""
    if torch.cuda.is_available():
        return kernel_seconds(clock)
    result = dict.fromkeys([*KINDS, OTHER], 0.0)
    for average in clock.record.key_averages():
        result[_kind(average.key, KINDS)] += average.self_cpu_time_total / 1e6
    return {**result, OUTSIDE: max(0.0, clock.updates[-1]["seconds"] - sum(result.values()))}


def kernel_seconds(clock: ProfilingClock) -> dict[str, Any]:
    """Returns the seconds of GPU kernels by kind, before the update's passes and during them, and the slowest."""
    profiler: Any = clock.record.profiler
    events = [event for event in profiler.kineto_results.events() if event.device_type() != DeviceType.CPU]
    phases = clock.updates[-1]["phases"]
    passes_start = max(event.start_ns() + event.duration_ns() for event in events) - 1e9 * phases["update"]
    result: dict[str, Any] = {"phases": phases}
    for part, is_in_passes in (("before", False), ("update", True)):
        spent: dict[str, float] = defaultdict(float)
        for event in events:
            if (event.start_ns() >= passes_start) == is_in_passes:
                spent[event.name()] += event.duration_ns() / 1e9
        by_kind = dict.fromkeys([*KERNELS, OTHER], 0.0)
        for name, seconds in spent.items():
            by_kind[_kind(name, KERNELS)] += seconds
        longest = sorted(spent.items(), key=lambda item: item[1], reverse=True)[:25]
        result[part] = by_kind | {"most": [[name[:200], seconds] for name, seconds in longest]}
    return result


def _kind(name: str, patterns: Mapping[str, str]) -> str:
    return next((kind for kind, pattern in patterns.items() if re.search(pattern, name)), OTHER)


def main() -> None:
    side_name, *arguments = sys.argv[1:]
    clocks: list[ProfilingClock] = []

    def make_clock() -> ProfilingClock:
        clocks.append(ProfilingClock())
        return clocks[0]

    side.Clock = make_clock  # type: ignore[assignment, misc]
    module: Any = import_module(f"speed.{side_name}")
    with contextlib.redirect_stdout(io.StringIO()):
        module.main([*arguments, "--updates", "1"])
    print(json.dumps(seconds_by_kind(clocks[0])))


if __name__ == "__main__":
    main()
