"""Runs a command in several processes, started by `accelerate launch` or torchrun.

Only the main process (rank 0) writes and sends: it owns the run directory, the lock, the embedded Hub and the outbox.
The other processes compute their share, receive from the main process what it read, and write nothing. Until a command
calls `join`, it acts as a single process.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from ..errors import ZooError

#: How long the other processes wait for the main process.
PATIENCE = timedelta(hours=2)
#: torch's own optimizers. They update each number independently, so that a shard is updated like the full weight.
IN_SHARDS = ("adamw_torch_fused", "adamw_torch", "adagrad", "rmsprop", "sgd")
_joined = False


def started() -> int:
    """Returns how many processes of this command the launcher started, even if they have not joined."""
    number = os.environ.get("WORLD_SIZE", "1")
    return int(number) if number.isdecimal() else 1


def count() -> int:
    """Returns how many processes share the work; 1 before `join`."""
    return started() if _joined else 1


def check_shards(process_count: int, optim: str) -> None:
    """Checks that fsdp2 can shard the weights.

    Args:
        process_count: The number of processes.
        optim: The optimizer, by transformers' name.

    Raises:
        ZooError: There is only one process, or the optimizer does not support shards.
    """
    if optim not in IN_SHARDS:
        raise ZooError(f"fsdp2 does not support the optimizer {optim}: set optim to one of {', '.join(IN_SHARDS)}.")
    if process_count == 1:
        raise ZooError(
            "fsdp2 shards weights over several processes, but there is only one: start more with accelerate launch, or "
            "remove fsdp2."
        )


def rank() -> int:
    """Returns the number of this process, from 0."""
    return int(os.environ.get("RANK", "0")) if started() > 1 else 0


def first() -> bool:
    """Whether this is the main process, the only one that writes."""
    return rank() == 0 or not _joined


def join() -> None:
    """Joins the other processes to share the work. Does nothing if there is only one process.

    Raises:
        ZooError: The launcher's environment variables, such as RANK, are missing.
    """
    global _joined
    if started() == 1 or _joined:
        return
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ZooError(
            f"WORLD_SIZE is {started()}, but {missing[0]} is not set: start the processes with `accelerate launch` or "
            "torchrun, or unset WORLD_SIZE."
        )
    import torch

    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cuda:nccl,cpu:gloo"
    else:
        os.environ["ACCELERATE_USE_CPU"] = "true"  # otherwise accelerate assumes a single process
    torch.distributed.init_process_group(backend, timeout=PATIENCE)
    if rank() > 0:  # only the main process logs
        logging.getLogger("rlhf_zoo").setLevel(logging.ERROR)
    _joined = True


def shutdown() -> bool:
    """Leaves the process group, once all processes are here.

    Returns:
        Whether this is the main process, which continues alone.
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
    """Gathers a value from each process. All processes get all values.

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
    """Whether this process computes a batch.

    Args:
        number: The batch's number.
    """
    return number % count() == rank() if count() > 1 else True


def in_order(done: Mapping[int, Any]) -> list[Any]:
    """Gathers the results of batches that `is_my_batch` distributed over the processes.

    Args:
        done: This process's results, by batch number.

    Returns:
        All results, in the order of their numbers.
    """
    by_number = {number: result for results in gather(dict(done)) for number, result in results.items()}
    return [by_number[number] for number in sorted(by_number)]


def from_first(make: Callable[[], Any]) -> Any:
    """Calls a function in the main process only, and broadcasts its result.

    Args:
        make: The function.

    Returns:
        The function's result, in all processes.
    """
    if count() == 1:
        return make()
    from torch import distributed

    box = [make() if first() else None]
    distributed.broadcast_object_list(box)
    return box[0]


def wait() -> None:
    """Waits until all processes have called this function."""
    gather(None)


@contextmanager
def main_process_first() -> Iterator[None]:
    """Runs the context in the main process first, then in the others, which can read what it wrote."""
    if not first():
        wait()
    yield
    if first():
        wait()
