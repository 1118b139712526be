"""Renders the card of a checkpoint, which is not trusted, as HTML that makes no request to any host.

Raw HTML is shown as text, except for `details` with a `summary`. Images in the checkpoint's folder become data: URIs;
any other image is replaced by its alternative text and address. Links may lead only to http and https addresses, and to
headings of the card.
"""

import base64
from io import BytesIO
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from PIL import Image

from ...hub.markdown import MAX_CARD_BYTES, card_body, render_card, split_address
from .html import escape_text

MAX_IMAGE_BYTES = 2 * 2**20  # of one image
MAX_TOTAL_IMAGE_BYTES = 8 * 2**20  # of all images of a card, as data: URIs
MAX_PIXELS = 20_000_000
# SVG is left out, because it can contain scripts and links.
IMAGE_FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "GIF": "image/gif", "WEBP": "image/webp"}
ID_PREFIX = "zoo-card-"


def card_html(folder: Path) -> str:
    """Renders README.md of a checkpoint as HTML, in an element of class `zoo-md`.

    Args:
        folder: The checkpoint. In the Hub's cache, its files may be links into `blobs`; any other link out is refused.

    Returns:
        HTML; a message instead of the card if there is none or it cannot be shown.
    """
    resolver = _CardResolver(folder)
    path = resolver.find("README.md")
    if path is None:
        return _message_html(
            "This checkpoint has no card (README.md). <code>rlhf-zoo card</code> writes one from its run directory."
        )
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_CARD_BYTES + 1)
    except OSError as error:
        return _message_html(
            f"The card of this checkpoint cannot be read: {escape_text(error.strerror or 'unknown reason')}."
        )
    if len(content) > MAX_CARD_BYTES:
        return _message_html(
            f"The card of this checkpoint exceeds {MAX_CARD_BYTES // 1024} KiB and is not shown here: read "
            "README.md in its repository."
        )
    return _wrap(render_card(card_body(content.decode("utf-8", errors="replace")), resolver, id_prefix=ID_PREFIX))


class _CardResolver:
    """Finds the files and images that a card refers to, within the checkpoint's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        root = folder.resolve()
        self._roots = [root]
        if root.parent.name == "snapshots":  # a folder of the Hub's cache
            self._roots.append(root.parent.parent / "blobs")
        self._remaining_bytes = MAX_TOTAL_IMAGE_BYTES
        self._uris: dict[str, str | None] = {}

    def find(self, name: str) -> Path | None:
        """Returns a regular file inside the folder; None for any other path."""
        parts = PurePosixPath(name).parts
        if not parts or "\\" in name or not name.isprintable() or ".." in parts or name.startswith("/"):
            return None
        try:
            path = self._folder.joinpath(*parts).resolve(strict=True)
            is_inside = any(path.is_relative_to(root) for root in self._roots)
            return path if is_inside and path.is_file() else None
        except (OSError, RuntimeError):  # a missing file, a name that is too long, or circular links
            return None

    def link(self, address: str) -> str | None:
        """Returns None: the page serves no files of a checkpoint."""
        return None

    def code_link(self, content: str) -> str | None:
        """Returns None: the page links to no other repository."""
        return None

    def image(self, address: str) -> str | None:
        """Returns an image as a data: URI; None if it may not be shown, or if the card's images exceed their limit."""
        if address not in self._uris:
            self._uris[address] = self._read_image(address)
        uri = self._uris[address]
        if uri is None or len(uri) > self._remaining_bytes:
            return None
        self._remaining_bytes -= len(uri)
        return uri

    def _read_image(self, address: str) -> str | None:
        parts = split_address(address)
        path = self.find(unquote(address)) if parts is not None and not parts.scheme and not parts.netloc else None
        if path is None:
            return None
        try:
            with path.open("rb") as stream:
                content = stream.read(MAX_IMAGE_BYTES + 1)
            if len(content) > MAX_IMAGE_BYTES:
                return None
            with Image.open(BytesIO(content), formats=tuple(IMAGE_FORMATS)) as image:
                image_format, (width, height) = image.format, image.size
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # not an image of an allowed format
            return None
        if image_format not in IMAGE_FORMATS or width * height > MAX_PIXELS:
            return None
        return f"data:{IMAGE_FORMATS[image_format]};base64,{base64.b64encode(content).decode('ascii')}"


def _message_html(html: str) -> str:
    return _wrap(f'<p class="zoo-note">{html}</p>')


def _wrap(html: str) -> str:
    return f'<div class="zoo-md">{html}</div>'
