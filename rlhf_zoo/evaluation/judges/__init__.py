"""Judges: text metrics, classifiers, language models and people, and how far each can be trusted."""
