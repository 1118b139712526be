"""Fixtures that every test may use."""

import signal
from collections.abc import Sequence
from typing import Any

# A shell that starts this in the background leaves SIGINT ignored, and every child would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["hub_fixture", "real_data"]

#: They begin first, so that no worker is left with a long file when the others have finished. Longest first.
LONGEST = (
    "test_faults.py",
    "test_pipeline.py",
    "test_votes_train.py",
    "test_card_commands.py",
    "test_readme.py",
    "test_ablate.py",
    "test_publish.py",
    "test_product_remarks_run.py",
    "test_ensemble_command.py",
    "test_reproduce.py",
)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Whole files change places; within one, tests keep their order."""
    items.sort(key=lambda item: _place(item.path.name, LONGEST))


def _place(name: str, longest: Sequence[str]) -> int:
    return longest.index(name) if name in longest else len(longest)
