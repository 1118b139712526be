"""Sampling from a causal model with one random stream per row."""
