"""What the operations of one update are: `python -m speed.profile SIDE POINT [--shared] [--bf16]` in benchmarks/.

Prints JSON: seconds of the thread that calls, by kind; on a GPU seconds of its kernels, of sampling and reading and of
the update. Recording takes time too, so read shares and not seconds.
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
#: The same of a GPU's kernels, the first that fits.
KERNELS = {
    "attention": r"fmha|flash|attention|sdpa",
    "matrix products": r"gemm|nvjet|cutlass|gemv",
    "optimizer": r"[aA]dam|multi_tensor",
    "softmax and norms": r"[sS]oft[mM]ax|[nN]orm|reduce",
    "conversions and copies": r"copy|Memcpy|CatArray|Memset",
    "gathering and filling": r"index|scatter|gather|embedding|[fF]ill",
    "elementwise": r"elementwise",
}
REST, OUTSIDE = "other operations", "outside of operations"


class Profiled(side.Clock):
    """A clock that records the last update."""

    def begin(self) -> None:
        super().begin()
        # Beside a GPU's kernels the operations that start them would be a million events more.
        gpu = torch.cuda.is_available()
        self.record = profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU])
        self.record.start()

    def end(self, rest: str | None = None) -> None:
        super().end(rest)
        self.record.stop()


def kinds(clock: Profiled) -> dict[str, Any]:
    """Seconds of each kind, of the update that was recorded last."""
    if torch.cuda.is_available():
        return kernels(clock)
    result = dict.fromkeys([*KINDS, REST], 0.0)
    for one in clock.record.key_averages():
        result[_kind(one.key, KINDS)] += one.self_cpu_time_total / 1e6
    return {**result, OUTSIDE: max(0.0, clock.updates[-1]["seconds"] - sum(result.values()))}


def kernels(clock: Profiled) -> dict[str, Any]:
    """Seconds of a GPU's kernels before the update's passes and in them, and those that take most."""
    results: Any = clock.record.profiler
    events = [one for one in results.kineto_results.events() if one.device_type() != DeviceType.CPU]
    phases = clock.updates[-1]["phases"]
    passes = max(one.start_ns() + one.duration_ns() for one in events) - 1e9 * phases["update"]
    result: dict[str, Any] = {"phases": phases}
    for part, within in (("before", False), ("update", True)):
        spent: dict[str, float] = defaultdict(float)
        for one in events:
            if (one.start_ns() >= passes) == within:
                spent[one.name()] += one.duration_ns() / 1e9
        by_kind = dict.fromkeys([*KERNELS, REST], 0.0)
        for name, seconds in spent.items():
            by_kind[_kind(name, KERNELS)] += seconds
        most = sorted(spent.items(), key=lambda each: each[1], reverse=True)[:25]
        result[part] = by_kind | {"most": [[name[:200], seconds] for name, seconds in most]}
    return result


def _kind(name: str, known: Mapping[str, str]) -> str:
    return next((kind for kind, names in known.items() if re.search(names, name)), REST)


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
