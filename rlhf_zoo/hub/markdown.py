"""Renders an untrusted card as HTML that runs nothing and requests nothing from any other host.

Raw HTML is shown as text, except for collapsible sections: `details` with a `summary`. Links may lead to http and https
addresses, to a heading of the card, and to addresses that the `Resolver` returns.
"""

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Protocol
from urllib.parse import SplitResult, unquote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

MAX_CARD_BYTES = 2**17  # the parser needs up to 60 µs per byte of a hostile card
MAX_ADDRESS_LENGTH = 120
_DETAILS = re.compile(r"^(?:(</details>)|<details><summary>(.*)</summary>)$", re.MULTILINE)
_ALERT = re.compile(r"\[!(NOTE|TIP|IMPORTANT|WARNING|CAUTION)\]")


class Resolver(Protocol):
    """Decides where the addresses in a card lead."""

    def image(self, address: str) -> str | None:
        """Returns the source of an image; None to show the alternative text and the address instead."""

    def link(self, address: str) -> str | None:
        """Returns the target of a link that is neither http(s) nor a heading; None to show its text and address."""

    def code_link(self, content: str) -> str | None:
        """Returns the link target for inline code, such as a repository's name; None for no link."""


def card_body(source: str) -> str:
    """Returns a card without its front matter: YAML between two lines `---` at the start of the file.

    Args:
        source: The content of README.md.
    """
    lines = source.removeprefix("\N{BYTE ORDER MARK}").splitlines(keepends=True)
    if lines and lines[0].rstrip() == "---":
        for number, line in enumerate(lines[1:], 2):
            if line.rstrip() == "---":
                return "".join(lines[number:])
    return "".join(lines)


def render_card(source: str, resolver: Resolver, *, id_prefix: str, levels: int = 1) -> str:
    """Renders Markdown (CommonMark with tables and strikethrough) as HTML.

    Args:
        source: The Markdown, without front matter.
        resolver: Decides where addresses lead.
        id_prefix: Prefix of the headings' ids, so that they differ from the ids of the page that shows the card.
        levels: Number of levels by which headings move down, below the headings of the page that shows the card.
    """
    markdown = MarkdownIt("commonmark", {"html": False}, renderer_cls=_Renderer).enable(["table", "strikethrough"])
    tokens = _parse(markdown, source)
    heading_ids = _shift_headings(tokens, id_prefix, levels)
    for token in tokens:
        if token.children:
            token.children = list(_safe_tokens(token.children, resolver, heading_ids))
    return str(markdown.renderer.render(tokens, markdown.options, {}))


def split_address(address: str) -> SplitResult | None:
    """Splits an address into its parts; None if it is malformed.

    Args:
        address: Any text.
    """
    try:
        return urlsplit(address)
    except ValueError:
        return None


