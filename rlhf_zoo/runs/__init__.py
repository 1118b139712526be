"""What a recipe holds (recipe, settings, data, corpora) and what a run directory holds (record, lock, context).

It neither trains nor publishes.
"""
