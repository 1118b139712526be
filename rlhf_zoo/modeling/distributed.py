"""Several processes that run one command, as `accelerate launch` and torchrun start them.

The first process owns all that is written and sent: run directory, lock, embedded Hub, outbox. The others compute their
share, receive from the first what it read, and write nothing. A command that has not joined is alone.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from ..errors import ZooError

#: How long the other processes wait for what the first one does.
PATIENCE = timedelta(hours=2)
#: torch's own optimizers, which update each number independently, so that a shard is updated like the whole.
IN_SHARDS = ("adamw_torch_fused", "adamw_torch", "adagrad", "rmsprop", "sgd")
_joined = False


def started() -> int:
    """Returns how many processes the launcher started of this command, whether they have joined or not."""
    number = os.environ.get("WORLD_SIZE", "1")
    return int(number) if number.isdecimal() else 1


def count() -> int:
    """Returns how many processes share the work of this one."""
    return started() if _joined else 1


def check_shards(several: int, optim: str) -> None:
    """Checks that fsdp2 can shard.

    Args:
        several: The number of processes.
        optim: The optimizer, by transformers' name.

    Raises:
        ZooError: The process is alone, or the optimizer has no sharded form.
    """
    if optim not in IN_SHARDS:
        raise ZooError(f"fsdp2 does not support the optimizer {optim}: set optim to one of {', '.join(IN_SHARDS)}.")
    if several == 1:
        raise ZooError(
            "fsdp2 shards weights over several processes, and there is only one: start more with accelerate launch, or "
            "remove fsdp2."
        )


def rank() -> int:
    """Returns the number of this process, from 0."""
    return int(os.environ.get("RANK", "0")) if started() > 1 else 0


def first() -> bool:
    """Whether this process is the one that writes."""
    return rank() == 0 or not _joined


def join() -> None:
    """Joins the other processes; from here on they work together. Does nothing in a process that is alone.

    Raises:
        ZooError: No launcher says which of the processes this one is.
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
        os.environ["ACCELERATE_USE_CPU"] = "true"  # otherwise accelerate takes each process to be alone
    torch.distributed.init_process_group(backend, timeout=PATIENCE)
    if rank() > 0:  # only the first process logs
        logging.getLogger("rlhf_zoo").setLevel(logging.ERROR)
    _joined = True


def shutdown() -> bool:
    """Leaves the process group, once all processes are here.

    Returns:
        Whether this process continues alone, which the first one does.
    """
    global _joined
    if count() == 1:
        return True
    from torch import distributed

    continues = first()
    wait()
    distributed.destroy_process_group()
    os.environ.update(WORLD_SIZE="1", RANK="0")
    _joined = False
    return continues


def gather(value: Any) -> list[Any]:
    """Gathers a value from each process, in all of them.

    Args:
        value: This process's value, which can be pickled.

    Returns:
        The values, by rank.
    """
    if count() == 1:
        return [value]
    from torch import distributed

    values: list[Any] = [None] * count()
    distributed.all_gather_object(values, value)
    return values


def is_my_batch(number: int) -> bool:
    """Whether this process does a batch.

    Args:
        number: The batch's number.
    """
    return number % count() == rank() if count() > 1 else True


def in_order(done: Mapping[int, Any]) -> list[Any]:
    """Gathers the results of batches that were shared out by `is_my_batch`.

    Args:
        done: This process's results, by batch number.

    Returns:
        All results, in the order of their numbers.
    """
    by_number = {number: result for results in gather(dict(done)) for number, result in results.items()}
    return [by_number[number] for number in sorted(by_number)]


def from_first(make: Callable[[], Any]) -> Any:
    """Calls a function in the first process only.

    Args:
        make: The function.

    Returns:
        What it returns, in all processes.
    """
    if count() == 1:
        return make()
    from torch import distributed

    box = [make() if first() else None]
    distributed.broadcast_object_list(box)
    return box[0]


def wait() -> None:
    """Waits until all processes are here."""
    gather(None)


@contextmanager
def main_process_first() -> Iterator[None]:
    """Lets the first process through, then the others, which find what it has written."""
    if not first():
        wait()
    yield
    if first():
        wait()
