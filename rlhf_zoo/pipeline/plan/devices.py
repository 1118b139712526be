"""Describes devices by memory and speed: GPUs by their makers' data sheets, and the devices of this machine."""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from ...errors import ZooError
from ...plugins import did_you_mean

#: Name -> memory in GiB, dense bfloat16 TFLOP/s (0 if the GPU has no bfloat16), and memory bandwidth in GB/s.
GPUS: dict[str, tuple[float, float, float]] = {
    "b200": (180, 2250, 7700), "h200": (141, 989, 4800), "h100": (80, 989, 3350), "a100": (80, 312, 2039),
    "a100-40gb": (40, 312, 1555), "l40s": (48, 362, 864), "a6000": (48, 155, 768), "l4": (24, 121, 300),
    "a10g": (24, 70, 600), "rtx5090": (32, 209, 1792), "rtx4090": (24, 165, 1008), "rtx3090": (24, 71, 936),
    "t4": (16, 0, 320), "mi300x": (192, 1307, 5300),
}  # fmt: skip
#: The share of a device's memory that a plan may fill. The driver, libraries and fragmentation need the rest.
USABLE_SHARE = 0.92


@dataclass(frozen=True)
class Device:
    """The devices of a run, all of the same kind.

    Attributes:
        name: A name in `GPUS`, "cpu", torch's name of another GPU, or "GPU" if only a memory size is known.
        gib: Memory of each device, in GiB.
        count: Number of devices. Each has its own process.
        teraflops: Dense bfloat16 TFLOP/s; 0 if unknown, or if the device has no bfloat16.
        bandwidth: Memory bandwidth in GB/s; 0 if unknown.
        bfloat16: Whether the device computes in bfloat16.
        cpu: Whether the device is a CPU.
    """

    name: str
    gib: float
    count: int = 1
    teraflops: float = 0
    bandwidth: float = 0
    bfloat16: bool = True
    cpu: bool = False

    @property
    def usable_gib(self) -> float:
        """GiB of each device that a plan may fill."""
        return self.gib * USABLE_SHARE

    def __str__(self) -> str:
        return f"{f'{self.count} × ' if self.count > 1 else ''}{self.name} ({self.gib:g} GiB)"


def parse_device(text: str) -> Device:
    """Parses the value of --gpu.

    Args:
        text: NAME[:COUNT], where NAME is a key of `GPUS`, `cpu`, or a memory size such as 24gb.

    Raises:
        ZooError: The text has another form, or the device is unknown.
    """
    name, colon, count_text = text.strip().lower().partition(":")
    if colon and not (count_text.isdecimal() and 1 <= int(count_text) <= 1024):
        raise ZooError(f"--gpu is {text!r}: write a number of devices after the colon, such as h100:8.")
    count = int(count_text) if colon else 1
    if name == "cpu":
        return cpu_device(count)
    if name in GPUS:
        gib, teraflops, bandwidth = GPUS[name]
        return Device(name, gib, count, teraflops, bandwidth, bfloat16=teraflops > 0)
    if size_match := re.fullmatch(r"(\d+(?:\.\d+)?)gi?b", name):
        return Device("GPU", float(size_match[1]), count)
    raise ZooError(
        f"--gpu is {text!r}, an unknown device"
        + (did_you_mean(name, GPUS) or f": use one of {', '.join(GPUS)}, cpu, or a memory size such as 24gb.")
    )


def cpu_device(count: int = 1) -> Device:
    """Returns this machine's CPU as a device.

    Args:
        count: Number of processes. Each gets an equal share of the memory.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Device("cpu", round(memory / count, 1), count, bfloat16=False, cpu=True)


def may_have_accelerator() -> bool:
    """Whether this machine may have a GPU; outside Linux always true. Does not import torch, which takes seconds."""
    devices = (*Path("/dev").glob("nvidia*"), Path("/dev/kfd"), Path("/dev/dxg"))
    return sys.platform != "linux" or any(path.exists() for path in devices)


def find_gpu(product_name: str, gib: float) -> str | None:
    """Finds a GPU in `GPUS` by the driver's name for it, such as "NVIDIA A100-SXM4-40GB".

    Args:
        product_name: The driver's name.
        gib: Memory in GiB, which distinguishes GPUs that share a name.

    Returns:
        The key of `GPUS`; None if the GPU is not in it.
    """
    patterns = {gpu: re.sub(r"(?<=[a-z])(?=\d)", " ?", gpu.partition("-")[0]) for gpu in GPUS}
    matches = [gpu for gpu, pattern in patterns.items() if re.search(rf"\b{pattern}\b", product_name.lower())]
    return min(matches, key=lambda gpu: abs(GPUS[gpu][0] - gib), default=None)


def local_device(*, use_cpu: bool = False) -> Device:
    """Returns the device of this machine on which a stage would train. A GPU without CUDA or ROCm counts as the CPU.

    Args:
        use_cpu: Value of the stage's key `use_cpu`.
    """
    if use_cpu or not may_have_accelerator():
        return cpu_device()
    import torch

    from ...modeling.devices import best_device

    if best_device(use_cpu=use_cpu).type != "cuda":
        return cpu_device()
    properties = torch.cuda.get_device_properties(0)
    gib = round(properties.total_memory / 2**30, 1)
    name = find_gpu(properties.name, gib)
    teraflops, bandwidth = GPUS[name][1:] if name else (0.0, 0.0)
    bfloat16 = torch.cuda.is_bf16_supported()
    return Device(name or properties.name, gib, 1, teraflops, bandwidth, bfloat16=bfloat16)
