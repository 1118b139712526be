"""`rlhf-zoo plan`: memory and time of a recipe before it runs."""
