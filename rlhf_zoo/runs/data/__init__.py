"""Data sets as the stages read them: sources, columns, forms, splits."""
