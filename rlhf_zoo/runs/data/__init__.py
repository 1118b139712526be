"""Data sets as the stages read them: where they come from, their columns, their row formats and their splits."""
