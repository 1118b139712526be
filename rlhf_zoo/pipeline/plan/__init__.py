"""`rlhf-zoo plan`: predicts the memory and time of a recipe before it runs."""
