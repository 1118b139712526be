"""A headless Chromium for tests of pages. It reaches only the host that a test names."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def chromium(home: Path, *, reach: str | None = None) -> Iterator[Any]:
    """Yields a selenium driver whose profile is under `home`. Without Chromium the test is skipped, or fails in CI.

    reach: The only host that Chromium may contact; None for no host.
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


def screenshot(chrome: Any, name: str, folder: Path, width: int) -> Path:
    """Resizes the window to the page, and saves a screenshot in `folder` and in $RLHF_ZOO_SCREENSHOTS."""
    chrome.set_window_size(width, 900)
    height = chrome.execute_script("return document.body.scrollHeight")
    chrome.set_window_size(width, max(900, min(height + 200, 6000)))
    time.sleep(0.3)  # lets the last CSS transition end; no assertion depends on it
    image = chrome.get_screenshot_as_png()
    for destination in filter(None, (folder, os.environ.get("RLHF_ZOO_SCREENSHOTS"))):
        Path(destination).mkdir(parents=True, exist_ok=True)
        (Path(destination) / name).write_bytes(image)
    return folder / name
