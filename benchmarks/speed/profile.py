"""What the operations of one update are: `python -m speed.profile SIDE POINT [--shared] [--bf16]` in benchmarks/.

Prints JSON: seconds of the thread that calls, by kind; on a GPU seconds of its kernels, and which take most. Recording
takes time too, so read shares and not seconds.
"""

import contextlib
import io
import json
import re
import sys
from importlib import import_module
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from . import side

#: Kind -> what the names of its operations have. Where attention is eager, its products are batched ones, and so are
#: the entropy's.
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
REST, OUTSIDE = "other operations", "outside of operations"


class Profiled(side.Clock):
    """A clock that records the last update."""

    def begin(self) -> None:
        super().begin()
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self.record = profile(activities=[ProfilerActivity.CPU, *gpu])
        self.record.start()

    def end(self, rest: str | None = None) -> None:
        super().end(rest)
        self.record.stop()


def kinds(clock: Profiled) -> dict[str, Any]:
    """Seconds of each kind, of the update that was recorded last."""
    found: dict[str, Any] = dict.fromkeys([*KINDS, REST], 0.0)
    gpu, kernels = torch.cuda.is_available(), {}
    for one in clock.record.key_averages():
        if one.device_type != DeviceType.CPU:
            kernels[one.key[:100]] = one.self_device_time_total / 1e6
            continue
        kind = next((kind for kind, names in KINDS.items() if re.search(names, one.key)), REST)
        found[kind] += (one.self_device_time_total if gpu else one.self_cpu_time_total) / 1e6
    whole = clock.updates[-1]["seconds"]
    if not gpu:
        return {**found, OUTSIDE: max(0.0, whole - sum(found.values()))}
    busy, most = sum(kernels.values()), sorted(kernels, key=kernels.__getitem__, reverse=True)[:30]
    # What a graph starts has no operation that started it.
    found |= {"in graphs": busy - sum(found.values()), "idle": whole - busy, "phases": clock.updates[-1]["phases"]}
    return found | {"kernels": {name: kernels[name] for name in most}}


def main() -> None:
    name, *rest = sys.argv[1:]
    clocks: list[Profiled] = []

    def clock() -> Profiled:
        clocks.append(Profiled())
        return clocks[0]

    side.Clock = clock  # type: ignore[assignment, misc]
    module: Any = import_module(f"speed.{name}")
    with contextlib.redirect_stdout(io.StringIO()):
        module.main([*rest, "--updates", "1"])
    print(json.dumps(kinds(clocks[0])))


if __name__ == "__main__":
    main()
