"""The PPO trainer: rollout, loss, KL controllers, guards, metrics.

This package knows nothing of recipes, the Hub, cards or evaluation.
"""
