"""Models, tokenizers and text: load them, sample from them, compute log-probabilities.

No module here imports `rewards`, `ppo` or a package above them.
"""
