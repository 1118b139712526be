"""A headless Chromium for tests that look at pages; it reaches no host but those that a test names."""

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


def screenshot(chrome: Any, name: str, folder: Path, width: int) -> Path:
    """Of the whole page, in `folder` and where RLHF_ZOO_SCREENSHOTS says; the window keeps its size."""
    chrome.set_window_size(width, 900)
    height = chrome.execute_script("return document.body.scrollHeight")
    chrome.set_window_size(width, max(900, min(height + 200, 6000)))
    time.sleep(0.3)  # the last transition; nothing is asserted on it
    picture = chrome.get_screenshot_as_png()
    for place in filter(None, (folder, os.environ.get("RLHF_ZOO_SCREENSHOTS"))):
        Path(place).mkdir(parents=True, exist_ok=True)
        (Path(place) / name).write_bytes(picture)
    return folder / name
