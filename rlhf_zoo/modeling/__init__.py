"""Models, tokenizers and text: load them, sample from them, compute log-probabilities.

Nothing here knows PPO, recipes or runs.
"""
