"""Recipes tried without what they download: miniatures of their models and data, through every stage."""
