"""What a recipe holds (recipe, settings, data, corpora) and what a run directory holds (record, lock, context).

This package neither trains nor publishes.
"""
