"""Sampling from a causal language model, with one random stream per row."""
