"""Predicts the duration of an update from its `Work`, at measured rates.

The rates are in rates.json, which benchmarks/calibrate.py writes from the results of `make bench` and `make gpu`. For
a GPU that was not measured, all rates except those of sampling are scaled by the makers' TFLOP/s.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .devices import GPUS, Device
from .result import Duration, Work

RATES_FILE = Path(__file__).parent / "rates.json"


@dataclass(frozen=True)
class Rates:
    """Measured seconds per unit of `Work` on a device.

    Attributes:
        device: "cpu" or a name in `GPUS`.
        machine: The machine that was measured.
        precision: "float32" or "bfloat16".
        source: The file with the measurements.
        points: Number of workloads to which the rates were fitted.
        mean_error: Mean relative error of an update's duration at a point left out of the fit; None if there are fewer
            than three points.
        largest_error: Largest relative error at a point left out of the fit; None if there are fewer than three points.
        forward: Seconds per FLOP of a forward pass.
        head: Seconds per FLOP of the head in forward passes.
        update: Seconds per FLOP of forward and backward passes.
        update_head: Seconds per FLOP of the head in forward and backward passes.
        decode: Seconds per FLOP of sampling.
        layer_step: Seconds per layer and sampled token, for launching kernels.
        parameter_update: Seconds per update of a parameter by the optimizer.
    """

    device: str
    machine: str
    precision: str
    source: str
    points: int
    mean_error: float | None
    largest_error: float | None
    forward: float
    head: float
    update: float
    update_head: float
    decode: float
    layer_step: float
    parameter_update: float

    def phases(self, work: Work) -> dict[str, float]:
        """Predicts the seconds of each phase.

        Args:
            work: The computations of the update.
        """
        return {
            "sample": self.forward * work.prefill + self.decode * work.decode + self.layer_step * work.layer_steps,
            "read": self.forward * work.forward_only + self.head * work.forward_only_head,
            "update": self.update * work.update
            + self.update_head * work.update_head
            + self.parameter_update * work.parameter_updates,
        }


@cache
def measured_rates() -> Sequence[Rates]:
    """Returns the rates of rates.json."""
    return [Rates(**entry) for entry in json.loads(RATES_FILE.read_text(encoding="utf-8"))["rates"]]


def predict_duration(work: Work, device: Device, *, bf16: bool) -> Duration | None:
    """Predicts the duration of an update.

    Args:
        work: The computations of the update.
        device: The devices of the run.
        bf16: Whether the update computes in bfloat16.

    Returns:
        The prediction; None if no measured rates apply to the device.
    """
    precision = "bfloat16" if bf16 else "float32"
    candidates = [rates for rates in measured_rates() if rates.precision == precision]
    rates = next((rates for rates in candidates if rates.device == device.name), None)
    scale, scaling_note = 1.0, ""
    if rates is None:
        rates = next((rates for rates in candidates if rates.device in GPUS), None)
        if rates is None or not device.teraflops:  # a CPU, or a GPU whose TFLOP/s are unknown
            return None
        scale = GPUS[rates.device][1] / device.teraflops
        scaling_note = f"; scaled to {device.name} by the makers' TFLOP/s, which is not verified"
    # Sampling is not scaled, because memory bandwidth and kernel launches limit it, not TFLOP/s.
    phases = {name: seconds * (1 if name == "sample" else scale) for name, seconds in rates.phases(work).items()}
    # Sampling cannot be faster than the transfer of weights and cache from memory.
    transfer_seconds = work.bytes_read / (device.bandwidth * 1e9) if device.bandwidth else 0.0
    exclusion = "" if device.count == 1 else "; communication between devices is not included"
    return Duration(
        {**phases, "sample": max(phases["sample"], transfer_seconds)}, _describe_rates(rates) + scaling_note + exclusion
    )


def _describe_rates(rates: Rates) -> str:
    source = f"from rates of {rates.machine} in {rates.precision} ({rates.source})"
    if rates.mean_error is None or rates.largest_error is None:
        return f"{source}, fitted to a single workload, so the error is unknown"
    return f"{source}, ±{rates.mean_error:.0%} on average and ±{rates.largest_error:.0%} at most (leave-one-out)"