class _Renderer(RendererHTML):
    """Renders CommonMark, with tables and code blocks that can be scrolled by keyboard."""

    def table_open(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        return '<div class="zoo-scroll" role="group" aria-label="Table" tabindex="0">\n<table>\n'

    def table_close(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        return "</table>\n</div>\n"

    def fence(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        return _make_scrollable(super().fence(tokens, index, options, env))

    def code_block(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        return _make_scrollable(super().code_block(tokens, index, options, env))


def _make_scrollable(code: str) -> str:
    """Makes a block of code scrollable by keyboard: it may be wider than a phone's screen."""
    return code.replace("<pre", '<pre role="group" aria-label="Code" tabindex="0"', 1)


def _parse(markdown: MarkdownIt, source: str) -> list[Token]:
    """Parses a card, in which `<details><summary>TITLE</summary>` and `</details>` must each be a line of their own.

    Adds missing closing tags and drops surplus ones, so that a card cannot close an element of the page.
    """
    tokens: list[Token] = []
    depth = 0
    # `split` returns text, the two groups of a match (a closing tag and a title; one of them is None), text, and so on.
    for number, piece in enumerate(_DETAILS.split(source)):
        if number % 3 == 0:
            tokens += markdown.parse(piece)
        elif number % 3 == 2 and piece is not None:
            depth += 1
            tokens.append(Token("html_block", "", 0, content=f"<details><summary>{escape(piece)}</summary>\n"))
        elif number % 3 == 1 and piece and depth:
            depth -= 1
            tokens.append(Token("html_block", "", 0, content="</details>\n"))
    return [*tokens, Token("html_block", "", 0, content="</details>\n" * depth)]


def _shift_headings(tokens: Sequence[Token], id_prefix: str, levels: int) -> dict[str, str]:
    """Moves each heading down by some levels and gives it an id. Returns anchor -> id.

    Anchors have the Hub's form: lower case, with hyphens for spaces.
    """
    ids: dict[str, str] = {}
    for index, token in enumerate(tokens):
        if token.type not in ("heading_open", "heading_close"):
            continue
        token.tag = f"h{min(int(token.tag[1:]) + levels, 6)}"
        if token.type == "heading_open":
            title = _plain_text(tokens[index + 1].children or ()).lower().strip()
            anchor = "".join(char for char in title if char.isalnum() or char in " -_").replace(" ", "-")
            if anchor and anchor not in ids:
                ids[anchor] = f"{id_prefix}{anchor}"
                token.attrs["id"] = ids[anchor]
    return ids


def _safe_tokens(tokens: Sequence[Token], resolver: Resolver, heading_ids: dict[str, str]) -> Iterable[Token]:
    """Yields inline tokens: links code, puts an alert's kind on its own line, shows refused links or images as text."""
    closing_tokens: list[Token] = []  # replace the closing token of the current link
    after_alert = False
    for token in tokens:
        if after_alert and token.type == "softbreak":
            token = Token("hardbreak", "br", 0)  # as on the Hub, the kind of an alert is on a separate line
        after_alert = False
        if token.type == "image":
            yield from _image_tokens(token, resolver)
        elif token.type == "text" and (alert := _ALERT.fullmatch(token.content)):
            yield from (Token("strong_open", "strong", 1), _text_token(alert[1].capitalize()))
            yield Token("strong_close", "strong", -1)
            after_alert = True
        elif token.type == "link_open":
            attributes = _link_attributes(str(token.attrs.get("href", "")), resolver, heading_ids)
            if attributes is None:
                closing_tokens = [] if token.markup == "autolink" else _address_tokens(str(token.attrs.get("href", "")))
            else:
                token.attrs = dict(attributes)
                closing_tokens = [Token("link_close", "a", -1)]
                yield token
        elif token.type == "link_close":
            yield from closing_tokens
            closing_tokens = []
        elif (
            token.type == "code_inline"
            and not closing_tokens
            and (target := resolver.code_link(token.content)) is not None
        ):
            yield from (Token("link_open", "a", 1, attrs={"href": target}), token, Token("link_close", "a", -1))
        else:
            yield token


def _link_attributes(address: str, resolver: Resolver, heading_ids: dict[str, str]) -> dict[str, str] | None:
    """Returns the attributes of a link; None if the address is not allowed."""
    if address.startswith("#"):
        heading_id = heading_ids.get(unquote(address[1:]))
        return {"href": f"#{heading_id}"} if heading_id else None
    parts = split_address(address)
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        target = resolver.link(address)
        return {"href": target} if target is not None else None
    return {"href": address, "rel": "noopener noreferrer nofollow", "target": "_blank"}


def _image_tokens(token: Token, resolver: Resolver) -> list[Token]:
    address, alternative_text = str(token.attrs.get("src", "")), _plain_text(token.children or ())
    uri = resolver.image(address)
    if uri is None:
        return [_text_token(alternative_text or "image"), *_address_tokens(address)]
    token.attrs = {"src": uri, "alt": alternative_text, "class": "zoo-plot"}
    return [token]


def _address_tokens(address: str) -> list[Token]:
    """Returns an address in parentheses, as text."""
    excerpt = address if len(address) <= MAX_ADDRESS_LENGTH else address[: MAX_ADDRESS_LENGTH - 1] + "…"
    return [_text_token(" ("), Token("code_inline", "code", 0, content=excerpt), _text_token(")")] if address else []


def _text_token(content: str) -> Token:
    return Token("text", "", 0, content=content)


def _plain_text(tokens: Iterable[Token]) -> str:
    """Returns the text of inline tokens, without markup."""
    return "".join(
        _plain_text(token.children) if token.children else " " if "break" in token.type else token.content
        for token in tokens
    )
