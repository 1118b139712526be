"""axe-core finds no violation on the comparison page, the embedded Hub and the documentation site.

Each is visited in both themes and at both widths.

axe-core comes in a package for another browser driver, which `make test-full` installs into .venv/axe and puts on
PYTHONPATH.
"""

import functools
import importlib.util
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from chromium import chromium
from hub_fixture import RunningHub, running
from mkdocs.commands.build import build
from mkdocs.config import load_config
from page_fixture import PPO, VOTES, publish, serve
from page_visitor import Visitor
from toy_models import save_toys

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
WIDTHS = {"wide": (1280, 900), "phone": (390, 844)}
#: Pages of the documentation site: path -> title.
PAGES = {
    "": "rlhf-zoo",
    "reward-up-text-worse/": "Reward up, text worse",
    "choose-a-reward/": "Choose a reward",
}
#: What the documentation's theme calls the system's themes.
SCHEMES = {"light": "default", "dark": "slate"}
RUN_AXE = """const done = arguments[arguments.length - 1];
axe.run().then(report => done(report.violations.flatMap(violation => violation.nodes.map(
  node => `${violation.id}: ${node.html.slice(0, 200)} ${node.any.map(check => check.message).join('; ')}`))))"""


@pytest.fixture(scope="module")
def axe() -> str:
    spec = importlib.util.find_spec("axe_playwright_python")
    if spec is None or spec.origin is None:
        pytest.skip("axe-core is not installed: make test-full installs it into .venv/axe")
    return Path(spec.origin).with_name("axe.min.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    folder = tmp_path_factory.mktemp("axe")
    with running(folder / "server") as hub:
        publish(hub, save_toys(folder / "toys"))
        yield hub


@pytest.fixture(scope="module")
def url(hub: RunningHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve(hub, tmp_path_factory.mktemp("page") / "log", PPO, "--port", "0", "--votes", VOTES) as served:
        yield served.url


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the served site: from files, the theme hides its search."""
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder)))
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def visitor(url: str, tmp_path: Path) -> Iterator[Visitor]:
    with chromium(tmp_path, reach="127.0.0.1") as browser:
        yield Visitor(browser, url, tmp_path)


def resize(visitor: Visitor, width: str) -> None:
    size = dict(zip(("width", "height"), WIDTHS[width], strict=True))
    metrics = {**size, "deviceScaleFactor": 1, "mobile": width == "phone"}
    visitor.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def prefer(visitor: Visitor, theme: str) -> None:
    """Sets the theme of the system."""
    feature = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    visitor.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)


def find_violations(visitor: Visitor, axe: str) -> list[str]:
    visitor.browser.execute_script(axe)
    return list(visitor.browser.execute_async_script(RUN_AXE))


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_comparison_page_has_no_accessibility_violations(visitor: Visitor, axe: str, width: str, theme: str) -> None:
    resize(visitor, width)
    visitor.open(theme)
    visitor.press("#sampling button")
    visitor.press("#pairs .zoo-numbers summary")
    assert find_violations(visitor, axe) == []
    visitor.press('#colors input[value="kl"]')
    assert find_violations(visitor, axe) == []
    visitor.tab("Over training")
    visitor.click("at-the-step")
    visitor.wait("the step", lambda: visitor.done("at-step"))
    visitor.click("every-step")
    visitor.wait("every step", lambda: visitor.done("steps"))
    assert find_violations(visitor, axe) == []
    visitor.tab("Blind test")
    visitor.click("blind-new")
    visitor.wait("a pair", lambda: visitor.first("#vote-tie").is_enabled())
    visitor.click("vote-tie")
    visitor.wait("the reveal", lambda: visitor.read("#blind-reveal .zoo-verdict"))
    assert find_violations(visitor, axe) == []
    visitor.tab("Card")
    visitor.wait("the card", lambda: visitor.count("#card table"))
    assert find_violations(visitor, axe) == []
    assert visitor.overflow() <= 0


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_embedded_hub_pages_have_no_accessibility_violations(
    visitor: Visitor, hub: RunningHub, axe: str, width: str, theme: str
) -> None:
    resize(visitor, width)
    prefer(visitor, theme)
    for path in ("", PPO, f"{PPO}/tree/step-000020"):
        visitor.browser.get(f"{hub.url}/{path}")
        assert visitor.read("h1") in ("rlhf-zoo embedded Hub", PPO)
        assert find_violations(visitor, axe) == []
        assert visitor.overflow() <= 0
        visitor.screenshot_window(f"hub-{path.count('/')}-{width}-{theme}.png")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_documentation_site_has_no_accessibility_violations(
    site: str, axe: str, width: str, theme: str, tmp_path: Path
) -> None:
    with chromium(tmp_path, reach="127.0.0.1") as browser:
        visitor = Visitor(browser, site, tmp_path)
        resize(visitor, width)
        prefer(visitor, theme)
        for name, title in PAGES.items():
            browser.get(f"{site}/{name}")
            assert visitor.read("h1").startswith(title)
            assert visitor.count(f"body[data-md-color-scheme={SCHEMES[theme]}]") == 1
            assert find_violations(visitor, axe) == []
            assert visitor.overflow() <= 0
