"""Fixtures that every test may use."""

pytest_plugins = ["hub_fixture", "real_data"]
