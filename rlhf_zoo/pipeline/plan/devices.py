"""What devices hold and do: name -> memory, and the rates that their makers publish."""

import os
import re
from dataclasses import dataclass

from ...errors import ZooError
from ...plugins import did_you_mean

#: GiB, TFLOP/s of dense bfloat16 matrices (0: it has none), GB/s of memory: the makers' data sheets, sparsity left out.
CARDS: dict[str, tuple[float, float, float]] = {
    "b200": (180, 2250, 7700), "h200": (141, 989, 4800), "h100": (80, 989, 3350), "a100": (80, 312, 2039),
    "a100-40gb": (40, 312, 1555), "l40s": (48, 362, 864), "a6000": (48, 155, 768), "l4": (24, 121, 300),
    "a10g": (24, 70, 600), "rtx5090": (32, 209, 1792), "rtx4090": (24, 165, 1008), "rtx3090": (24, 71, 936),
    "t4": (16, 0, 320), "mi300x": (192, 1307, 5300),
}  # fmt: skip
#: Of a card: what is left for the driver's context, for libraries and for gaps between blocks is not planned with.
PLANNED = 0.92


@dataclass(frozen=True)
class Device:
    """count: how many of them, a process each. teraflops, bandwidth: 0 where nobody says."""

    name: str
    gib: float
    count: int = 1
    teraflops: float = 0
    bandwidth: float = 0
    bfloat16: bool = True
    cpu: bool = False

    @property
    def room(self) -> float:
        """GiB that a plan may fill."""
        return self.gib * PLANNED

    def __str__(self) -> str:
        return f"{f'{self.count} × ' if self.count > 1 else ''}{self.name} ({self.gib:g} GiB)"


def parse_device(text: str) -> Device:
    """NAME[:COUNT], where NAME is a card's, `cpu`, or a memory such as 24gb. Raises ZooError for anything else."""
    name, colon, number = text.strip().lower().partition(":")
    if colon and not (number.isdecimal() and 1 <= int(number) <= 1024):
        raise ZooError(f"--gpu is {text!r}, and behind the colon stands how many: write h100:8.")
    count = int(number) if colon else 1
    if name == "cpu":
        return processor(count)
    if name in CARDS:
        gib, teraflops, bandwidth = CARDS[name]
        return Device(name, gib, count, teraflops, bandwidth, bfloat16=teraflops > 0)
    if sized := re.fullmatch(r"(\d+(?:\.\d+)?)gi?b", name):
        return Device("GPU", float(sized[1]), count)
    raise ZooError(
        f"--gpu is {text!r}, no card that is known"
        + (did_you_mean(name, CARDS) or f": give one of {', '.join(CARDS)}, cpu, or a memory such as 24gb.")
    )


def processor(count: int = 1) -> Device:
    """This machine's processor, with all of its memory for each of `count` processes alike."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Device("cpu", round(memory / count, 1), count, bfloat16=False, cpu=True)


def here(*, use_cpu: bool = False) -> Device:
    """What a stage would train on, on this machine. use_cpu: as the stage's key."""
    import torch

    from ...modeling.devices import best_device

    if best_device(use_cpu=use_cpu).type != "cuda":
        return processor()
    found = torch.cuda.get_device_properties(0)
    plain = re.sub(r"[^a-z0-9]", "", found.name.lower())
    gib = round(found.total_memory / 2**30, 1)
    name = next((card for card in CARDS if card.replace("-", "") in plain), None)
    teraflops, bandwidth = CARDS[name][1:] if name else (0.0, 0.0)
    half = torch.cuda.is_bf16_supported()
    return Device(name or found.name, gib, 1, teraflops, bandwidth, bfloat16=half)
