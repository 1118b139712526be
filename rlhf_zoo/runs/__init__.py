"""What a recipe says (recipe, settings, data, corpora) and what a run directory holds (record, lock, context).

No training and no publishing."""
