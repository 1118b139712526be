"""`rlhf-zoo new`: a recipe for a model and data of one's own."""
