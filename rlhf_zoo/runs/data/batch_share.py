"""Divides the batch of a recipe among the processes that train on it."""

import math
from collections.abc import Mapping
from typing import Any

from ...errors import ZooError
from ...modeling import distributed


def share_of_batch(keys: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """Divides the batch keys of a recipe among the processes, so that no result depends on the number of processes.

    Args:
        keys: The stage's keys, with their defaults. They describe the batch of all processes together.
        stage: Name of the stage.

    Returns:
        The keys for one process; {} if there is only one.

    Raises:
        ZooError: The batch cannot be divided, or a key's meaning depends on the number of processes.
    """
    process_count = distributed.process_count()
    if process_count == 1:
        return {}
    strategy, strategies = keys.get("train_sampling_strategy"), ("random", "sequential", "group_by_length")
    if "train_sampling_strategy" in keys and strategy not in strategies:
        raise ZooError(
            f"train_sampling_strategy of the stage {stage} is {strategy!r}, which each of {process_count} processes "
            f"would apply to its own rows: set it to {' or '.join(map(repr, strategies))}, or start a single process."
        )
    size, steps, eval_size = (
        keys[key]
        for key in ("per_device_train_batch_size", "gradient_accumulation_steps", "per_device_eval_batch_size")
    )
    divisor = _steps_divisor(size, steps, process_count)
    remainders = {
        "per_device_train_batch_size": size % (process_count // divisor),
        "per_device_eval_batch_size": eval_size % process_count,
    }
    for key, remainder in remainders.items():
        if remainder:
            raise ZooError(
                f"{key} of the stage {stage} is {keys[key]}, for all {process_count} processes together: set a "
                f"multiple of {process_count}, or start another number of processes."
            )
    process_size, accumulation_steps = divide_batch(size, steps, process_count)
    return {
        "per_device_train_batch_size": process_size,
        "gradient_accumulation_steps": accumulation_steps,
        "per_device_eval_batch_size": eval_size // process_count,
    }


def divide_batch(size: int, accumulation_steps: int, process_count: int) -> tuple[int, int]:
    """Divides a batch among processes, rounding up if it does not divide evenly.

    Args:
        size: Rows of a micro-batch over all processes.
        accumulation_steps: Number of accumulation steps.
        process_count: Number of processes.

    Returns:
        Rows of a micro-batch and number of accumulation steps, for one process.
    """
    divisor = _steps_divisor(size, accumulation_steps, process_count)
    return -(-size * divisor // process_count), accumulation_steps // divisor


def _steps_divisor(size: int, accumulation_steps: int, process_count: int) -> int:
    """Returns by how much to divide the accumulation steps: more than 1 only if `size` cannot be divided evenly."""
    return 1 if size % process_count == 0 else math.gcd(accumulation_steps, process_count)
