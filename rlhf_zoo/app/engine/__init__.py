"""Samples an SFT and a PPO policy side by side, at one checkpoint or at every checkpoint of a run."""

from .cache import ModelCache
from .compare import Comparison, Sampling
from .limits import Limits
from .results import CompletionPair, PolicyCompletion, Snapshot
from .rules import RuleRewards
from .shown_text import visible_text
from .timeline import CheckpointResult, Timeline, TimelinePoint, TimelineRun

__all__ = [
    "CheckpointResult",
    "Comparison",
    "CompletionPair",
    "Limits",
    "ModelCache",
    "PolicyCompletion",
    "RuleRewards",
    "Sampling",
    "Snapshot",
    "Timeline",
    "TimelinePoint",
    "TimelineRun",
    "visible_text",
]
