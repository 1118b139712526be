"""Rewards: what a completion is worth to the trainer."""

from .composed import RewardFunction, Rewards, Scored
from .model import RewardModel

__all__ = ["RewardFunction", "RewardModel", "Rewards", "Scored"]
