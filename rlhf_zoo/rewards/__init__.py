"""Rewards: what a completion is worth to the trainer."""

from .composed import RewardFunction, Rewards, Scored
from .model import RewardModel
from .verifiable import (
    ExactMatch,
    FormatMatch,
    Length,
    NumericMatch,
    Repetition,
    SoftOverlong,
)

__all__ = [
    "ExactMatch",
    "FormatMatch",
    "Length",
    "NumericMatch",
    "Repetition",
    "RewardFunction",
    "RewardModel",
    "Rewards",
    "Scored",
    "SoftOverlong",
]
