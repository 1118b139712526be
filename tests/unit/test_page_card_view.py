"""A checkpoint's card as HTML: it reads as it was written, and nothing in it runs, leaves or reaches out."""

import base64
import os
import re
from io import BytesIO
from pathlib import Path

import html_page
import pytest
from PIL import Image

from rlhf_zoo.app.page import card_view
from rlhf_zoo.app.page.card_view import card_html

TAGS = {
    "a", "blockquote", "br", "code", "div", "em", "h2", "h3", "h4", "h5", "h6", "hr", "img", "li", "ol", "p", "pre",
    "details", "s", "strong", "summary", "table", "tbody", "td", "th", "thead", "tr", "ul",
}  # fmt: skip
ATTRIBUTES = {
    "a": {"href", "rel", "target"}, "img": {"src", "alt", "class"}, "code": {"class"}, "ol": {"start"},
    "div": {"class", "role", "aria-label", "tabindex"}, "pre": {"role", "aria-label", "tabindex"},
    "td": {"style"}, "th": {"style"}, "p": {"class"},
    **{f"h{level}": {"id"} for level in range(2, 7)},
}  # fmt: skip
OUTWARD = {"rel": "noopener noreferrer nofollow", "target": "_blank"}


class Page(html_page.Page):
    """A card's HTML, of which every element holds what holds for every card."""

    def __init__(self, html: str) -> None:
        super().__init__(html)
        assert self.elements[0][:2] == ("div", {"class": "zoo-md"})

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        assert tag in TAGS and set(attributes) <= ATTRIBUTES.get(tag, set())
        assert attributes.get("style", "text-align:") in ("text-align:", *(f"text-align:{x}" for x in SIDES))
        assert attributes.get("src", "data:image/").startswith("data:image/")
        assert attributes.get("id", "zoo-card-").startswith("zoo-card-")
        if "href" in attributes and not attributes["href"].startswith("#zoo-card-"):
            assert attributes["href"].startswith(("http://", "https://"))
            assert {key: value for key, value in attributes.items() if key != "href"} == OUTWARD
        super().handle_starttag(tag, attrs)


SIDES = ("left", "center", "right")


def png(size: tuple[int, int] = (3, 2), kind: str = "PNG") -> bytes:
    stream = BytesIO()
    Image.new("RGB", size, "red").save(stream, kind)
    return stream.getvalue()


@pytest.fixture
def card(tmp_path):
    """Writes a README and returns the page; files may lie beside it."""

    def shown(written: str | bytes) -> Page:
        (tmp_path / "card").mkdir(exist_ok=True)
        (tmp_path / "card" / "README.md").write_bytes(written.encode() if isinstance(written, str) else written)
        return Page(card_html(tmp_path / "card"))

    return shown


@pytest.mark.parametrize(
    "written",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "<!-- <script> -->",
        "</div></div><h1>taken over</h1>",
        "`<script>`",
        '```"><script>alert(1)</script>\n<b>\n```',
        "| <script> |\n|---|\n| </table><b> |",
    ],
)
def test_card_html_is_escaped(card, written):
    page = card(written)
    assert "<script" not in page.html and "<h1" not in page.html
    if written.startswith("<"):
        assert page.text.strip() == written


@pytest.mark.parametrize(
    "address",
    [
        "javascript:alert(1)",
        "java&#x09;script:alert(1)",
        "data:text/html,<script>alert(1)</script>",
        "data:image/png;base64,AAAA",
        "file:///etc/passwd",
        "//a.example/x",
        "metrics.jsonl",
        "https:a.example",
        "http://[::1",
        "#nowhere",
    ],
)
@pytest.mark.parametrize("form", ["[words](<{}>)", "[words][1]\n\n[1]: {}", "<{}>"])
def test_unsafe_links_are_removed(card, address, form):
    page = card(form.format(address))
    assert page.all("a") == []
    assert "words" in page.text or form == "<{}>"


