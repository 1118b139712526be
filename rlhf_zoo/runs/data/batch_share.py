"""The share that one of several processes has of a batch."""

import math
from collections.abc import Mapping
from typing import Any

from ...errors import ZooError
from ...modeling import distributed


def share_of_batch(said: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """The keys of the batch of one of several processes: what a recipe says is of all together.

    So their number changes no result. said: the stage's keys, with their defaults.

    Raises ZooError where the batch cannot be divided, and for keys whose meaning depends on the number of processes.
    """
    number = distributed.count()
    if number == 1:
        return {}
    alike = {"train_sampling_strategy": ("random", "sequential", "group_by_length")}
    for key, only in alike.items():
        if key in said and said[key] not in only:
            raise ZooError(
                f"{key} of the stage {stage} is {said[key]!r}, which {number} processes would each do with rows of "
                f"their own: set it to {' or '.join(map(repr, only))}, or run it in one process."
            )
    size, steps, evaluated = (
        said[key]
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
                f"{key} of the stage {stage} is {said[key]}, of all processes together, and there are {number}: "
                "give a multiple, or start another number of them."
            )
    rows, accumulated = divided(size, steps, number)
    return {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": accumulated,
        "per_device_eval_batch_size": evaluated // number,
    }


def divided(size: int, steps: int, number: int) -> tuple[int, int]:
    """Rows and accumulation steps of one of `number` processes; of a batch that cannot be divided, rounded up."""
    fewer = _fewer(size, steps, number)
    return -(-size * fewer // number), steps // fewer


def _fewer(size: int, steps: int, number: int) -> int:
    """By how much accumulation steps are divided: only where the size cannot be."""
    return 1 if size % number == 0 else math.gcd(steps, number)
