"""How long an update takes: rates that were measured on some machine, applied to what it computes.

The rates are those of rates.json, which benchmarks/calibrate.py makes of what `make bench` and `make gpu` measured. On
a card that nobody measured they are scaled by what the makers publish.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .devices import CARDS, Device
from .estimate import Work

RATES = Path(__file__).parent / "rates.json"


@dataclass(frozen=True)
class Rates:
    """Seconds for each FLOP of a kind, for a layer's step of sampling, and for a number that an optimizer step changes.

    device: "cpu" or a card; points: how many shapes of work they were fitted to; error, largest: mean and largest
    relative error of a whole update at a point that the fit leaves out, None of a single one. source: the file.
    """

    device: str
    machine: str
    precision: str
    source: str
    points: int
    error: float | None
    largest: float | None
    forward: float
    head: float
    update: float
    update_head: float
    decode: float
    layer_step: float
    trained: float

    def phases(self, work: Work) -> dict[str, float]:
        """Seconds by phase."""
        return {
            "sample": self.forward * work.prefill + self.decode * work.decode + self.layer_step * work.steps,
            "read": self.forward * work.passes + self.head * work.head,
            "update": self.update * work.update + self.update_head * work.update_head + self.trained * work.trained,
        }


@dataclass(frozen=True)
class Duration:
    """seconds: of an update or step, by phase. said: on what that rests, and how far it may be off."""

    seconds: Mapping[str, float]
    said: str

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@cache
def measured() -> Sequence[Rates]:
    """rates.json."""
    return [Rates(**one) for one in json.loads(RATES.read_text(encoding="utf-8"))["rates"]]


def duration(work: Work, device: Device, *, half: bool) -> Duration | None:
    """None where no rates are known that could be applied to the device."""
    precision = "bfloat16" if half else "float32"
    rates = [one for one in measured() if one.precision == precision]
    found = next((one for one in rates if one.device == device.name), None)
    factor, scaled = 1.0, ""
    if found is None:  # of a cpu that nobody measured no teraflops are said, so it ends here
        found = next((one for one in rates if one.device in CARDS), None)
        if found is None or not device.teraflops:
            return None
        factor = CARDS[found.device][1] / device.teraflops
        scaled = f"; scaled to a {device.name} by published rates, which nobody has checked"
    spent = {name: each * (1 if name == "sample" else factor) for name, each in found.phases(work).items()}
    # Sampling takes at least as long as reading weights and cache from memory.
    slowest = work.read / (device.bandwidth * 1e9) if device.bandwidth else 0.0
    alone = "" if device.count == 1 else "; what devices send each other is not in it"
    return Duration({**spent, "sample": max(spent["sample"], slowest)}, _said(found) + scaled + alone)


def _said(rates: Rates) -> str:
    where = f"by rates of {rates.machine} in {rates.precision} ({rates.source})"
    if rates.error is None or rates.largest is None:
        return f"{where}, from {rates.points} shape of work alone, so its error is not known"
    return (
        f"{where}, off by {rates.error:.0%} on average and at most {rates.largest:.0%} at {rates.points} points, each "
        "left out of the fit in turn"
    )
