"""Tries recipes without their downloads: runs every stage on miniatures of the models and data."""
