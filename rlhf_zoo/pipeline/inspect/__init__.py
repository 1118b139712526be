"""`rlhf-zoo doctor`, `trace` and `reproduce`: inspect a checkpoint, and train it again."""
