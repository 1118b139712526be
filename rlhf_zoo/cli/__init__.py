"""The command line: one module per group of commands.

Nothing heavy is imported before a command runs.
"""
