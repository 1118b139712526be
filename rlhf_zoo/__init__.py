"""The RLHF model zoo of the Hugging Face stack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Comparison",
    "CompletionPair",
    "Limits",
    "Lineage",
    "PPOConfig",
    "PPOTrainer",
    "ProbeCallback",
    "RewardModel",
    "RolloutFindings",
    "Samples",
    "Snapshot",
    "Timeline",
    "TimelineRun",
    "ZooError",
    "__version__",
    "find_lineage",
    "make_card",
    "probe",
    "sample",
    "visible_text",
    "watch",
]

#: Public name -> the module that defines it, which is imported on first use.
_MODULES = {
    "CompletionPair": "app.engine",
    "Comparison": "app.engine",
    "Limits": "app.engine",
    "Lineage": "publishing.catalog.lineage",
    "PPOConfig": "ppo.config",
    "PPOTrainer": "ppo.trainer",
    "ProbeCallback": "evaluation.probe_callback",
    "RewardModel": "rewards",
    "RolloutFindings": "evaluation.rollouts",
    "Samples": "modeling.sampling.sampler",
    "Snapshot": "app.engine",
    "Timeline": "app.engine",
    "TimelineRun": "app.engine",
    "ZooError": "errors",
    "find_lineage": "publishing.catalog.lineage",
    "make_card": "publishing.cards.card",
    "probe": "evaluation.rollout_probe",
    "sample": "modeling.sampling.sampler",
    "visible_text": "app.engine",
    "watch": "evaluation.watch",
}

if TYPE_CHECKING:
    from .app.engine import Comparison, CompletionPair, Limits, Snapshot, Timeline, TimelineRun, visible_text
    from .errors import ZooError
    from .evaluation.probe_callback import ProbeCallback
    from .evaluation.rollout_probe import probe
    from .evaluation.rollouts import RolloutFindings
    from .evaluation.watch import watch
    from .modeling.sampling.sampler import Samples, sample
    from .ppo.config import PPOConfig
    from .ppo.trainer import PPOTrainer
    from .publishing.cards.card import make_card
    from .publishing.catalog.lineage import Lineage, find_lineage
    from .rewards import RewardModel


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