def test_card_details_and_alerts_are_rendered(card):
    folded = "<details><summary>All <b>figures</b></summary>\n\n| a |\n|---|\n\n</details>\n\nend"
    page = card(f"> [!TIP]\n> Use it.\n\n{folded}")
    assert page.html.count("<details>") == page.html.count("</details>") == 1 and "[!TIP]" not in page.html
    assert "<summary>All &lt;b&gt;figures&lt;/b&gt;</summary>" in page.html and "<strong>Tip</strong>" in page.html


@pytest.mark.parametrize(
    "written", ["</details>\nx", "<details><summary>a</summary>\n\nx", "</details>\n" * 3 + "<details>"]
)
def test_card_cannot_close_details_of_the_page(card, written):
    page = card(written)
    assert page.html.count("<details>") == page.html.count("</details>")
    assert not re.match(r"<div class=\"zoo-md\">\s*</details>", page.html)


def test_web_links_and_anchors_are_kept(card):
    page = card("# A *head*: line\n\n[x](https://a.example/p?q=1&r=\"2) <http://b.example> [to](#a-head-line 'title')")
    assert page.all("a") == [
        {"href": "https://a.example/p?q=1&r=%222", **OUTWARD},
        {"href": "http://b.example", **OUTWARD},
        {"href": "#zoo-card-a-head-line"},
    ]
    assert page.all("h2") == [{"id": "zoo-card-a-head-line"}]


@pytest.mark.parametrize(
    "address",
    [
        "https://a.example/x.png",
        "data:image/png;base64,iVBORw0KGgo=",
        "file:///etc/hostname",
        "../outside.png",
        "%2e%2e/outside.png",
        "leads-out.png",
        "leads-out/outside.png",
        "circle.png",
        "missing.png",
        "plots",
        "plots/a.svg",
        "plots/notes.txt",
        "plots/pipe.png",
        "plots/cut.png",
        "a\x00.png",
        "n" * 5000 + ".png",
        "http://[::1",
    ],
)
def test_images_outside_the_card_folder_are_not_loaded(card, tmp_path, address):
    folder = tmp_path / "card"
    (folder / "plots").mkdir(parents=True)
    (tmp_path / "outside.png").write_bytes(png())
    (folder / "leads-out.png").symlink_to(tmp_path / "outside.png")
    (folder / "leads-out").symlink_to(tmp_path)
    (folder / "circle.png").symlink_to("circle.png")
    (folder / "https:" / "a.example").mkdir(parents=True)
    (folder / "https:" / "a.example" / "x.png").write_bytes(png())
    (folder / "plots" / "a.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'><script>x</script></svg>")
    (folder / "plots" / "notes.txt").write_text("secret")
    (folder / "plots" / "cut.png").write_bytes(png()[:12])
    os.mkfifo(folder / "plots" / "pipe.png")
    page = card(f"before ![the *curve*](<{address}>) after")
    assert page.all("img") == [] and page.all("a") == []
    assert "the curve" in page.text or "the *curve*" in page.text
    assert page.text.strip().startswith("before") and page.text.strip().endswith("after")
    assert len(page.text) < 300 and "secret" not in page.text


def test_removed_links_and_images_leave_text_and_address(card):
    page = card("See [the *log*](runs/metrics.jsonl), ![the *curve*](https://a.example/x.png) ![](b.png)"
                " [![badge](https://a.example/b.svg)](https://b.example)")  # fmt: skip
    assert page.text.strip() == (
        "See the log (runs/metrics.jsonl), the curve (https://a.example/x.png) image (b.png) badge"
        " (https://a.example/b.svg)"
    )
    assert page.all("a") == [{"href": "https://b.example", **OUTWARD}] and page.all("em") == [{}]


@pytest.mark.parametrize(("kind", "mime"), [("PNG", "png"), ("JPEG", "jpeg"), ("GIF", "gif"), ("WEBP", "webp")])
def test_images_of_card_folder_are_embedded(card, tmp_path, kind, mime):
    (tmp_path / "card" / "my plots").mkdir(parents=True)
    data = png(kind=kind)
    (tmp_path / "card" / "my plots" / "a.png").write_bytes(data)
    page = card('![a "b" <c>](<my plots/a.png> "title")\n\n![](my%20plots/a.png)')
    source = f"data:image/{mime};base64,{base64.b64encode(data).decode('ascii')}"
    assert page.all("img") == [
        {"src": source, "alt": 'a "b" <c>', "class": "zoo-plot"},
        {"src": source, "alt": "", "class": "zoo-plot"},
    ]


