"""Connects to a Hub, publishes to it and pulls from it.

No module here reads run.json: callers pass the files and names to send.
"""
