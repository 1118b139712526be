"""What runs: the stages, a whole recipe, new recipes, plans, smoke tests, inspections and experiments.

Everything here is started by a command.
"""
