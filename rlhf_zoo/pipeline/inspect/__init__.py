"""`rlhf-zoo doctor`, `trace` and `reproduce`: what a checkpoint is and whether it comes out again."""
