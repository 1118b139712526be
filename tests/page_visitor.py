"""A visitor of the comparison page in a real Chromium: their actions, and what the page shows them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from chromium import chromium, screenshot

SECONDS = 120
LOOPBACK = {"127.0.0.1", "localhost", "::1"}
FIGURES = ("reward", "log_ratio", "kl", "length", "stopped")


@contextmanager
def visiting(url: str, folder: Path) -> Iterator[Visitor]:
    """Yields a visitor. Checks at the end that no request left loopback and that the page logged no error."""
    with chromium(folder, reach="127.0.0.1") as browser:
        visitor = Visitor(browser, url, folder)
        yield visitor
        visitor.collect()
        assert any("/gradio_api/" in url for url in visitor.requests), "the log of requests is empty"
        local_schemes = {"data", "blob", "about", "chrome", "chrome-untrusted"}  # these cause no network request
        sent = [url for request in visitor.requests if (url := urlsplit(request)).scheme not in local_schemes]
        assert not [url.geturl()[:200] for url in sent if url.hostname not in LOOPBACK]
        errors = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
        # Gradio's API page asks whether there is an MCP server; a 404 is the right answer.
        assert not [error for error in errors if "/gradio_api/mcp/schema" not in error], errors


class Visitor:
    """Acts on the page like a person, and reads what it shows."""

    def __init__(self, browser: Any, url: str, screenshots: Path) -> None:
        self.browser = browser
        self.url = url
        self.screenshots = screenshots
        self.requests: list[str] = []

    def open(self, theme: str = "light", link: str = "") -> None:
        self.browser.get(f"{self.url}?__theme={theme}{link and '&' + link}")
        self.wait("the prompt box", lambda: self.all("#prompt textarea"))

    def tab(self, name: str) -> None:
        tabs = self.all("button[role=tab]")
        (tab,) = [tab for tab in tabs if tab.text == name]
        tab.click()

    def all(self, selector: str) -> list[Any]:
        from selenium.webdriver.common.by import By

        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def first(self, selector: str) -> Any:
        """Waits for the first such element: Gradio builds tabs and accordions only when they open."""
        from selenium.webdriver.common.by import By

        return self.wait(selector, lambda: self.browser.find_element(By.CSS_SELECTOR, selector))

    def count(self, selector: str) -> int:
        return len(self.all(selector))

    def texts(self, selector: str) -> list[str]:
        """The texts of the elements, exactly as in the document."""
        script = "return Array.from(document.querySelectorAll(arguments[0]), element => element.textContent)"
        return list(self.browser.execute_script(script, selector))

    def read(self, selector: str) -> str:
        """The text of the only such element; '' if there is not exactly one."""
        texts = self.texts(selector)
        return texts[0] if len(texts) == 1 else ""

    def wait(self, description: str, condition: Any, seconds: float = SECONDS) -> Any:
        from selenium.common import StaleElementReferenceException
        from selenium.webdriver.support.ui import WebDriverWait

        wait = WebDriverWait(self.browser, seconds, 0.05, ignored_exceptions=[StaleElementReferenceException])
        return wait.until(lambda _: condition(), f"waiting for {description}")

    def press(self, selector: str) -> None:
        """Clicks the first such element as soon as it is visible."""
        self.wait(f"{selector} to be visible", lambda: self.first(selector).is_displayed())
        self.first(selector).click()

    def click(self, elem_id: str) -> None:
        self.press(f"#{elem_id}")

    def fill(self, selector: str, text: str) -> None:
        from selenium.webdriver.common.keys import Keys

        (box,) = self.all(selector)
        box.send_keys(Keys.CONTROL, "a")
        box.send_keys(Keys.DELETE)
        if text:
            box.send_keys(text)
        self.wait("the typed text", lambda: box.get_property("value") == text)

    def write(self, prompt: str, box: str = "prompt") -> None:
        self.fill(f"#{box} textarea", prompt)

    def compare(self, prompt: str, n: int = 1) -> None:
        """Types the prompt, clicks on Compare, and waits for all completions."""
        self.write(prompt)
        self.click("compare")
        self.wait(
            f"the completions of {prompt!r}",
            # The prompts first: the page opens with another prompt's completions, which are done.
            lambda: self.texts("#pairs .prompt") == [prompt] * (2 * n) and self.done(),
        )

    def done(self, box: str = "pairs") -> bool:
        return self.count(f'#{box} [data-state="done"]') == 1

    def compare_invalid(self, prompt: str, message: str) -> None:
        """Types an invalid prompt, clicks on Compare, and waits for the page's message."""
        self.write(prompt)
        self.click("compare")
        self.wait(f"the message {message!r}", lambda: message in self.read("#message [role=alert]"))

    def side(self, role: str, row: int = 0, box: str = "pairs") -> dict[str, str]:
        card = f'#{box} [data-side="{role}"][data-row="{row}"]'
        figures = {name: self.read(f"{card} [data-figure={name}]") for name in FIGURES}
        return {"completion": self.read(f"{card} .completion"), **figures}

    def phone(self) -> None:
        """Emulates a phone's screen, which is narrower than Chromium's smallest window."""
        size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def overflow(self) -> int:
        """The number of pixels by which the page is wider than the window."""
        return int(
            self.browser.execute_script(
                "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
        )

    def tab_through(self, presses: int) -> set[str]:
        """Presses Tab `presses` times; returns the ids of the elements that it focuses and of their ancestors."""
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        script = """let ids = []; for (let element = document.activeElement; element; element = element.parentElement)
            if (element.id) ids.push(element.id); return ids"""
        reached: set[str] = set()
        for _ in range(presses):
            ActionChains(self.browser).send_keys(Keys.TAB).perform()
            reached |= set(self.browser.execute_script(script))
        return reached

    def collect(self) -> None:
        """Adds the requests that Chromium has logged since the last call to `requests`."""
        for entry in self.browser.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            elif message["method"] == "Network.webSocketCreated":
                self.requests.append(message["params"]["url"])

    def screenshot_window(self, name: str) -> None:
        """Saves a screenshot of the window only; `screenshot` shows the whole page."""
        for destination in filter(None, (self.screenshots, os.environ.get("RLHF_ZOO_SCREENSHOTS"))):
            Path(destination).mkdir(parents=True, exist_ok=True)
            self.browser.save_screenshot(str(Path(destination) / name))

    def screenshot(self, name: str, width: int) -> None:
        screenshot(self.browser, name, self.screenshots, width)
