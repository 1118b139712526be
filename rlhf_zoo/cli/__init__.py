"""The command line: one module per group of commands.

No heavy package is imported before a command runs.
"""
