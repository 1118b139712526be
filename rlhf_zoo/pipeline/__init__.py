"""The work of the commands: stages, whole recipes, new recipes, plans, smoke tests, inspections and experiments."""
