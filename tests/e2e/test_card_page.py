"""Cards, and a Space's static page, in a real Chromium."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from card_run import NASTY, make_runs, reward_report
from chromium import chromium, screenshot
from markdown_it import MarkdownIt
from thread_hub import ThreadHub

from rlhf_zoo.app.engine import PolicyCompletion, Snapshot
from rlhf_zoo.app.page.static import static_page_html
from rlhf_zoo.app.space.files import PinnedModel, SpaceModels
from rlhf_zoo.publishing.cards.card import make_card
from rlhf_zoo.runs.record import StageRecord

WIDTH = 1100
OVERFLOW = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
# The relevant CSS of the Hub and GitHub: a column, tables that scroll on their own, images that fit.
STYLE = """
body { font: 16px/1.5 "DejaVu Sans", sans-serif; max-width: 860px; margin: 24px auto; padding: 0 16px; color: #1f2328 }
table { display: block; width: max-content; max-width: 100%; overflow-x: auto; border-collapse: collapse; }
table { margin: 1em 0 }
th, td { border: 1px solid #d1d9e0; padding: 5px 11px; text-align: left; vertical-align: top; max-width: 340px }
img { max-width: 100% }
code, pre { font-family: "DejaVu Sans Mono", monospace; font-size: 85%; background: #f0f2f4 }
td code { white-space: break-spaces }
pre { padding: 12px; overflow-x: auto }
blockquote { border-left: 4px solid #d1d9e0; margin: 1em 0; padding: 0 1em; color: #59636e }
"""


@pytest.fixture(scope="module")
def cards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The three cards of a small finished run, and PPO's card at an earlier step."""
    runs = make_runs(tmp_path_factory.mktemp("cards") / "runs")
    StageRecord(runs / "reward").write(reward_model=reward_report())
    final_cards = {stage: make_card(runs / stage) for stage in ("sft", "reward", "ppo")}
    return {**final_cards, "step": make_card(runs / "ppo", out=runs / "step", step=20)}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


def open_card(browser: Any, readme: Path) -> None:
    """Opens the card as unsanitized HTML, next to its plots."""
    _, _, body = readme.read_text(encoding="utf-8").split("---\n", 2)
    html = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(body)
    page = readme.parent / "card.html"
    page.write_text(
        f"<!doctype html><html><head><meta charset='utf-8'><style>{STYLE}</style></head><body>{html}</body></html>",
        encoding="utf-8",
    )
    browser.set_window_size(WIDTH, 900)
    browser.get(page.as_uri())
    browser.execute_script("document.querySelectorAll('details').forEach(details => details.open = true)")


@pytest.mark.parametrize("name", ["sft", "reward", "ppo", "step"])
def test_card_renders_in_browser(browser: Any, cards: dict[str, Path], name: str, tmp_path: Path) -> None:
    open_card(browser, cards[name])
    assert screenshot(browser, f"card-{name}.png", tmp_path, WIDTH).stat().st_size > 50_000
    images = browser.execute_script("return [...document.images].map(img => [img.naturalWidth, img.width, img.alt])")
    assert len(images) == {"sft": 1, "reward": 5, "ppo": 3, "step": 3}[name]
    # In an image that the column shrinks, the labels would be too small.
    assert all(natural == 864 and shown >= 0.9 * natural and alt for natural, shown, alt in images), images

    tables = browser.execute_script(
        "return [...document.querySelectorAll('table')].map(table =>"
        " [...table.rows].map(row => [...row.cells].reduce((sum, cell) => sum + cell.colSpan, 0)))"
    )
    assert len(tables) >= 3
    assert all(len(set(rows)) == 1 and len(rows) > 1 for rows in tables), "each row has its header's columns"
    text = browser.execute_script("return document.body.innerText")
    paragraphs = browser.execute_script("return [...document.querySelectorAll('p')].map(p => p.innerText)")
    assert not [text for text in paragraphs if text.startswith("|")], "a malformed table shows its pipes"
    assert "{{" not in text and "{%" not in text and "None" not in text

    assert browser.execute_script(OVERFLOW) <= 0, "the page scrolls sideways"
    headings = browser.execute_script("return [...document.querySelectorAll('h1, h2')].map(h => h.innerText)")
    plot = "On held-out pairs" if name == "reward" else "Over training"
    wanted = [plot, "Watch out for", "Trained with"]
    candidates = ["Over training", "On held-out pairs", "Watch out for", "Trained with"]
    assert [heading for heading in headings if heading in candidates] == wanted and len(headings) == len(set(headings))
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


# The numbers in tables that the browser breaks into lines. A range may break after its dash.
BROKEN_NUMBERS = """return [...document.querySelectorAll('.zoo-scroll :is(th, td)')].flatMap(cell => {
  const broken = [], walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) for (const match of walker.currentNode.data.matchAll(/[−\\-]?[0-9][0-9.,%]*/g)) {
    const range = document.createRange();
    range.setStart(walker.currentNode, match.index);
    range.setEnd(walker.currentNode, match.index + match[0].length);
    if (new Set([...range.getClientRects()].map(box => box.top)).size > 1) broken.push(match[0]);
  }
  return broken;
})"""


def test_numbers_on_hub_page_do_not_break(browser: Any, tmp_path: Path) -> None:
    name = "-".join(["a-long-name-of-a-model"] * 4)
    cells = [f"`local/{name}`", "words " * 60, "0.50\N{NO-BREAK SPACE}¹", *["-0.123 [-0.456, -0.789]", "1.000"] * 4]
    count = len(cells)
    table = f"{'| p ' * count}|\n{'|-' * count}|\n| {' | '.join(cells)} |\n"
    readme = f"`rlhf-zoo compare local/{name}`\n\n{table}"
    hub = ThreadHub(tmp_path / "hub")
    hub.make(name, {"README.md": readme})
    page = tmp_path / "page.html"
    page.write_bytes(hub.send("GET", f"/local/{name}").content)
    hub.close()
    try:
        for width in (390, 1280):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == 390}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            browser.get(page.as_uri())
            assert browser.execute_script("return document.querySelectorAll('.zoo-scroll td').length") == count
            assert browser.execute_script(BROKEN_NUMBERS) == [], width
            assert browser.execute_script(OVERFLOW) <= 0, "long names and commands break"
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_static_space_page_renders_in_browser(browser: Any, tmp_path: Path) -> None:
    figures = dict.fromkeys(("token_logprob_ppo", "token_logprob_sft", "token_kl", "token_values"), (0.5,) * 9)
    side = PolicyCompletion(NASTY, 1.0, 0.0, (0.5,) * 9, (NASTY,) * 9, 9, True, stop="eos", **figures)
    sample = Snapshot(NASTY, 1, 1.0, 1.0, 8, (side,), (side,), done=True)
    models = [PinnedModel(f"me/tiny-{role}", "1" * 40) for role in ("ppo", "sft")]
    page = tmp_path / "index.html"
    page.write_text(static_page_html(SpaceModels(*models, None, recipe=NASTY), [sample]), encoding="utf-8")
    browser.get(page.as_uri())
    browser.execute_script("document.querySelectorAll('details').forEach(details => details.open = true)")
    for width in (WIDTH, 420):
        screenshot(browser, f"space-static-{width}.png", tmp_path, width)
        assert browser.execute_script(OVERFLOW) <= 0, "the page scrolls sideways"
    assert browser.execute_script("return document.scripts.length + document.images.length") == 0
    assert NASTY.splitlines()[0] in browser.execute_script("return document.body.textContent")
