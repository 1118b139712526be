"""The PPO trainer: rollout, loss, KL controllers, guards, metrics.

It knows nothing of recipes, the Hub, cards or evaluation.
"""
