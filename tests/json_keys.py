"""The keys of a JSON document that docs/json.md does not name."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "json.md"
#: Below these the keys are names: of judges, data sets, probes, packages, methods and models.
NAMED = {
    "judges", "pass_at", "votes", "noise", "versions", "methods", "equal_kl", "equal_compute", "models", "fits",
    "skipped", "tasks", "metrics", "grid", "settings", "majority_at", "extra_metrics", "commands", "defects",
}  # fmt: skip


def unexplained(document: Any) -> list[str]:
    """Those that do not stand there between backticks, each once, in order."""
    said = {word for quoted in re.findall(r"`([^`]+)`", PAGE.read_text()) for word in re.split(r"\W+", quoted)}
    return list(dict.fromkeys(key for key in _keys(document) if key not in said))


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for one in value:
            yield from _keys(one)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield key
            if key in NAMED and isinstance(one, dict):
                for each in one.values():
                    yield from _keys(each)
            else:
                yield from _keys(one)
