"""What is checked before anything trains: models, conversations, splits."""
