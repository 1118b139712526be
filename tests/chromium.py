"""A headless Chromium for tests that look at pages; it reaches no host but those that a test names."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def chromium(home: Path, *, reach: str | None = None) -> Iterator[Any]:
    """A selenium driver with its profile under `home`. reach: the one host that names lead to; None for no host.

    Without the programs a test is skipped, and fails in CI.
    """
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        message = "chromium and chromedriver are not installed (Debian: chromium, chromium-driver)"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = program
    rules = "MAP * ~NOTFOUND" + (f" , EXCLUDE {reach}" if reach else "")
    for flag in (
        "headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "disable-background-networking",
        "disable-component-update", "disable-sync", "no-first-run", "disable-default-apps", "no-proxy-server",
        f"host-resolver-rules={rules}", f"user-data-dir={home / 'profile'}",
    ):  # fmt: skip
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    chrome = webdriver.Chrome(options, Service(driver, env=dict(os.environ, HOME=str(home))))
    try:
        yield chrome
    finally:
        chrome.quit()
