"""Renders an untrusted card of a checkpoint as HTML that makes no request to any host.

Raw HTML is shown as text, except for folds: `details` with a `summary`. Images in the checkpoint's folder become data:
URIs; any other image is replaced by its alternative text and address. Links may lead to http and https addresses, or to
a heading of the card.
"""

import base64
import re
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from PIL import Image

from .html import text

MAX_CARD_BYTES = 2**17  # the parser needs up to 60 µs per byte of a hostile card
MAX_IMAGE_BYTES = 2 * 2**20  # of one image
MAX_IMAGES_BYTES = 8 * 2**20  # of all images of a card, as data: URIs
MAX_PIXELS = 20_000_000
MAX_ADDRESS_LENGTH = 120
# No SVG: it is a document, which can hold scripts and links.
IMAGE_FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "GIF": "image/gif", "WEBP": "image/webp"}
ID_PREFIX = "zoo-card-"
_FOLD = re.compile(r"^(?:(</details>)|<details><summary>(.*)</summary>)$", re.MULTILINE)
_ALERT = re.compile(r"\[!(NOTE|TIP|IMPORTANT|WARNING|CAUTION)\]")


def card_html(folder: Path) -> str:
    """Renders README.md of a checkpoint as HTML, in an element of class `zoo-md`.

    Args:
        folder: The checkpoint. In the Hub's cache its files may be links into `blobs`; no other link may lead out.

    Returns:
        HTML; a message if there is no card, or if it cannot be shown.
    """
    files = _Files(folder)
    path = files.find("README.md")
    if path is None:
        return _message(
            "This checkpoint has no card (README.md). <code>rlhf-zoo card</code> writes one from its run directory."
        )
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_CARD_BYTES + 1)
    except OSError as error:
        return _message(f"The card of this checkpoint cannot be read: {text(error.strerror or 'unknown reason')}.")
    if len(content) > MAX_CARD_BYTES:
        return _message(
            f"The card of this checkpoint exceeds {MAX_CARD_BYTES // 1024} KiB and is not shown here: read "
            "README.md in its repository."
        )
    return _wrapped(_render(_body(content.decode("utf-8", errors="replace")), files))


