"""Connect to a Hub, publish to it, pull from it.

No module here reads run.json: callers pass what to send.
"""
