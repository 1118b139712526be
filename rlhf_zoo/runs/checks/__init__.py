"""Checks before training: models, conversations and splits."""
