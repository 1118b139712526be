"""The share of a batch that one of several processes trains on."""

import math
from collections.abc import Mapping
from typing import Any

from ...errors import ZooError
from ...modeling import distributed


def share_of_batch(keys: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """Divides the batch keys of a recipe among the processes, so that their number changes no result.

    Args:
        keys: The stage's keys, with their defaults. They describe the batch of all processes together.
        stage: Name of the stage.

    Returns:
        The keys for one process; {} if there is only one.

    Raises:
        ZooError: The batch cannot be divided, or a key's meaning depends on the number of processes.
    """
    number = distributed.process_count()
    if number == 1:
        return {}
    allowed = {"train_sampling_strategy": ("random", "sequential", "group_by_length")}
    for key, only in allowed.items():
        if key in keys and keys[key] not in only:
            raise ZooError(
                f"{key} of the stage {stage} is {keys[key]!r}, which each of {number} processes would apply to "
                f"its own rows: set it to {' or '.join(map(repr, only))}, or run it in one process."
            )
    size, steps, evaluated = (
        keys[key]
        for key in ("per_device_train_batch_size", "gradient_accumulation_steps", "per_device_eval_batch_size")
    )
    fewer = _fewer(size, steps, number)
    wrong = {
        "per_device_train_batch_size": size % (number // fewer),
        "per_device_eval_batch_size": evaluated % number,
    }
    for key, left in wrong.items():
        if left:
            raise ZooError(
                f"{key} of the stage {stage} is {keys[key]}, of all processes together, and there are {number}: "
                "set a multiple, or start another number of processes."
            )
    rows, accumulated = divided(size, steps, number)
    return {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": accumulated,
        "per_device_eval_batch_size": evaluated // number,
    }


def divided(size: int, steps: int, number: int) -> tuple[int, int]:
    """Divides a batch among processes, rounding up if it does not divide evenly.

    Args:
        size: Rows of a micro-batch, of all processes together.
        steps: Accumulation steps.
        number: Number of processes.

    Returns:
        Rows and accumulation steps of one process.
    """
    fewer = _fewer(size, steps, number)
    return -(-size * fewer // number), steps // fewer


def _fewer(size: int, steps: int, number: int) -> int:
    """Returns the divisor of the accumulation steps: above 1 only if the size cannot be divided."""
    return 1 if size % number == 0 else math.gcd(steps, number)
