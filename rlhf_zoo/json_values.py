"""What a value is that was read from JSON: a file of this machine's, or what a stranger published."""

import re
import sys
from collections.abc import Mapping
from typing import Any, TypeGuard

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def finite(value: Any) -> TypeGuard[float]:
    """Whether it is a number that a float can be: not true, NaN, an infinity, nor an integer beyond all floats."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def number(value: Any) -> float | None:
    return float(value) if finite(value) else None


def whole(value: Any) -> int | None:
    """It, if it is a whole number of 64 bits."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else None


def hub_id(name: Any) -> str | None:
    """It, if a Hub could have it as the id of a repository; not a path on this machine."""
    return name if isinstance(name, str) and _REPO_ID.fullmatch(name) else None


def at(value: Any, *path: str) -> Any:
    """What stands at a path of keys, None where nothing does."""
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
