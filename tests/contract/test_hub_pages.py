"""The embedded Hub's pages show lists, cards, files, branches and tags, and contain nothing that a browser runs."""

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest
from html_page import Page
from thread_hub import ThreadHub

CARD = """---
license: apache-2.0
tags: [ppo, "<b>tag"]
---
# A model

> [!TIP]
> **Verdict: healthy.**

| figure | value |
|---|---|
| KL | 2.2 |

[figures](rlhf_card.json) [outside](../../etc/passwd) [script](javascript:alert(1)) ![plot](plots/a%20b.png)
![far](https://example.com/x.png) ![drawing](a.svg)

<script>alert(1)</script> <img src=x onerror=alert(1)>
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadHub]:
    hub = ThreadHub(tmp_path_factory.mktemp("pages") / "hub")
    files = {"README.md": CARD, "rlhf_card.json": "{}", "plots/a b.png": b"png", "a.svg": "<svg/>"}
    commit = hub.make("model", files)
    hub.api().create_tag("local/model", tag="step-000010", revision=commit)
    hub.api().create_branch("local/model", branch="exp/<b>")
    hub.make("secret", {"README.md": "# Secret"}, private=True)
    hub.make("bare", {"x.txt": "x"}, kind="dataset")
    yield hub
    hub.close()


def get_page(hub: ThreadHub, path: str) -> Page:
    """Gets a page as a browser without a token."""
    answer = hub.send("GET", path, role=None)
    assert answer.status == 200 and answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'; img-src 'self'")
    html = answer.content.decode()
    assert not re.search(r"<script|\bon\w+=", re.sub(r"&lt;.*?&gt;", "", html)), "nothing runs"
    return Page(re.sub(r"<!doctype html>|<meta[^>]*>", "", html))


def test_front_page_lists_public_repositories(hub: ThreadHub) -> None:
    page = get_page(hub, "/")
    assert [link["href"] for link in page.all("a")] == ["/local/model", "/datasets/local/bare"]
    assert "secret" not in page.text and page.texts("h2") == ["Models", "Data sets", "Spaces"]
    assert "local/secret" in hub.send("GET", "/").content.decode(), "with a token it is listed"


def test_repository_page_shows_card_files_and_tags(hub: ThreadHub) -> None:
    page = get_page(hub, "/local/model")
    links = {text: attrs["href"] for name, attrs, inside in page.elements if name == "a" for text in ["".join(inside)]}
    commit = hub.api().model_info("local/model").sha
    assert links["step-000010"] == "/local/model/tree/step-000010" and links["main"] == "/local/model/tree/main"
    assert links["exp/<b>"] == "/local/model/tree/exp%2F%3Cb%3E"
    assert links["plots/a b.png"] == f"/local/model/resolve/{commit}/plots/a%20b.png"
    assert links["figures"] == f"/local/model/resolve/{commit}/rlhf_card.json"
    for address in (links["figures"], links["plots/a b.png"], links["step-000010"], links["exp/<b>"]):
        assert hub.send("GET", address, role=None).status == 200
    card = hub.send("GET", "/local/model", role=None).content.decode()
    assert re.search(r"<strong>Tip</strong><br ?/?>\n<strong>Verdict: healthy.</strong>", card), "as the Hub renders it"
    assert page.texts("h3") == ["A model"] and "Verdict: healthy." in page.text and "license:" in page.text
    assert "<b>tag" in page.text and not [element for element in page.all("b") if "tag" in str(element)]


def test_repository_page_has_no_scripts_and_no_foreign_links(hub: ThreadHub) -> None:
    page = get_page(hub, "/local/model/tree/step-000010")
    (image,) = page.all("img")
    assert image["src"].endswith("/plots/a%20b.png"), "images of other hosts and SVG images are not shown"
    targets = [link["href"] for link in page.all("a")]
    assert not [link for link in targets if link.startswith(("javascript:", "..")) or "passwd" in link]
    assert "<script>alert(1)</script>" in unescape(page.text)


def test_repositories_named_in_card_are_linked(hub: ThreadHub) -> None:
    names = ("local/model", "local/bare", "local/secret", "local/nothing", "a/b/c", "../model", "local/.git")
    lines = [*(f"`{name}`" for name in names), "[`local/model`](https://example.com/x) `local/bare`"]
    hub.make("named", {"README.md": "\n\n".join(lines)})
    targets = [link["href"] for link in get_page(hub, "/local/named").all("a")]
    linked = [target for target in targets if target in ("/local/model", "/datasets/local/bare")]
    assert linked == ["/local/model", "/datasets/local/bare", "/datasets/local/bare"]
    assert "https://example.com/x" in targets and not [target for target in targets if "secret" in target]
    with_token = hub.send("GET", "/local/named").content.decode()
    assert '<a href="/local/secret"><code>local/secret</code></a>' in with_token, "with access there is a link"


def test_pages_report_missing_readme_and_missing_addresses(hub: ThreadHub) -> None:
    assert "This revision has no README.md." in get_page(hub, "/datasets/local/bare").text
    for path, status in (("/local/secret", 401), ("/local/model/tree/none", 404), ("/local/model/blob/main", 404)):
        assert hub.send("GET", path, role=None).status == status, path
    assert hub.send("HEAD", "/local/model", role=None).content == b""


def test_repository_page_omits_long_card(hub: ThreadHub, tmp_path: Path) -> None:
    hub.make("long", {"README.md": "x" * (2**17 + 1)})
    assert "The card is too long to be shown here" in get_page(hub, "/local/long").text
