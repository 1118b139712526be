"""Several processes that are one command, as `accelerate launch` and torchrun start them.

The first one owns all that is written and sent: run directory, lock, embedded Hub, outbox. The others compute their
share, take from the first what it found out, and write nothing. A command that has not joined is alone.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from ..errors import ZooError

#: For what the first process does while the others wait.
PATIENCE = timedelta(hours=2)
#: torch's own optimizers, which change each number by itself.
IN_SHARDS = ("adamw_torch_fused", "adamw_torch", "adagrad", "rmsprop", "sgd")
_joined = False


def started() -> int:
    """How many processes the launcher started of this command, whether they have joined or not."""
    number = os.environ.get("WORLD_SIZE", "1")
    return int(number) if number.isdecimal() else 1


def count() -> int:
    """How many processes work on what this one does."""
    return started() if _joined else 1


def check_shards(several: int, optim: str) -> None:
    """Raises ZooError where fsdp2 has no other process, of so many, or an optimizer that knows no shards."""
    if optim not in IN_SHARDS:
        raise ZooError(f"fsdp2 has no shards for the optimizer {optim}: give optim one of {', '.join(IN_SHARDS)}.")
    if several == 1:
        raise ZooError(
            "fsdp2 shards weights over several processes, and this one is alone: start more with accelerate launch, or "
            "leave it out."
        )


def rank() -> int:
    return int(os.environ.get("RANK", "0")) if started() > 1 else 0


def first() -> bool:
    """Whether this process writes."""
    return rank() == 0 or not _joined


def join() -> None:
    """Meets the other processes; from here on they work together. Does nothing in one that is alone.

    Raises ZooError where no launcher says which of them this one is.
    """
    global _joined
    if started() == 1 or _joined:
        return
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ZooError(
            f"WORLD_SIZE is {started()} and {missing[0]} is not set: start the processes with `accelerate launch` or "
            "torchrun, or unset WORLD_SIZE."
        )
    import torch

    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cuda:nccl,cpu:gloo"
    else:
        os.environ["ACCELERATE_USE_CPU"] = "true"  # or each process would think that it is alone
    torch.distributed.init_process_group(backend, timeout=PATIENCE)
    if rank() > 0:  # the first one speaks for all
        logging.getLogger("rlhf_zoo").setLevel(logging.ERROR)
    _joined = True


def part() -> bool:
    """Ends the work together, once all are here. Returns whether this one goes on, alone: the first one does."""
    global _joined
    if count() == 1:
        return True
    from torch import distributed

    goes_on = first()
    wait()
    distributed.destroy_process_group()
    os.environ.update(WORLD_SIZE="1", RANK="0")
    _joined = False
    return goes_on


def gathered(value: Any) -> list[Any]:
    """A value of each process, in all of them."""
    if count() == 1:
        return [value]
    from torch import distributed

    seen: list[Any] = [None] * count()
    distributed.all_gather_object(seen, value)
    return seen


def is_my_batch(number: int) -> bool:
    """Whether this process does the batch of this number."""
    return number % count() == rank() if count() > 1 else True


def in_order(done: Mapping[int, Any]) -> list[Any]:
    """What all processes made of the batches dealt to them, by number."""
    whole = {number: made for each in gathered(dict(done)) for number, made in each.items()}
    return [whole[number] for number in sorted(whole)]


def from_first(make: Callable[[], Any]) -> Any:
    """What `make` returns in the first process, in all of them."""
    if count() == 1:
        return make()
    from torch import distributed

    found = [make() if first() else None]
    distributed.broadcast_object_list(found)
    return found[0]


def wait() -> None:
    """Until all processes are here."""
    gathered(None)


@contextmanager
def main_process_first() -> Iterator[None]:
    """The first process goes through, then the others, which find what it has written."""
    if not first():
        wait()
    yield
    if first():
        wait()
