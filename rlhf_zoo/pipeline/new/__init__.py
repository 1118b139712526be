"""`rlhf-zoo new`: writes a recipe for the user's own model and data."""
