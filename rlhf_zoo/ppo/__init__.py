"""The PPO trainer: rollout, loss, KL controllers, guards, metrics.

No module here imports recipes, the Hub, cards or evaluation.
"""
