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