def test_images_in_hub_cache_are_followed_to_blobs(tmp_path):
    repo = tmp_path / "models--a--b"
    snapshot = repo / "snapshots" / ("c" * 40)
    (snapshot / "plots").mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "blobs" / "one").write_text(
        "# Card\n\n![in](plots/a.png) ![out](plots/b.png) ![refs](c.png) ![up](../../blobs/two)"
    )
    (repo / "blobs" / "two").write_bytes(png())
    (tmp_path / "outside.png").write_bytes(png())
    (repo / "refs.png").write_bytes(png())
    (snapshot / "README.md").symlink_to("../../blobs/one")
    (snapshot / "plots" / "a.png").symlink_to("../../../blobs/two")
    (snapshot / "plots" / "b.png").symlink_to("../../../../outside.png")
    (snapshot / "c.png").symlink_to("../../refs.png")
    for folder in (snapshot, Path(os.path.relpath(snapshot))):
        page = Page(card_html(folder))
        assert [image["alt"] for image in page.all("img")] == ["in"]
    (snapshot / "README.md").unlink()
    (snapshot / "README.md").symlink_to("/etc/hostname")
    assert "has no card" in Page(card_html(snapshot)).text


def test_oversized_images_are_not_shown(card, tmp_path, monkeypatch):
    folder = tmp_path / "card"
    folder.mkdir()
    (folder / "a.png").write_bytes(png())
    (folder / "wide.png").write_bytes(png((4001, 5000)))
    (folder / "heavy.png").write_bytes(png() + b"\0" * card_view.MAX_IMAGE_BYTES)
    assert [image["alt"] for image in card("![a](a.png) ![b](wide.png) ![c](heavy.png)").all("img")] == ["a"]
    length = len(card("![a](a.png)").all("img")[0]["src"])
    monkeypatch.setattr(card_view, "MAX_TOTAL_IMAGE_BYTES", 3 * length)
    page = card("![a](a.png) " * 5)
    assert len(page.all("img")) == 3 and page.text.count("a (a.png)") == 2


def test_image_is_opened_only_as_its_own_format(card, tmp_path, monkeypatch):
    (tmp_path / "card").mkdir()
    (tmp_path / "card" / "a.png").write_bytes(png(kind="BMP"))
    asked, read = [], Image.open
    monkeypatch.setattr(Image, "open", lambda *args, formats: asked.append(formats) or read(*args, formats=formats))
    assert card("![a](a.png)").all("img") == [] and asked == [("PNG", "JPEG", "GIF", "WEBP")]


def test_front_matter_is_removed_and_rules_are_kept(card):
    assert card("---\nlicense: mit\n# no: 'heading'\n---\n\nbody\n\n---\n\nmore").text.split() == ["body", "more"]
    assert card("\ufeff---\r\nlicense: mit\r\n---\r\nbody").text.split() == ["body"]
    assert card("body\n\n---\nlicense: mit\n---\n").text.split() == ["body", "license:", "mit"]
    assert "never closed" in card("---\nnever closed\n").text
    assert "\ufffd" in card(b"\xff\xfe\x00 a").text, "bytes that are no text"


def test_unreadable_card_is_replaced_by_a_sentence(card, tmp_path, monkeypatch):
    assert len(card("x" * card_view.MAX_CARD_BYTES).text.strip()) == card_view.MAX_CARD_BYTES
    assert card("x" * (card_view.MAX_CARD_BYTES + 1)).text == (
        "The card of this checkpoint exceeds 128 KiB and is not shown here: read README.md in its repository."
    )
    words = "This checkpoint has no card (README.md). rlhf-zoo card writes one from its run directory."
    (tmp_path / "README.md").mkdir()
    assert Page(card_html(tmp_path / "nowhere")).text == Page(card_html(tmp_path)).text == words

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", "/a/secret/place")

    monkeypatch.setattr(Path, "open", refuse)
    assert Page(card_html(tmp_path / "card")).text == "The card of this checkpoint cannot be read: Permission denied."
