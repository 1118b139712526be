"""Reads estimates from the JSON documents of a run."""

from collections.abc import Mapping
from typing import Any

from ...fileio import get_nested, is_finite


def estimate_at(document: Mapping[str, Any], *path: str) -> Mapping[str, Any] | None:
    """Returns the estimate {value, ci95, n} at a path of keys; None if it is missing or its value is not finite.

    Args:
        document: A JSON document, such as evaluation.json.
        *path: The keys that lead to the estimate.
    """
    estimate = get_nested(document, *path)
    return estimate if isinstance(estimate, Mapping) and is_finite(estimate.get("value")) else None


def is_better_than_ppo(entry: Mapping[str, Any]) -> bool:
    """Returns whether a simple filter is shown to score higher than PPO by the judge.

    Args:
        entry: The filter's entry in evaluation.json. Its `ppo_minus_this` is paired by prompt.
    """
    difference = estimate_at(entry, "ppo_minus_this")
    return difference is not None and difference["ci95"][1] < 0
