"""Smoke tests of recipes without their downloads: every stage runs on miniatures of the models and data."""
