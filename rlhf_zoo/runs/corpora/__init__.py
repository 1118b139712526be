"""The corpora that recipes train on. Other packages look them up by name through `plugins`."""
