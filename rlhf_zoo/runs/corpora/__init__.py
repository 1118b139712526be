"""The corpora that recipes train on. Generic code looks them up by name through `plugins`."""
