"""A person at the comparison page: what they do with it in a real Chromium, and what they see."""

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
    """A visitor of the page. Afterwards: no request left loopback, and the page logged no error."""
    with chromium(folder, reach="127.0.0.1") as browser:
        visitor = Visitor(browser, url, folder)
        yield visitor
        visitor.collect()
        assert any("/gradio_api/" in one for one in visitor.requests), "the log of requests is empty"
        schemes = {"data", "blob", "about", "chrome", "chrome-untrusted"}  # nothing of these is sent anywhere
        sent = [urlsplit(one) for one in visitor.requests if urlsplit(one).scheme not in schemes]
        assert not [one.geturl()[:200] for one in sent if one.hostname not in LOOPBACK]
        errors = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
        # Gradio's documentation asks whether there is an MCP server, which a 404 answers.
        assert not [one for one in errors if "/gradio_api/mcp/schema" not in one], errors


class Visitor:
    """What a person does with the page, and what they see."""

    def __init__(self, browser: Any, url: str, screenshots: Path) -> None:
        self.browser = browser
        self.url = url
        self.screenshots = screenshots
        self.requests: list[str] = []

    def open(self, theme: str = "light", link: str = "") -> None:
        self.browser.get(f"{self.url}?__theme={theme}{link and '&' + link}")
        self.wait("the prompt box", lambda: self.all("#prompt textarea"))

    def tab(self, name: str) -> None:
        found = [one for one in self.all("button[role=tab]") if one.text == name]
        assert len(found) == 1, [one.text for one in self.all("button[role=tab]")]
        found[0].click()

    def all(self, selector: str) -> list[Any]:
        from selenium.webdriver.common.by import By

        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def first(self, selector: str) -> Any:
        """The first such element, as soon as there is one: Gradio builds tabs and folded parts when they open."""
        from selenium.webdriver.common.by import By

        return self.wait(selector, lambda: self.browser.find_element(By.CSS_SELECTOR, selector))

    def count(self, selector: str) -> int:
        return len(self.all(selector))

    def texts(self, selector: str) -> list[str]:
        """The texts of the elements, exactly as they stand in the document."""
        script = "return Array.from(document.querySelectorAll(arguments[0]), one => one.textContent)"
        return list(self.browser.execute_script(script, selector))

    def read(self, selector: str) -> str:
        """The text of the one element; '' while there is none."""
        found = self.texts(selector)
        return found[0] if len(found) == 1 else ""

    def wait(self, what: str, condition: Any, seconds: float = SECONDS) -> Any:
        from selenium.common import StaleElementReferenceException
        from selenium.webdriver.support.ui import WebDriverWait

        wait = WebDriverWait(self.browser, seconds, 0.05, ignored_exceptions=[StaleElementReferenceException])
        return wait.until(lambda _: condition(), f"waiting for {what}")

    def press(self, selector: str) -> None:
        """Clicks the first such element, as soon as it can be seen."""
        self.wait(f"{selector} to be seen", lambda: self.first(selector).is_displayed())
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
        """Types and clicks, and waits for all completions."""
        self.write(prompt)
        self.click("compare")
        self.wait(
            f"the completions of {prompt!r}",
            # In this order: the page opens with other completions, which are done.
            lambda: self.texts("#pairs .given") == [prompt] * (2 * n) and self.done(),
        )

    def done(self, box: str = "pairs") -> bool:
        return self.count(f'#{box} [data-state="done"]') == 1

    def complain(self, prompt: str, message: str) -> None:
        """Types and clicks, and waits for the page to say what is wrong."""
        self.write(prompt)
        self.click("compare")
        self.wait(f"the message {message!r}", lambda: message in self.read("#message [role=alert]"))

    def side(self, role: str, row: int = 0, box: str = "pairs") -> dict[str, str]:
        card = f'#{box} [data-side="{role}"][data-row="{row}"]'
        found = {"completion": self.read(f"{card} .new")}
        return found | {name: self.read(f"{card} [data-figure={name}]") for name in FIGURES}

    def phone(self) -> None:
        """A window as wide as a phone: Chromium's own windows are wider."""
        size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        return int(
            self.browser.execute_script(
                "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
        )

    def tab_through(self, presses: int) -> set[str]:
        """The ids of what the Tab key reaches from where the focus is, and of all that stands around it."""
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        around = """let found = []; for (let one = document.activeElement; one; one = one.parentElement)
            if (one.id) found.push(one.id); return found"""
        reached: set[str] = set()
        for _ in range(presses):
            ActionChains(self.browser).send_keys(Keys.TAB).perform()
            reached |= set(self.browser.execute_script(around))
        return reached

    def collect(self) -> None:
        """Moves what Chromium logged since the last time to `requests`."""
        for entry in self.browser.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            elif message["method"] == "Network.webSocketCreated":
                self.requests.append(message["params"]["url"])

    def screenshot_as_it_is(self, name: str) -> None:
        """Of the window, where `screenshot` shows the whole page."""
        for place in filter(None, (self.screenshots, os.environ.get("RLHF_ZOO_SCREENSHOTS"))):
            Path(place).mkdir(parents=True, exist_ok=True)
            self.browser.save_screenshot(str(Path(place) / name))

    def screenshot(self, name: str, width: int) -> None:
        screenshot(self.browser, name, self.screenshots, width)
