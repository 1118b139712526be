"""Rewards: models and functions that score completions. The trainer maximizes their scores."""

from .composed import RewardFunction, Rewards, RewardScores
from .ensemble import RewardEnsemble
from .form import FormatMatch, Length, Repetition, SoftOverlong
from .model import RewardModel
from .verifiable import ExactMatch, NumericMatch

__all__ = [
    "ExactMatch",
    "FormatMatch",
    "Length",
    "NumericMatch",
    "Repetition",
    "RewardEnsemble",
    "RewardFunction",
    "RewardModel",
    "RewardScores",
    "Rewards",
    "SoftOverlong",
]
