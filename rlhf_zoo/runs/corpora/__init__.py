"""The corpora that recipes learn from. Generic code asks them by name through `plugins`."""
