"""Shares the work of a command among the processes that `accelerate launch` or torchrun started.

Only the main process (rank 0) writes files and publishes: it owns the run directory, the lock, the embedded Hub and the
outbox. The other processes compute their share, receive data that the main process read, and write nothing. Until a
command calls `join`, these functions behave as in a single process.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from ..errors import ZooError

# How long processes wait for each other. The main process may have to download models or wait for a lock.
_TIMEOUT = timedelta(hours=2)
#: The optimizers that support sharding: torch's own, which update each element of a weight independently.
SHARDABLE_OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "adagrad", "rmsprop", "sgd")
_joined = False


def launched_count() -> int:
    """Returns the number of processes that the launcher started for this command, joined or not."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    return int(world_size) if world_size.isdecimal() else 1


def process_count() -> int:
    """Returns the number of processes that share the work; 1 before `join`."""
    return launched_count() if _joined else 1


def check_can_shard(num_processes: int, optim: str) -> None:
    """Checks that fsdp2 can shard the weights.

    Args:
        num_processes: The number of processes.
        optim: transformers' name of the optimizer.

    Raises:
        ZooError: There is only one process, or the optimizer does not support sharding.
    """
    if optim not in SHARDABLE_OPTIMIZERS:
        raise ZooError(
            f"fsdp2 does not support the optimizer {optim}: set optim to one of {', '.join(SHARDABLE_OPTIMIZERS)}."
        )
    if num_processes == 1:
        raise ZooError(
            "fsdp2 shards weights over several processes, but there is only one: start more with accelerate launch, or "
            "remove fsdp2."
        )


def rank() -> int:
    """Returns the index of this process among those that the launcher started."""
    return int(os.environ.get("RANK", "0")) if launched_count() > 1 else 0


def is_main_process() -> bool:
    """Whether this process may write: it is the main process, or it has not joined the others."""
    return rank() == 0 or not _joined


def join() -> None:
    """Joins the other processes to share the work. Does nothing in a single process, or if called again.

    Raises:
        ZooError: The launcher's environment variables, such as RANK, are missing.
    """
    global _joined
    if launched_count() == 1 or _joined:
        return
    if missing_variables := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ZooError(
            f"WORLD_SIZE is {launched_count()}, but {missing_variables[0]} is not set: start the processes with "
            "`accelerate launch` or torchrun, or unset WORLD_SIZE."
        )
    import torch

    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cuda:nccl,cpu:gloo"
    else:
        os.environ["ACCELERATE_USE_CPU"] = "true"  # otherwise accelerate assumes a single process
    torch.distributed.init_process_group(backend, timeout=_TIMEOUT)
    if rank() > 0:  # only the main process logs
        logging.getLogger("rlhf_zoo").setLevel(logging.ERROR)
    _joined = True


def leave() -> bool:
    """Leaves the process group once all processes have called this function.

    Returns:
        Whether this is the main process, which continues alone.
    """
    global _joined
    if process_count() == 1:
        return True
    from torch import distributed

    continues = is_main_process()
    wait()
    distributed.destroy_process_group()
    os.environ.update(WORLD_SIZE="1", RANK="0")
    _joined = False
    return continues


def gather(value: Any) -> list[Any]:
    """Gathers a value from each process. All processes get all values.

    Args:
        value: This process's value, which must be picklable.

    Returns:
        The values, in order of rank.
    """
    if process_count() == 1:
        return [value]
    from torch import distributed

    values: list[Any] = [None] * process_count()
    distributed.all_gather_object(values, value)
    return values


def is_my_batch(number: int) -> bool:
    """Whether this process computes the batch with this number."""
    return process_count() == 1 or number % process_count() == rank()


def gather_in_order(results: Mapping[int, Any]) -> list[Any]:
    """Gathers the results of batches that `is_my_batch` distributed among the processes.

    Args:
        results: This process's results, {batch number: result}.

    Returns:
        The results of all processes, in order of batch number.
    """
    by_number = {number: result for part in gather(dict(results)) for number, result in part.items()}
    return [by_number[number] for number in sorted(by_number)]


def call_on_main_process(function: Callable[[], Any]) -> Any:
    """Calls a function in the main process only, and broadcasts its result to the others.

    Returns:
        The result, in all processes.
    """
    if process_count() == 1:
        return function()
    from torch import distributed

    results = [function() if is_main_process() else None]
    distributed.broadcast_object_list(results)
    return results[0]


def wait() -> None:
    """Waits until all processes have called this function."""
    gather(None)


@contextmanager
def main_process_first() -> Iterator[None]:
    """Runs the code of this context in the main process first, so that the others can read its files."""
    if not is_main_process():
        wait()
    yield
    if is_main_process():
        wait()
