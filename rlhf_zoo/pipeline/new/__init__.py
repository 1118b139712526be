"""`rlhf-zoo new`: writes a recipe for a user's own model and data."""
