"""The RLHF model zoo of the Hugging Face stack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Compared",
    "Comparison",
    "Limits",
    "Lineage",
    "PPOConfig",
    "PPOTrainer",
    "RewardModel",
    "Samples",
    "Snapshot",
    "Timeline",
    "TimelineRun",
    "ZooError",
    "__version__",
    "find_lineage",
    "make_card",
    "sample",
    "visible_text",
    "watch",
]

_WHERE = {
    "Compared": "comparison",
    "Comparison": "comparison",
    "Limits": "comparison",
    "Lineage": "catalog.lineage",
    "PPOConfig": "ppo.config",
    "PPOTrainer": "ppo.trainer",
    "RewardModel": "rewards",
    "Samples": "sampling",
    "Snapshot": "comparison",
    "Timeline": "comparison",
    "TimelineRun": "comparison",
    "ZooError": "errors",
    "find_lineage": "catalog.lineage",
    "make_card": "release.card",
    "sample": "sampling",
    "visible_text": "comparison",
    "watch": "evaluation.watch",
}

if TYPE_CHECKING:
    from .catalog.lineage import Lineage, find_lineage
    from .comparison import (
        Compared,
        Comparison,
        Limits,
        Snapshot,
        Timeline,
        TimelineRun,
        visible_text,
    )
    from .errors import ZooError
    from .evaluation.watch import watch
    from .ppo.config import PPOConfig
    from .ppo.trainer import PPOTrainer
    from .release.card import make_card
    from .rewards import RewardModel
    from .sampling import Samples, sample


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_WHERE[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
