"""Finds the keys of a JSON document that docs/json.md does not explain."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "json.md"
#: Objects whose keys are names: of judges, data sets, probes, packages, methods or models.
KEYED_BY_NAME = {
    "judges", "pass_at", "votes", "noise", "versions", "methods", "equal_kl", "equal_compute", "models", "fits",
    "skipped", "tasks", "metrics", "grid", "settings", "majority_at", "extra_metrics", "commands", "defects",
}  # fmt: skip


def unexplained(document: Any) -> list[str]:
    """Returns the keys that docs/json.md does not have between backticks, each once, in order."""
    explained = {word for quoted in re.findall(r"`([^`]+)`", PAGE.read_text()) for word in re.split(r"\W+", quoted)}
    return list(dict.fromkeys(key for key in _keys(document) if key not in explained))


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _keys(item)
    elif isinstance(value, dict):
        for key, child in value.items():
            yield key
            yield from _keys([*child.values()] if key in KEYED_BY_NAME and isinstance(child, dict) else child)