class _Files:
    """The files of a checkpoint's folder that its card may show."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        root = folder.resolve()
        self._roots = [root]
        if root.parent.name == "snapshots":  # a folder of the Hub's cache
            self._roots.append(root.parent.parent / "blobs")
        self._remaining_bytes = MAX_IMAGES_BYTES
        self._uris: dict[str, str | None] = {}

    def find(self, name: str) -> Path | None:
        """Returns a regular file inside the folder; None for any other path."""
        parts = PurePosixPath(name).parts
        if not parts or "\\" in name or not name.isprintable() or ".." in parts or name.startswith("/"):
            return None
        try:
            path = self._folder.joinpath(*parts).resolve(strict=True)
            inside = any(path.is_relative_to(root) for root in self._roots)
            return path if inside and path.is_file() else None
        except (OSError, RuntimeError):  # a missing file, a name that is too long, or circular links
            return None

    def data_uri(self, address: str) -> str | None:
        """Returns an image as a data: URI; None if it may not be shown, or if all images would be too large."""
        if address not in self._uris:
            self._uris[address] = self._read_image(address)
        uri = self._uris[address]
        if uri is None or len(uri) > self._remaining_bytes:
            return None
        self._remaining_bytes -= len(uri)
        return uri

    def _read_image(self, address: str) -> str | None:
        parts = _split(address)
        path = self.find(unquote(address)) if parts is not None and not parts.scheme and not parts.netloc else None
        if path is None:
            return None
        try:
            with path.open("rb") as stream:
                data = stream.read(MAX_IMAGE_BYTES + 1)
            if len(data) > MAX_IMAGE_BYTES:
                return None
            with Image.open(BytesIO(data), formats=tuple(IMAGE_FORMATS)) as image:
                kind, (width, height) = image.format, image.size
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # no image of the allowed formats
            return None
        if kind not in IMAGE_FORMATS or width * height > MAX_PIXELS:
            return None
        return f"data:{IMAGE_FORMATS[kind]};base64,{base64.b64encode(data).decode('ascii')}"


class _Renderer(RendererHTML):
    """CommonMark, with tables that scroll."""

    def table_open(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        return '<div class="zoo-scroll" role="region" aria-label="Table" tabindex="0">\n<table>\n'

    def table_close(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        return "</table>\n</div>\n"


def _render(source: str, files: _Files) -> str:
    markdown = MarkdownIt("commonmark", {"html": False}, renderer_cls=_Renderer).enable(["table", "strikethrough"])
    tokens = _parse(markdown, source)
    headings = _shift_headings(tokens)
    for token in tokens:
        if token.children:
            token.children = list(_safe(token.children, files, headings))
    return str(markdown.renderer.render(tokens, markdown.options, {}))


def _parse(markdown: MarkdownIt, source: str) -> list[Token]:
    """Parses a card whose folds, `<details><summary>TITLE</summary>` to `</details>`, each have lines of their own.

    Every fold is closed, so that a card cannot close an element of the page.
    """
    tokens: list[Token] = []
    depth = 0
    for number, part in enumerate(_FOLD.split(source)):
        if number % 3 == 0:
            tokens += markdown.parse(part)
        elif number % 3 == 2 and part is not None:
            depth += 1
            tokens.append(Token("html_block", "", 0, content=f"<details><summary>{text(part)}</summary>\n"))
        elif number % 3 == 1 and part and depth:
            depth -= 1
            tokens.append(Token("html_block", "", 0, content="</details>\n"))
    return [*tokens, Token("html_block", "", 0, content="</details>\n" * depth)]


def _body(source: str) -> str:
    """Removes the front matter: YAML between two lines `---`, the first of which begins the file."""
    lines = source.removeprefix("\N{BYTE ORDER MARK}").splitlines(keepends=True)
    if lines and lines[0].rstrip() == "---":
        for number, line in enumerate(lines[1:], 2):
            if line.rstrip() == "---":
                return "".join(lines[number:])
    return "".join(lines)


def _shift_headings(tokens: Sequence[Token]) -> dict[str, str]:
    """Moves every heading one level down, below the page's own h1. Returns anchor -> id.

    Anchors are those of the Hub: lower case, hyphens for spaces. Ids get a prefix, so that they differ from the page's.
    """
    id_of: dict[str, str] = {}
    for index, token in enumerate(tokens):
        if token.type not in ("heading_open", "heading_close"):
            continue
        token.tag = f"h{min(int(token.tag[1:]) + 1, 6)}"
        if token.type == "heading_open":
            title = _plain_text(tokens[index + 1].children or ()).lower().strip()
            anchor = "".join(c for c in title if c.isalnum() or c in " -_").replace(" ", "-")
            if anchor and anchor not in id_of:
                id_of[anchor] = f"{ID_PREFIX}{anchor}"
                token.attrs["id"] = id_of[anchor]
    return id_of


def _safe(tokens: Sequence[Token], files: _Files, headings: dict[str, str]) -> Iterable[Token]:
    """Yields inline tokens, with the text and the address in place of images and links that are not allowed."""
    closing: list[Token] = []  # replaces the closing token of the current link
    for token in tokens:
        if token.type == "image":
            yield from _image(token, files)
        elif token.type == "text" and (alert := _ALERT.fullmatch(token.content)):
            yield from (Token("strong_open", "strong", 1), _text(alert[1].capitalize()))
            yield Token("strong_close", "strong", -1)
        elif token.type == "link_open":
            attributes = _link(str(token.attrs.get("href", "")), headings)
            if attributes is None:
                closing = [] if token.markup == "autolink" else _address(str(token.attrs.get("href", "")))
            else:
                token.attrs = dict(attributes)
                closing = [Token("link_close", "a", -1)]
                yield token
        elif token.type == "link_close":
            yield from closing
        else:
            yield token


def _link(address: str, headings: dict[str, str]) -> dict[str, str] | None:
    """Returns the attributes of a link; None if the address is not allowed."""
    if address.startswith("#"):
        anchor = headings.get(unquote(address[1:]))
        return {"href": f"#{anchor}"} if anchor else None
    parts = _split(address)
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        return None
    return {"href": address, "rel": "noopener noreferrer nofollow", "target": "_blank"}


def _image(token: Token, files: _Files) -> list[Token]:
    address, alternative = str(token.attrs.get("src", "")), _plain_text(token.children or ())
    uri = files.data_uri(address)
    if uri is None:
        return [_text(alternative or "image"), *_address(address)]
    token.attrs = {"src": uri, "alt": alternative, "class": "zoo-plot"}
    return [token]


def _address(address: str) -> list[Token]:
    """Returns an address in parentheses, as text."""
    shortened = address if len(address) <= MAX_ADDRESS_LENGTH else address[: MAX_ADDRESS_LENGTH - 1] + "…"
    return [_text(" ("), Token("code_inline", "code", 0, content=shortened), _text(")")] if address else []


def _text(content: str) -> Token:
    return Token("text", "", 0, content=content)


def _plain_text(tokens: Iterable[Token]) -> str:
    """Returns the text of inline tokens, without markup."""
    return "".join(
        _plain_text(token.children) if token.children else " " if "break" in token.type else token.content
        for token in tokens
    )


def _split(address: str) -> SplitResult | None:
    try:
        return urlsplit(address)
    except ValueError:
        return None


def _message(html: str) -> str:
    return _wrapped(f'<p class="zoo-note">{html}</p>')


def _wrapped(html: str) -> str:
    return f'<div class="zoo-md">{html}</div>'
