"""Fixtures that every test may use."""

import signal

# A shell that starts this in the background leaves SIGINT ignored, and every child would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["hub_fixture", "real_data"]
