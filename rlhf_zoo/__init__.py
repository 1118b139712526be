"""The RLHF model zoo of the Hugging Face stack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Compared",
    "Comparison",
    "Lineage",
    "PPOConfig",
    "PPOTrainer",
    "RewardModel",
    "Samples",
    "ZooError",
    "__version__",
    "find_lineage",
    "make_card",
    "sample",
]

_WHERE = {
    "Compared": "comparison",
    "Comparison": "comparison",
    "Lineage": "hub.lineage",
    "PPOConfig": "ppo.config",
    "PPOTrainer": "ppo.trainer",
    "RewardModel": "rewards",
    "Samples": "sampling",
    "ZooError": "errors",
    "find_lineage": "hub.lineage",
    "make_card": "hub.card",
    "sample": "sampling",
}

if TYPE_CHECKING:
    from .comparison import Compared, Comparison
    from .errors import ZooError
    from .hub.card import make_card
    from .hub.lineage import Lineage, find_lineage
    from .ppo.config import PPOConfig
    from .ppo.trainer import PPOTrainer
    from .rewards import RewardModel
    from .sampling import Samples, sample


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_WHERE[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
